"""Collectives and point-to-point messages among all ranks that measure, by kind and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.checks.calibration.stopwatch import Case
from phalanx.parallel.group import Group


def cases(sizes_bytes: Sequence[int], group: Group, device: torch.device) -> list[Case]:
    """Each kind for each size of the whole message: gathered, or not yet reduced."""
    found = []
    for num_bytes in sizes_bytes:
        whole = torch.ones(max(1, num_bytes // 4 // group.size) * group.size, device=device)
        part = torch.ones(len(whole) // group.size, device=device)
        sizes = {"num_bytes": 4 * len(whole), "ranks": group.size}
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": _waited(group.all_reduce, torch.zeros_like(whole)),
            "all_gather": _waited(group.all_gather, torch.empty_like(whole), part),
            "reduce_scatter": _waited(group.reduce_scatter, torch.empty_like(part), whole),
            "all_to_all": _waited(group.all_to_all, torch.empty_like(whole), whole),
        }
        found += [Case(kind, sizes, "fp32", run) for kind, run in runs.items()]
        found.append(Case("send", sizes, "fp32", _exchange(group, whole)))
    return found


def _waited(start: Callable[..., object], *tensors: Tensor) -> Callable[[], object]:
    return lambda: start(*tensors).wait()  # type: ignore[attr-defined]


def _exchange(group: Group, x: Tensor) -> Callable[[], object]:
    """Every rank sends to the next one while it receives from the one before, as in a pipeline and in a ring."""
    got = torch.empty_like(x)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def run() -> None:
        # NCCL does them in this order: were all to send first, all would wait.
        if group.index % 2:
            receiving = group.receive(got, before)
            sending = group.send(x, after)
        else:
            sending = group.send(x, after)
            receiving = group.receive(got, before)
        receiving.wait()
        sending.wait()

    return run
