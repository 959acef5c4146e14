"""What ranks are made to do by tests of silent corruption: bits that flip on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phalanx.launch.environment import Worker
from phalanx.parallel.engine import Engine
from phalanx.train import state_digests
from phalanx.train.config import RunConfig
from phalanx.train.session import rank_status
from phalanx.train.training_run import Run


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place; bits are counted from the lowest."""
    octets = tensor.detach().view(-1).view(torch.uint8)
    octets[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def train_with_a_flip(worker: Worker, config: RunConfig, rank: int, step: int, name: str) -> int:
    """Train, but on one rank the lowest bit of the first element of a tensor flips after the update of a step."""
    updated = Run.updated

    def flipping(run: Run) -> Any:
        updated(run)
        if (worker.rank, run.progress.step + 1) == (rank, step):
            flip(run.state_tensors()[name], 0, 0)

    Run.updated = flipping  # type: ignore[method-assign]
    return rank_status(worker, config, Path("tiny.toml"))


def flip_where_programs_differ(worker: Worker, *arguments: Any) -> int:
    """As `train_with_a_flip`, on ranks of which each says that it computes in a way of its own."""
    state_digests.program_of = lambda _: f"of rank {worker.rank}"  # type: ignore[attr-defined]
    return train_with_a_flip(worker, *arguments)


def train_with_wrong_arithmetic(worker: Worker, config: RunConfig, rank: int, calls: list[int]) -> int:
    """Train, but on one rank some products of a layer have one bit wrong.

    Args:
        calls: which replays of that rank, counted from 0.
    """
    replay, made = Engine.replay, [0]

    def wrong(engine: Engine, *arguments: Any, **named: Any) -> torch.Tensor:
        hooks = []
        if worker.rank == rank and made[0] in calls:

            def spoil(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
                output = output.clone()
                flip(output, 5, 20)
                return output

            hooks.append(engine.blocks[0].register_forward_hook(spoil))
        made[0] += 1
        digest = replay(engine, *arguments, **named)
        for hook in hooks:
            hook.remove()
        return digest

    Engine.replay = wrong  # type: ignore[method-assign]
    return rank_status(worker, config, Path("tiny.toml"))
