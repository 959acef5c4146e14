"""A training loop of the kind people write for torchrun; run by `test_foreign_ranks`. Not a test itself."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from phalanx.checkpoint import Checkpointer
from phalanx.core.config import parse_override


class Sampler:
    """A position of its own on every rank, with a tensor in it."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.drawn = [0] * rank

    def draw(self) -> torch.Tensor:
        self.drawn.append(len(self.drawn))
        return torch.rand(4, 5, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.drawn = state["drawn"]


def build(mode: str) -> nn.Module:
    torch.manual_seed(random.randrange(10**6))  # differs in every start: the checkpoint has to make up for it
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.1), nn.Linear(7, 3))
    if dist.get_world_size() == 1:
        return model
    if mode == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[3], model):
        fully_shard(part, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, Any]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in inner.named_parameters()}
    return {name: tensor.tolist() for name, tensor in full.items()}


def gloo_threads() -> int:
    """Threads of gloo groups; the two of the default one take their name once they run, which is waited for."""
    while True:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        found = sum(name.startswith("pt_gloo") for name in names)
        if found >= 2:
            return found
        os.sched_yield()


def _is_kept_soon(checkpoints: Checkpointer) -> bool:
    """Whether the keeper has a snapshot, within a second.

    On a busy machine all steps may be over before it has taken any: what it is too busy for is put off to a later step.
    """
    until_s = time.monotonic() + 1.0
    while not checkpoints._session.events():
        if time.monotonic() > until_s:
            return False
        os.sched_yield()
    return True


def train(folder: str, mode: str, steps: int, kill_at: int, *overrides: str) -> dict[str, Any]:
    """One rank; MODE is ddp or fsdp, and with `kill_at` it kills itself at this step."""
    settings = dict(parse_override(text) for text in overrides)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(mode)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if mode == "ddp":  # each rank has the state of some parameters
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    sampler = Sampler(rank)
    losses: dict[int, float] = {}
    threads, is_kept = gloo_threads(), False
    with Checkpointer(folder, model=model, optimizer=optimizer, extra={"sampler": sampler}, **settings) as checkpoints:
        start = checkpoints.restore()
        if start == 0:
            torch.manual_seed(rank)  # dropout differs between ranks
            weights = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local.copy_(torch.rand(local.shape, generator=weights) - 0.5)
        for step in range(start + 1, steps + 1):
            loss = model(sampler.draw()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            checkpoints.before_update()
            optimizer.step()
            losses[step] = loss.item()
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.step(step, metrics={"validation_loss": loss.item()})
            if kill_at and "memory_every_steps" in settings and not is_kept:
                is_kept = _is_kept_soon(checkpoints)
        end = {"start": start, "losses": losses, "drawn": len(sampler.drawn), "weights": whole(model)}
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            state, numbered = optimizer.optim.state, enumerate(model.parameters())
            end["moments"] = {n: state[p]["exp_avg"].tolist() for n, p in numbered if p in state}
    end["threads_left"] = gloo_threads() - threads
    dist.destroy_process_group()
    return end
