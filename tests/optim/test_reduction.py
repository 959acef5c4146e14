"""Matrices in two halves, on two threads that add up their sums, are updated as whole ones."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.optim.came import CAME
from phalanx.optim.lamb import LAMB

SPLIT = {"rows": 0, "columns": 1}
SHAPES = [(8, 6), (4, 10), (12, 12), (7, 6), (8, 6), (7, 7)]  # halves of 7 are stacked with others on one rank only


class Pair:
    """Adds the sums of two threads; a sum that leaves the split dimension standing is already complete."""

    def __init__(self, split: int) -> None:
        self.split = split
        self.barrier = threading.Barrier(2, timeout=120)
        self.given: list[list[Tensor]] = [[], []]
        self.calls = 0

    def of(self, rank: int) -> Any:
        def reduce(sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
            assert len(sums) == len(parameters)
            self.given[rank] = sums
            self.barrier.wait()
            complete = dim is not None and dim + 2 != self.split
            whole = sums if complete else [a + b for a, b in zip(*self.given, strict=True)]
            self.barrier.wait()
            self.calls += rank == 0
            return whole

        return reduce


def train(make: Any, ps: list[torch.nn.Parameter], gradients: list[list[Tensor]], *, on_device: bool = False) -> None:
    optimizer = make(ps)
    optimizer.as_on_device = on_device
    for step in gradients:
        for p, g in zip(ps, step, strict=True):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("split", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize(
    ("make", "settings"),
    [(LAMB, {"lr": 0.01, "max_grad_norm": 0.5}), (CAME, {"lr": 0.01, "clip_threshold": 0.3})],
    ids=["lamb", "came"],
)
def test_two_halves_are_one_matrix(make: Any, settings: dict[str, Any], split: int, on_device: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    steps = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES] for _ in range(3)]
    whole = [torch.nn.Parameter(p.clone()) for p in start]
    train(lambda ps: make(ps, **settings), whole, steps)

    pair = Pair(split)
    halves = [[torch.nn.Parameter(p.chunk(2, split)[rank].clone()) for p in start] for rank in range(2)]
    parts = [[[g.chunk(2, split)[rank] for g in step] for step in steps] for rank in range(2)]

    def work(rank: int) -> None:
        train(lambda ps: make(ps, reduction=pair.of(rank), **settings), halves[rank], parts[rank], on_device=on_device)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, left, right in zip(whole, *halves, strict=True):
        torch.testing.assert_close(torch.cat([left, right], split), mine, rtol=1e-11, atol=1e-13)
    per_step = {LAMB: 2, CAME: 7}[make]  # not per parameter; CAME also adds up each matrix's sizes, once
    assert pair.calls <= per_step * len(steps) + 3 * len(SHAPES)


@pytest.mark.parametrize("make", [LAMB, CAME])
def test_compiling_and_reducing_do_not_go_together(make: Any) -> None:
    with pytest.raises(ValueError, match="leave compile off"):
        make([torch.nn.Parameter(torch.zeros(2, 2))], reduction=Pair(0).of(0), compile=True)
