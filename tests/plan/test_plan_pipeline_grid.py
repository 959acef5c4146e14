"""The arrays behind `evaluate`: the same lists as the tables, and rows that really repeat."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.plan.pipeline import grid as grids
from phalanx.plan.pipeline.grid import Grid, make_orders, round_length

SIZES: list[tuple[Schedule, int, int]] = [
    *(("1f1b", ranks, 1) for ranks in (1, 2, 3, 4, 7, 8, 13, 16)),
    *(("zbv", ranks, 2) for ranks in (1, 2, 3, 4, 7, 8, 12)),
    *(
        (schedule, ranks, chunks)
        for schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        for ranks in (1, 2, 3, 4, 7, 8)
        for chunks in (1, 2, 3, 6)
    ),
]


@pytest.mark.parametrize(("schedule", "ranks", "chunks"), SIZES)
def test_lists_are_those_of_the_tables(schedule: Schedule, ranks: int, chunks: int) -> None:
    interleaved = schedule.startswith("interleaved")
    counts = [m for m in range(ranks, 4 * ranks + 3) if not interleaved or m % (m // ranks) == 0]
    parts = {"F": 0, "B": 1, "I": 1, "W": 2}
    for count in counts:
        table = make_table(schedule, ranks, chunks, count)
        per_round = round_length(schedule, ranks, chunks, count)
        orders = make_orders(schedule, ranks, chunks, per_round, count // per_round)
        for rank, row in enumerate(table.actions):
            assert orders.codes[rank].tolist() == [parts[a.kind] * orders.stages + a.stage for a in row]
            assert orders.micro_batch[rank].tolist() == [a.micro_batch for a in row]


@pytest.mark.parametrize(("schedule", "ranks", "chunks"), SIZES)
def test_a_step_with_two_rounds_more_is_the_same_rows_with_two_repetitions_more(
    schedule: Schedule, ranks: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the jump over rounds rests on; rounds of an odd length too."""
    lengths = range(ranks, ranks + ranks // 3 + 1) if schedule.startswith("interleaved") else [1]
    enough = grids._enough_rounds(schedule, ranks)
    for per_round in lengths:
        grid = grids._make_grid.__wrapped__(schedule, ranks, chunks, per_round, enough)
        assert grid.repeat is not None
        with monkeypatch.context() as patch:
            patch.setattr(grids, "_enough_rounds", lambda *_: 1 << 40)
            whole = grids._make_grid.__wrapped__(schedule, ranks, chunks, per_round, enough + 2)
        assert whole.repeat is None
        assert np.array_equal(_codes(grid, 3), whole.head.codes)
        assert np.array_equal(_sources(grid, 3), whole.head.sources)
        after = len(grid.head.codes) + 3 * len(grid.repeat.codes)
        assert np.array_equal(grid.ends + after, whole.ends)
        assert np.array_equal(grid.last_backward + after, whole.last_backward)
        assert np.array_equal(grid.first_forward, whole.first_forward)
        assert np.array_equal(grid.in_flight, whole.in_flight)


def _codes(grid: Grid, times: int) -> np.ndarray:
    assert grid.repeat is not None
    return np.concatenate([grid.head.codes, *[grid.repeat.codes] * times, grid.tail.codes])


def _sources(grid: Grid, times: int) -> np.ndarray:
    """As if all of it were the head."""
    assert grid.repeat is not None
    sources, begin = [grid.head.sources], len(grid.head.codes)
    for rows in (*[grid.repeat] * times, grid.tail):
        sources.append(rows.sources + begin + grid.orders.ranks - grid.window)
        begin += len(rows.codes)
    return np.concatenate(sources)
