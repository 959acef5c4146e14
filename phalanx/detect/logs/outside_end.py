"""Whether a job was ended from outside: by its scheduler, by an eviction, by a signal.

A scheduler that gives its reason (preemption, time limit, eviction) is believed, unless something had failed before. A
bare "CANCELLED" or SIGTERM is as often what follows from a failure as what ends a healthy job: it counts where nothing
else explains the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.detect.logs.failure_classes import OUTSIDE
from phalanx.detect.logs.log_digest import LogEvent


def without_outside(events: Sequence[LogEvent]) -> tuple[list[LogEvent], list[LogEvent]]:
    """Lines that say that the job was ended from outside, and the others."""
    outside = [event for event in events if event.rule is not None and event.rule.kind == OUTSIDE]
    return outside, [event for event in events if event not in outside]


def ended_from_outside(
    outside: Sequence[LogEvent], causes: Sequence[LogEvent], notices: Sequence[LogEvent], tolerance_s: float
) -> LogEvent | None:
    """The line that says who ended the job and why; None: it failed, or nobody says so.

    Args:
        causes: lines that show a failure; `notices`: of writers that only noticed one.
        tolerance_s: lines that are closer than this are taken as simultaneous.
    """
    with_reason = [event for event in outside if event.rule is not None and event.rule.severity == "fatal"]
    first = min(with_reason or outside, key=_when, default=None)
    if first is None:
        return None
    if with_reason:
        return None if any(_is_before(event, first, tolerance_s) for event in causes) else first
    told = [event for event in notices if event.rule is not None and event.rule.kind]
    return None if causes or any(_is_before(event, first, tolerance_s) for event in told) else first


def _is_before(event: LogEvent, first: LogEvent, tolerance_s: float) -> bool:
    if event.unix_s is not None and first.unix_s is not None:
        return event.unix_s < first.unix_s - tolerance_s
    return event.writer_key == first.writer_key and event.number < first.number


def _when(event: LogEvent) -> tuple[float, int]:
    return (event.unix_s if event.unix_s is not None else float("inf"), event.number)
