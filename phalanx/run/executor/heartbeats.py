"""A heartbeat, with what it says on the whole: a host sums up its few ranks, so that the driver need not.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.run.messages import Heartbeat, HostState, LogLine, WorkerState


def heartbeat(
    sequence: int,
    unix_s: float,
    attempt: int,
    workers: list[WorkerState],
    host: HostState,
    lines: list[LogLine],
    dropped_lines: int = 0,
) -> Heartbeat:
    """The heartbeat with these parts; see `phalanx.run.messages.Heartbeat`."""
    busy_s = max((worker.busy_s for worker in workers), default=-1.0)
    return Heartbeat(sequence, unix_s, attempt, workers, host, lines, dropped_lines, are_alike(workers), busy_s)


def are_alike(workers: Sequence[WorkerState]) -> bool:
    """Whether they are successive ranks that differ in times and sizes only, and no loss is broken."""
    if not workers:
        return False
    first = workers[0]
    return all(
        worker.rank == first.rank + place
        and (worker.step, worker.steps_here, worker.phase) == (first.step, first.steps_here, first.phase)
        and (worker.state, worker.expects_s, worker.is_absolute) == (first.state, first.expects_s, first.is_absolute)
        and math.isfinite(worker.loss)
        for place, worker in enumerate(workers)
    )
