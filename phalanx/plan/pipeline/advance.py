"""The recurrence itself: rows of actions from the rows above them, and the jump over rounds that repeat. Torch-free.

A step's time is its longest path: additions and maxima only. Such a system never enlarges a difference: if two states
of all ranks differ by at most e, so do the states that follow from them. So once the ends of a round are those of an
earlier one plus the same time for all, later rounds can be had by adding that time, and no error grows.

Ends are worked out as what they are beyond the rank's own work, which leaves one addition and one maximum per action.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from phalanx.plan.pipeline.costs import Array
from phalanx.plan.pipeline.grid import Grid, Rows
from phalanx.plan.pipeline.orders import Indices

_WIDE = 40
"""Cells, of all sets, in a row from which on NumPy, a row at a time, is faster than Python, a cell at a time."""
_EXACT = 1e-11
"""What the jump may add to the error of the step's time, relative."""
_ROUNDING = 1e-15
_LONGEST = 256
"""Rounds among which one that is alike is looked for; mostly it is not further back than there are ranks."""
_ROWS = 64
"""Rows that are worked out, unless a round has more, before the next look back."""


def run_grid(grid: Grid, repetitions: int, durations: Array, delays: Array) -> tuple[Array, Array]:
    """When the actions in the cells `first_forward` and in `late` of the grid end, by cell and set, for several costs.

    Args:
        repetitions: of `grid.repeat`.
        durations: of every code and of no action, by set.
        delays: of a message over every boundary and of no message, by set.
    """
    ranks, sets, early = grid.orders.ranks, durations.shape[1], len(grid.first_forward)
    head = _Slack.of(grid.head, 1, ranks, ranks, durations, delays)
    begin = np.zeros((ranks, sets))
    if grid.repeat is None:
        ends = head.ends(begin, np.concatenate([grid.first_forward, grid.late]))
        return ends[:early], ends[early:]
    last = np.arange(len(grid.head.codes) - grid.window, len(grid.head.codes))
    ends = head.ends(begin, np.concatenate([grid.first_forward, last]))
    window = _repeat(ends[early:], grid.repeat, repetitions, ranks, durations, delays)
    tail = _Slack.of(grid.tail, 1, grid.window, ranks, durations, delays)
    return ends[:early], tail.ends(window, grid.late)


def _repeat(window: Array, rows: Rows, rounds: int, ranks: int, durations: Array, delays: Array) -> Array:
    """The window after `rounds` more rounds."""
    seen, cells = window[None], len(rows.codes)
    step = 1
    slack = None
    while rounds:
        step = min(step, rounds)
        if slack is None or slack.times != step:
            slack = _Slack.of(rows, step, len(window), ranks, durations, delays)
        last = np.arange(cells - len(window), cells) + np.arange(0, step * cells, cells)[:, None]
        ends = slack.ends(seen[-1], last.ravel())
        seen = np.concatenate([seen[-_LONGEST:], ends.reshape(step, *window.shape)])
        rounds -= step
        window = seen[-1]
        settled = _settled(seen, rounds)
        if settled:
            lag, growth = settled
            jumps, rest = divmod(rounds, lag)
            window = seen[rest - lag - 1] + (jumps + 1) * growth
            break
        step = min(2 * step, max(1, _ROWS * ranks // cells))
    return window


def _settled(seen: Array, rounds: int) -> tuple[int, Array] | None:
    """How many rounds ago all cells were less by the same time, and by how much, of each set; None: they never were.

    Args:
        rounds: still to come; the more there are, the more exactly times have to agree.
    """
    growth = seen[-1] - seen[:-1]
    least, most = growth.min(axis=1), growth.max(axis=1)
    close = most - least <= seen[-1].max(axis=0) * max(_EXACT / max(rounds, 1), _ROUNDING)
    found = np.flatnonzero(close.all(axis=1))
    return (len(growth) - int(found[-1]), (least + most)[found[-1]] / 2) if len(found) else None


@dataclass(frozen=True, eq=False)
class _Slack:
    """Rows of cells, `times` times after one another, ready to be worked out from the ends in their window.

    Attributes:
        ranks: cells of a row.
        sources: as in `Rows`.
        work: of the rank up to each cell's end, by cell and set.
        slack: from a cell's source to the cell, beyond the work of both their ranks, by cell and set.
    """

    rows: Rows
    times: int
    ranks: int
    sources: Indices
    work: Array
    slack: Array

    @classmethod
    def of(cls, rows: Rows, times: int, window: int, ranks: int, durations: Array, delays: Array) -> _Slack:
        """Behind a window of so many cells."""
        cells, sets = len(rows.codes), durations.shape[1]
        sources, adds, waits = rows.sources, durations.take(rows.codes, axis=0), delays.take(rows.messages, axis=0)
        if times > 1:
            sources = (sources + np.arange(0, times * cells, cells)[:, None]).ravel()
            adds, waits = np.tile(adds, (times, 1)), np.tile(waits, (times, 1))
        done = np.zeros((window + times * cells, sets))  # nothing up to the window
        work = done[window:]
        np.cumsum(adds.reshape(-1, ranks, sets), axis=0, out=work.reshape(-1, ranks, sets))
        slack = done.take(sources, axis=0)
        slack += waits
        slack += adds
        slack -= work
        return cls(rows, times, ranks, sources, work, slack)

    def ends(self, window: Array, cells: Indices) -> Array:
        """When the actions in some cells end, by cell and set."""
        sets = window.shape[1]
        if self.ranks * sets >= _WIDE:
            beyond = _row_by_row(window, self.sources, self.slack, self.ranks)[cells]
        else:
            beyond = np.array([self._one_by_one(window, one, cells.tolist()) for one in range(sets)]).T
        return self.work[cells] + beyond

    def _one_by_one(self, window: Array, one: int, cells: list[int]) -> list[float]:
        sources = self.rows.listed if self.times == 1 else self.sources.tolist()
        ends = _cell_by_cell(window[:, one].tolist(), sources, self.slack[:, one].tolist(), self.ranks)
        return [ends[cell] for cell in cells]


def _row_by_row(window: Array, sources: Indices, slack: Array, ranks: int) -> Array:
    """What ends are beyond the rank's work: of the cell above, or of the source plus slack, whichever is more."""
    ends: Array = np.concatenate([window, np.empty_like(slack)])
    shape = (-1, ranks, slack.shape[1])
    rows = list(ends.reshape(shape)[len(window) // ranks - 1 :])
    above = rows[0]
    for row, source, late in zip(rows[1:], sources.reshape(-1, ranks), slack.reshape(shape), strict=True):
        ends.take(source, axis=0, out=row, mode="clip")  # all are inside; "raise" would write to a copy first
        np.add(row, late, out=row)
        np.maximum(row, above, out=row)
        above = row
    return ends[len(window) :]


def _cell_by_cell(window: list[float], sources: list[int], slack: list[float], ranks: int) -> list[float]:
    """The same for one set of costs."""
    ends = window[:]
    put = ends.append
    above = islice(ends, len(window) - ranks, None)  # grows as it is read, always a row ahead
    for before, source, late in zip(above, sources, slack, strict=False):
        ready = ends[source] + late
        put(ready if ready > before else before)
    return ends[len(window) :]
