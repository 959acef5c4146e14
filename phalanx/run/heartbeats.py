"""A heartbeat, with what it says on the whole: a host sums up its few ranks, so that the driver need not.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from phalanx.run.messages import Heartbeat, HostState, LogLine, Pace, Report, WorkerState

ORDINARY_PHASES = frozenset({"", "step", "train"})
"""In these a rank makes steps."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Report)


class BadReportError(ValueError):
    """The report of a heartbeat is none."""


def heartbeat(
    sequence: int,
    unix_s: float,
    attempt: int,
    workers: list[WorkerState],
    host: HostState,
    lines: list[LogLine],
    carried_bytes: int = -1,
) -> Heartbeat:
    """The heartbeat with these parts; see `phalanx.run.messages.Heartbeat`."""
    return Heartbeat(
        sequence,
        unix_s,
        attempt,
        msgspec.Raw(_encode(Report(workers, host, lines))),
        pace_of(workers),
        workers[0].rank if workers else -1,
        max((worker.steps_here for worker in workers), default=0),
        max((worker.busy_s for worker in workers), default=-1.0),
        carried_bytes,
        len(lines),
    )


def report_of(beat: Heartbeat) -> Report:
    """What it says at length.

    Raises:
        BadReportError: this cannot be read.
    """
    try:
        return _decoder.decode(beat.report)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReportError(str(error)) from error


def pace_of(workers: Sequence[WorkerState]) -> Pace | None:
    """Where they all are; None: nobody can speak for all."""
    if not workers or not _makes_steps(workers[0]):
        return None
    first = workers[0]
    for place, worker in enumerate(workers):
        if worker.rank != first.rank + place or not math.isfinite(worker.loss) or worker.stopped_s > 0:
            return None
        if (worker.step, worker.steps_here, worker.phase) != (first.step, first.steps_here, first.phase):
            return None
        if (worker.state, worker.expects_s, worker.is_absolute) != (first.state, first.expects_s, first.is_absolute):
            return None
    least_s, still_s = (min(ages) for ages in zip(*((w.step_age_s, w.still_s) for w in workers), strict=True))
    return Pace(len(workers), first.step, least_s, first.last_step_s, still_s)


def _makes_steps(worker: WorkerState) -> bool:
    return worker.step >= 0 and worker.state != "ended" and worker.phase in ORDINARY_PHASES and worker.expects_s <= 0
