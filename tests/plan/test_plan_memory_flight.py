"""Passes that a pipeline rank holds, beside the tables of the schedules themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import Table, make_table
from phalanx.plan.pipeline.grid import held

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


def counted(table: Table, rank: int, kept: list[float], waiting: list[float]) -> float:
    """The most that a rank holds of passes that weigh `kept` and, before their weight gradients, `waiting`."""
    chunk_of = {stage: chunk for chunk, stage in enumerate(table.placement.stages_of(rank))}
    change = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
    weights = (
        change[a.kind][0] * kept[chunk_of[a.stage]] + change[a.kind][1] * waiting[chunk_of[a.stage]]
        for a in table.actions[rank]
    )
    return max(itertools.accumulate(weights))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_fullest_moment_is_that_of_the_table(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(SCHEDULES))
    ranks = data.draw(st.integers(1, 7))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or data.draw(st.integers(1, 4))
    micro_batches = data.draw(st.integers(ranks, 5 * ranks + 3))
    try:
        table = make_table(schedule, ranks, chunks, micro_batches)
    except UserError:
        return  # a number of micro-batches that makes no equal rounds
    kept = data.draw(st.lists(st.floats(0.1, 10), min_size=chunks, max_size=chunks))
    waiting = data.draw(st.lists(st.floats(0, 10), min_size=chunks, max_size=chunks))
    for rank in range(ranks):
        found = held(schedule, ranks, chunks, micro_batches, rank)
        most = (found.live @ np.array(kept) + found.waiting @ np.array(waiting)).max()
        assert most == pytest.approx(counted(table, rank, kept, waiting))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(8, 1, 192), (8, 3, 64), (35, 3, 280), (8, 6, 32)])
def test_megatrons_interleaving_holds_a_little_more(ranks: int, chunks: int, micro_batches: int) -> None:
    """Korthikanti et al., arXiv 2205.05198, section 4.2.3: L (1 + (p - 1) / (p v)) layers on the first rank."""
    schedule: Schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    most = held(schedule, ranks, chunks, micro_batches, 0).live.sum(axis=1).max()
    expected = ranks * chunks * (1 + (ranks - 1) / (ranks * chunks)) if chunks > 1 else ranks
    assert most == pytest.approx(expected)


def test_a_v_holds_as_much_on_every_rank() -> None:
    """Two chunks, each half of a stage: as much as the first rank of 1F1B (arXiv 2401.10241, section 6)."""
    assert {(f.live + f.waiting).sum(axis=1).max() for f in (held("zbv", 6, 2, 24, r) for r in range(6))} == {12}
