"""The exact time of one step in a pipeline. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phalanx.parallel.config import Schedule
from phalanx.plan.pipeline.advance import run_grid
from phalanx.plan.pipeline.closed import even_span
from phalanx.plan.pipeline.costs import Array, StageCosts, StepTime
from phalanx.plan.pipeline.grid import Grid, make_few, make_grid


def evaluate(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, costs: StageCosts) -> StepTime:
    """When `micro_batches` passes through `ranks` pipeline ranks with `chunks` chunks each are done.

    Every rank does what `phalanx.parallel.pipeline.tables` gives it, in that order, each action as soon as what it
    needs has come. Exact, and far faster than a walk over all actions: rounds that repeat themselves are skipped.

    Raises:
        UserError: the numbers do not fit one another.
    """
    return _evaluate(schedule, *make_grid(schedule, ranks, chunks, micro_batches), micro_batches, costs)


def evaluate_few(ranks: int, micro_batches: int, costs: StageCosts) -> StepTime:
    """The same for 1F1B with fewer micro-batches than ranks, which other programs run and ours refuses.

    A rank runs as many forward passes ahead as there are ranks after it, or all; then forward and backward passes in
    turn.
    """
    return _evaluate("1f1b", make_few(ranks, micro_batches), 0, micro_batches, costs)


def _evaluate(schedule: Schedule, grid: Grid, repetitions: int, micro_batches: int, costs: StageCosts) -> StepTime:
    parts = _parts(grid, costs)
    crossed = _crossed(grid, costs)
    sends = np.concatenate([crossed, [0.0, 0.0], crossed, np.zeros(grid.orders.stages + 1)]) * costs.blocking
    sets = _sets(schedule, parts, crossed, sends)
    durations, delays = (np.stack(columns, axis=1) for columns in zip(*sets.values(), strict=True))
    head, tail = run_grid(grid, repetitions, durations, delays)
    ends = tail[grid.ends]
    ends[:, 0] -= sends[grid.orders.codes[:, -1]]
    spans = dict(zip(sets, ends.max(axis=0).tolist(), strict=True))
    stages = grid.orders.stages_of
    last = grid.orders.last_part * grid.orders.stages + stages
    return StepTime(
        **_shares(schedule, grid, parts, spans, micro_batches),
        span_s=spans["given"],
        sent_s=micro_batches * (np.append(crossed, 0.0) + np.append(0.0, crossed))[stages].sum(axis=1),
        end_s=ends[:, 0],
        first_forward_begin_s=head[grid.first_forward, 0] - durations[stages, 0],
        first_backward_end_s=head[grid.first_backward, 0] - sends[last],
        last_backward_end_s=tail[grid.last_backward, 0] - sends[last],
        in_flight=grid.in_flight,
    )


def _shares(
    schedule: Schedule, grid: Grid, parts: Array, spans: Mapping[str, float], micro_batches: int
) -> dict[str, Array]:
    """What every rank does and waits for, by the names of `StepTime`."""
    ranks, chunks = grid.orders.ranks, grid.orders.chunks
    busy = micro_batches * parts.sum(axis=0)[grid.orders.stages_of].sum(axis=1)
    if schedule == "zbv":
        even = spans["even"]
    else:
        even = float(even_span(schedule, ranks, chunks, micro_batches, *parts.mean(axis=1)))
    free = spans.get("free", spans["given"])
    return {
        "busy_s": busy,
        "bubble_s": np.full(ranks, even - busy.mean()),
        "imbalance_s": free - even + busy.mean() - busy,
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


def _crossed(grid: Grid, costs: StageCosts) -> Array:
    """Seconds of a message over every boundary; none where both sides are on one rank."""
    rank_of = grid.orders.rank_of
    return np.where(rank_of[1:] != rank_of[:-1], costs.send_s, 0.0)


def _sets(schedule: Schedule, parts: Array, crossed: Array, sends: Array) -> dict[str, tuple[Array, Array]]:
    """Durations and delays of the step as it is; with free messages; and with equal stages too, if no formula has it.

    Args:
        sends: what is added to the duration of every code for sending.
    """
    stages = parts.shape[1]
    none = np.zeros(len(crossed) + 1)
    free = np.append(parts, 0.0)
    sets = {"given": (free + sends, none if sends.any() else np.append(crossed, 0.0))}
    if crossed.any():
        sets["free"] = free, none
    if schedule == "zbv":
        sets["even"] = np.append(np.repeat(parts.mean(axis=1), stages), 0.0), none
    return sets
