"""A model to be trained for real by each of two processes, and what it costs on the whole machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from phalanx.kernels.host_memory import keep_freed_memory
from phalanx.parallel.group import Group

MARK = "PHALANX_STALL_BENCHMARK"
"""In the environment of every process of a run, those of the keeper and of others' savers included."""

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Size:
    """Attributes: layers: matrices of `width` × `width`; rows: of a batch, in each process."""

    layers: int
    width: int
    rows: int

    @property
    def parameters(self) -> int:
        return self.layers * self.width**2


class Task:
    """One rank: parameters of its own (as a shard would be), fp32, with AdamW's two moments."""

    def __init__(self, size: Size, rank: int) -> None:
        torch.manual_seed(rank)
        torch.set_num_threads(1)
        keep_freed_memory()  # as `phalanx train` does
        self.rank = rank
        scale = size.width**-0.5
        self.weights = [torch.nn.Parameter(torch.randn(size.width, size.width) * scale) for _ in range(size.layers)]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=True)
        self.x = torch.randn(size.rows, size.width)

    def gradients(self) -> None:
        y = self.x
        for weight in self.weights:
            y = torch.relu(y @ weight)
        (y - self.x).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds, by names that no other rank has."""
        found: dict[str, Tensor] = {}
        for index, weight in enumerate(self.weights):
            name = f"rank{self.rank}.{index}"
            found[f"model.{name}"] = weight.detach()
            for key, value in self.optimizer.state[weight].items():
                found[f"optim.{name}.{key}"] = value
        return found


def meet(rank: int, address: str) -> tuple[Group, TCPStore]:
    """The two ranks; `address` is ``host:port``."""
    host, _, port = address.partition(":")
    store = TCPStore(host, int(port), 2, is_master=rank == 0, timeout=_TIMEOUT, wait_for_workers=False)
    backend = ProcessGroupGloo(PrefixStore("ours", store), rank, 2, _TIMEOUT)
    return Group((0, 1), rank, lambda: backend, ("replicate",)), store


def timed(step: Callable[[], None], group: Group) -> float:
    """Seconds of one step, until all ranks have done it."""
    began_s = time.perf_counter()
    step()
    group.barrier()
    return time.perf_counter() - began_s


def memory_bytes() -> int:
    """Proportional set size of all processes of this run together: what they share counts once."""
    mark, total = os.environ[MARK], 0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def cores_s() -> float:
    """Seconds of cores that all processes of this run together have taken so far."""
    mark, total = os.environ[MARK], 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total
