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

    Every rank does what `phalanx.parallel.pipeline.schedules` gives it, in that order, each action as soon as what it
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
    """What every rank does and waits for, by the names of `StepTime`."""
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
    """Durations and delays of the step as it is; with free messages; and with equal stages too, if no formula has it.

    Returns:
        names of these sets; durations by code and set; delays by boundary and set.
    """
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
