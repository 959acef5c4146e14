"""The recurrence itself: rows of actions from the rows above them, and the jump over rounds that repeat. Torch-free.

A step's time is its longest path: additions and maxima only. Such a system never enlarges a difference: if two states
of all ranks differ by at most e, so do the states that follow from them. So once the ends of a round are those of an
earlier one plus the same time for all, later rounds can be had by adding that time, and no error grows.

Ends are worked out as what they are beyond the rank's own work, which leaves one addition and one maximum per action.
"""

from __future__ import annotations

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
    """When the actions of a step end, for several sets of costs: by cell of the grid's head, and of its tail, and set.

    Args:
        repetitions: of `grid.repeat`.
        durations: of every code and of no action, by set.
        delays: of a message over every boundary and of no message, by set.
    """
    ranks, sets = grid.orders.ranks, durations.shape[1]
    head = _advance(np.zeros((ranks, sets)), grid.head, 1, ranks, durations, delays)
    if grid.repeat is None:
        return head, head
    window = _repeat(head[-grid.window :], grid.repeat, repetitions, ranks, durations, delays)
    return head, _advance(window, grid.tail, 1, ranks, durations, delays)


def _repeat(window: Array, rows: Rows, rounds: int, ranks: int, durations: Array, delays: Array) -> Array:
    """The window after `rounds` more rounds."""
    seen = window[None]
    step = 1
    while rounds:
        step = min(step, rounds)
        ends = _advance(seen[-1], rows, step, ranks, durations, delays)
        seen = np.concatenate([seen[-_LONGEST:], ends.reshape(step, -1, window.shape[1])[:, -len(window) :]])
        rounds -= step
        window = seen[-1]
        settled = _settled(seen, rounds)
        if settled:
            lag, growth = settled
            jumps, rest = divmod(rounds, lag)
            window = seen[rest - lag - 1] + (jumps + 1) * growth
            break
        step = min(2 * step, max(1, _ROWS * ranks // len(rows.codes)))
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


def _advance(window: Array, rows: Rows, times: int, ranks: int, durations: Array, delays: Array) -> Array:
    """The ends of all cells of `rows`, `times` times after one another, after those in `window`."""
    cells, sets = len(rows.codes), window.shape[1]
    sources = rows.sources
    if times > 1:
        sources = (sources + np.arange(0, times * cells, cells)[:, None]).ravel()
    adds = np.tile(durations[rows.codes], (times, 1))
    work: Array = np.cumsum(adds.reshape(-1, ranks, sets), axis=0).reshape(-1, sets)
    slack = np.concatenate([np.zeros_like(window), work])[sources]
    slack += np.tile(delays[rows.messages], (times, 1))
    slack += adds
    slack -= work
    if ranks * sets >= _WIDE:
        work += _row_by_row(window, sources, slack, ranks)
        return work
    listed = rows.listed if times == 1 else sources.tolist()
    for one in range(sets):
        work[:, one] += _cell_by_cell(window[:, one].tolist(), listed, slack[:, one].tolist(), ranks)
    return work


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
