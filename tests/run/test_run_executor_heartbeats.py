"""What a heartbeat says on the whole changes nothing but the time that hearing it takes."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from phalanx.run.clock import Now
from phalanx.run.driver.attempt import AttemptWatch
from phalanx.run.messages import (
    BadReportError,
    HostState,
    LogLine,
    Pace,
    Report,
    WorkerState,
    heartbeat,
    pace_of,
    report_of,
)

HOST = HostState(0.0, 0, 0, 0)
ALIKE = [
    WorkerState(rank, 10, "running", 7, 0.1 * rank + 0.1, 2.0, "step", busy_s=0.1 * rank, steps_here=7)
    for rank in range(4, 8)
]


def test_ranks_have_a_pace_that_make_steps_and_differ_in_times_and_sizes_only() -> None:
    assert pace_of(ALIKE) == Pace(4, 7, 0.5, 2.0) and pace_of([]) is None
    later = replace(ALIKE[0], step_age_s=3.0, cpu_s=1.0, rss_bytes=5, pid=3)
    assert pace_of([later, *ALIKE[1:]]) == Pace(4, 7, ALIKE[1].step_age_s, 2.0)
    for change in (
        {"step": 8},
        {"steps_here": 6},
        {"phase": "evaluate"},
        {"state": "ended"},
        {"expects_s": 9.0},
        {"is_absolute": True},
        {"loss": math.nan},
        {"loss": math.inf},
        {"rank": 6},
    ):
        assert pace_of([ALIKE[0], replace(ALIKE[1], **change), *ALIKE[2:]]) is None, change
    assert pace_of(ALIKE[::-1]) is None


@pytest.mark.parametrize("change", [{"step": -1}, {"phase": "evaluate"}, {"state": "ended"}, {"expects_s": 9.0}])
def test_ranks_that_make_no_steps_have_none(change: dict[str, object]) -> None:
    assert pace_of([replace(worker, **change) for worker in ALIKE]) is None


def test_what_is_said_at_length_is_read_from_it() -> None:
    lines = [LogLine(4, "step 7")]
    beat = heartbeat(1, 0.0, 1, ALIKE, HOST, lines, 1000)
    assert report_of(beat) == Report(ALIKE, HOST, lines)
    assert (beat.rank, beat.steps_here, beat.line_count, beat.carried_bytes) == (4, 7, 1, 1000)
    empty = heartbeat(1, 0.0, 1, [], HOST, [])
    assert (empty.rank, empty.steps_here, empty.line_count, empty.carried_bytes) == (-1, 0, 0, -1)


@given(st.binary())
def test_what_is_no_report_is_told_so(content: bytes) -> None:
    with suppress(BadReportError):
        report_of(replace(heartbeat(1, 0.0, 1, [], HOST, []), report=Raw(content)))


def test_the_longest_own_time_is_told() -> None:
    assert heartbeat(1, 0.0, 1, ALIKE, HOST, []).busy_s == ALIKE[-1].busy_s
    assert heartbeat(1, 0.0, 1, [], HOST, []).busy_s < 0


@st.composite
def reports(draw: st.DrawFn) -> list[WorkerState]:
    """What two ranks of a host report: nearly always the same."""
    first = draw(st.sampled_from([0, 2]))
    step, phase, loss = draw(st.integers(-1, 30)), draw(st.sampled_from(["", "step", "evaluate"])), 1.0
    workers = []
    for rank in (first, first + 1):
        if draw(st.integers(0, 9)) == 0:
            step, phase, loss = draw(st.integers(0, 30)), "checkpoint", draw(st.sampled_from([1.0, math.nan]))
        here = max(step - 3, 0)
        workers.append(WorkerState(rank, 1, "running", step, phase=phase, loss=loss, steps_here=here, last_step_s=1.0))
    return workers


@given(st.lists(reports(), max_size=30))
@settings(deadline=None)
def test_the_driver_hears_the_same_whether_it_is_told_or_not(beats: list[list[WorkerState]]) -> None:
    now = Now(1000.0, 5000.0)
    told, plain = (AttemptWatch(1, 4, 2, now, lambda ended: "process") for _ in range(2))
    for second, workers in enumerate(beats):
        now = Now(1000.0 + second, 5000.0 + second)
        beat = heartbeat(second, 0.0, 1, workers, HOST, [])
        assert list(told.on_heartbeat(beat, now)) == list(plain.on_heartbeat(replace(beat, pace=None), now))
        if second % 3 == 0:  # who looks at ranks must not change what is concluded
            assert repr(told.workers(range(4))) == repr(plain.workers(range(4)))  # a loss may be no number
        assert (told.step, told.is_running, told.standing(now)) == (plain.step, plain.is_running, plain.standing(now))


def test_a_host_that_is_wrong_about_it_is_heard_rank_by_rank() -> None:
    watch = AttemptWatch(1, 4, 2, Now(1000.0, 5000.0), lambda ended: "process")
    for ranks in ((1, 3), (3, 4), (-1, 0), (2, 1)):
        workers = [WorkerState(rank, 1, "running", 5, steps_here=5) for rank in ranks]
        beat = replace(heartbeat(1, 0.0, 1, workers, HOST, []), pace=Pace(2, 5, 0.0, 1.0))
        watch.on_heartbeat(beat, Now(1001.0, 5001.0))
    assert [seen.rank for seen in watch.workers(range(-1, 5))] == [0, 1, 2, 3]
