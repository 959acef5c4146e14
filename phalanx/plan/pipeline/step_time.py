"""The time of one step in a pipeline: exact by a recurrence over rows of actions, or in closed form for even stages.

A step's time is its longest path: additions and maxima only. Such a system never enlarges a difference: if two states
of all ranks differ by at most e, so do the states that follow from them. So once the ends of a round are those of an
earlier one plus the same time for all, later rounds can be had by adding that time, and no error grows.

Ends are worked out as what they are beyond the rank's own work, which leaves one addition and one maximum per action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.plan.pipeline.grid import Grid, Indices, Rows, make_few, make_grid
from phalanx.plan.types import Floats, Ints

Array: TypeAlias = NDArray[np.float64]


def evaluate(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, costs: StageCosts) -> StepTime:
    """When `micro_batches` passes through `ranks` pipeline ranks with `chunks` chunks each are done.

    Every rank does what `phalanx.parallel.pipeline.schedules` gives it, in that order, each action as soon as what it
    needs has come. Exact, and far faster than a walk over all actions: rounds that repeat themselves are skipped.
    """
    return _evaluate(schedule, *make_grid(schedule, ranks, chunks, micro_batches), micro_batches, costs)


def evaluate_few(ranks: int, micro_batches: int, costs: StageCosts) -> StepTime:
    """The same for 1F1B with fewer micro-batches than ranks, which other programs run and ours refuses.

    A rank runs as many forward passes ahead as there are ranks after it, or all; then forward and backward passes in
    turn.
    """
    return _evaluate("1f1b", make_few(ranks, micro_batches), 0, micro_batches, costs)


def _evaluate(schedule: Schedule, grid: Grid, repetitions: int, micro_batches: int, costs: StageCosts) -> StepTime:
    orders, parts = grid.orders, _parts(grid, costs)
    crossed = np.where(orders.crosses, costs.send_s, 0.0)
    sends = _sends(crossed, blocking=costs.blocking)
    names, durations, delays = _sets(schedule, parts, crossed, sends)
    early, late = run_grid(grid, repetitions, durations, delays)
    stages = orders.stages_of
    last = orders.last_part * orders.stages + stages
    by_stage = (orders.ranks, orders.chunks)
    ends = late[orders.stages :]
    ends[:, 0] -= sends[orders.codes[:, -1]]
    spans = dict(zip(names, ends.max(axis=0).tolist(), strict=True))
    both_ways = np.zeros(orders.stages)
    both_ways[:-1] = crossed
    both_ways[1:] += crossed
    return StepTime(
        **_shares(schedule, grid, parts, spans, micro_batches),
        span_s=spans["given"],
        sent_s=micro_batches * both_ways[stages].sum(axis=1),
        end_s=ends[:, 0],
        first_forward_begin_s=early[:, 0].reshape(by_stage) - durations[stages, 0],
        last_backward_end_s=late[: orders.stages, 0].reshape(by_stage) - sends[last],
        in_flight=grid.in_flight,
    )


def _shares(
    schedule: Schedule, grid: Grid, parts: Array, spans: Mapping[str, float], micro_batches: int
) -> dict[str, Array]:
    ranks, chunks = grid.orders.ranks, grid.orders.chunks
    busy = micro_batches * parts.sum(axis=0)[grid.orders.stages_of].sum(axis=1)
    if schedule == "zbv":
        even = spans["even"]
    else:
        even = float(even_span(schedule, ranks, chunks, micro_batches, *parts.mean(axis=1).tolist()))
    free, mean = spans.get("free", spans["given"]), float(busy.mean())
    return {
        "busy_s": busy,
        "bubble_s": np.full(ranks, even - mean),
        "imbalance_s": free - even + mean - busy,
        "sends_s": np.full(ranks, spans["given"] - free),
    }


def _parts(grid: Grid, costs: StageCosts) -> Array:
    """Seconds of every part of every stage.

    Raises:
        ValueError: `costs` are not of so many stages.
    """
    stages = grid.orders.stages
    backward = [costs.backward_input_s, costs.backward_weight_s] if grid.orders.splits else [costs.backward_s]
    parts = np.zeros((3, stages))
    for row, part in zip(parts, [costs.forward_s, *backward], strict=False):
        if len(part) != stages or len(costs.send_s) != stages - 1:
            raise ValueError(f"costs of {len(part)} stages and {len(costs.send_s)} boundaries, not of {stages} stages")
        row[:] = part
    return parts


def _sends(crossed: Array, *, blocking: bool) -> Array:
    """What is added to the duration of every code, and of none, for sending."""
    stages = len(crossed) + 1
    sends = np.zeros(3 * stages + 1)
    if blocking:
        sends[: stages - 1] = sends[stages + 1 : 2 * stages] = crossed
    return sends


def _sets(schedule: Schedule, parts: Array, crossed: Array, sends: Array) -> tuple[list[str], Array, Array]:
    stages = parts.shape[1]
    names = ["given", *(["free"] if crossed.any() else []), *(["even"] if schedule == "zbv" else [])]
    durations, delays = np.zeros((3 * stages + 1, len(names))), np.zeros((stages, len(names)))
    durations[:-1] = parts.reshape(-1, 1)
    durations[:, 0] += sends
    if not sends.any():
        delays[:-1, 0] = crossed
    if schedule == "zbv":
        durations[:-1, -1] = np.repeat(parts.mean(axis=1), stages)
    return names, durations, delays


_WIDE = 40  # cells, of all sets, in a row from which on NumPy, a row at a time, is faster than Python, a cell at a time
_EXACT = 1e-11  # what the jump may add to the error of the step's time, relative
_ROUNDING = 1e-15
_LONGEST = 256  # rounds among which one that is alike is looked for; mostly it is not further back than there are ranks
_ROWS = 64  # rows that are worked out, unless a round has more, before the next look back


def run_grid(grid: Grid, repetitions: int, durations: Array, delays: Array) -> tuple[Array, Array]:
    """When the actions in the cells `first_forward` and in `late` of the grid end, by cell and set, for several costs.

    Args:
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
    """Rows of cells, `times` times after one another, ready to be worked out from the ends in their window."""

    rows: Rows
    times: int
    ranks: int  # cells of a row
    sources: Indices  # as in `Rows`
    work: Array  # of the rank up to each cell's end, by cell and set
    slack: Array  # from a cell's source to the cell, beyond the work of both their ranks, by cell and set

    @classmethod
    def of(cls, rows: Rows, times: int, window: int, ranks: int, durations: Array, delays: Array) -> _Slack:
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
    ends = window[:]
    put = ends.append
    above = islice(ends, len(window) - ranks, None)  # grows as it is read, always a row ahead
    for before, source, late in zip(above, sources, slack, strict=False):
        ready = ends[source] + late
        put(ready if ready > before else before)
    return ends[len(window) :]


def even_span(
    schedule: Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble"],
    ranks: Ints,
    chunks: Ints,
    micro_batches: Ints,
    forward_s: Floats,
    backward_s: Floats,
    weights_s: Floats = 0.0,
) -> Floats:
    """Seconds of a step whose stages all take as long and whose messages nothing, exactly. All arguments broadcast.

    The bubble of 1f1b and interleaved_1f1b is that of arXiv 2104.04473, section 2.2. That of the split backward pass,
    for every rank but one, is F + I - W (ZB-H1 of arXiv 2401.10241), but not less than F, nor than I. For zbv there
    is not a formula here, as there are many cases.

    Args:
        forward_s: of one stage and micro-batch.
        backward_s: of the whole backward pass, or for the input only where `schedule` splits it.
        weights_s: of the backward pass for the weights, where `schedule` splits it.
    """
    passes = forward_s + backward_s
    bubble = passes
    if schedule == "interleaved_zero_bubble":
        bubble = np.maximum(np.maximum(forward_s, backward_s), passes - weights_s)
        passes = passes + weights_s
    return chunks * micro_batches * passes + (ranks - 1) * bubble


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Seconds that one micro-batch takes on each stage, in the order of the model, and between stages."""

    forward_s: Array  # of the forward pass, one number for each of `ranks * chunks` stages
    backward_s: Array  # of the whole backward pass; used by schedules that do not split it
    backward_input_s: Array  # of the backward pass for the stage's input; used by schedules that split it
    backward_weight_s: Array  # of the backward pass for the stage's weights; likewise
    # Of a message between stage i and i + 1, either way; one number for each of `ranks * chunks - 1` boundaries.
    # Boundaries inside a rank (the turn of a V) cost nothing, whatever is said here.
    send_s: Array
    # A rank computes nothing while it sends. As in Megatron-LM without overlap, it may receive at the same time (links
    # go both ways at once), so a pair of passes costs a rank in the middle two messages. Else sending is a delay
    # between two ranks, which other work of both may hide.
    blocking: bool = False


@dataclass(frozen=True, eq=False)
class StepTime:
    """When things happen in one step, in seconds from its first forward pass.

    On every rank, `busy_s + bubble_s + imbalance_s + sends_s` is `span_s`. Times by rank and chunk count a rank's
    chunks in the order of the model.
    """

    span_s: float  # to the end of the last action on any rank
    busy_s: Array  # computing, by rank
    # Waiting for the pipeline to fill and to drain: what is waited where all stages cost their mean and messages
    # nothing. The same for all ranks.
    bubble_s: Array
    # Waiting because stages differ, by rank. Negative on a rank with more work than the mean, where it makes up for
    # what `busy_s` has too much.
    imbalance_s: Array
    sends_s: Array  # what messages add to the step; the same for all ranks
    sent_s: Array  # time that a rank's messages are on the way, hidden or not
    end_s: Array  # when each rank's last action ends
    first_forward_begin_s: Array  # when the first forward pass of a chunk begins, by rank and chunk
    # When the gradients of its last micro-batch are complete, those of weights too, so that the chunk's can be reduced.
    last_backward_end_s: Array
    # Micro-batches whose activations a chunk holds when its rank holds most of them, all its chunks together; by rank
    # and chunk.
    in_flight: NDArray[np.int64]
