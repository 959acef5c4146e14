"""What a heartbeat says on the whole changes nothing but the time that hearing it takes."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phalanx.run.driver.attempt import AttemptWatch
from phalanx.run.executor.heartbeats import are_alike, heartbeat
from phalanx.run.messages import HostState, WorkerState
from phalanx.run.now import Now

HOST = HostState(0.0, 0, 0, 0)
ALIKE = [WorkerState(rank, 10, "running", 7, busy_s=0.1 * rank, steps_here=7, phase="step") for rank in range(4, 8)]


def test_ranks_are_alike_that_differ_in_times_and_sizes_only() -> None:
    assert are_alike(ALIKE) and not are_alike([])
    assert are_alike([replace(ALIKE[0], step_age_s=3.0, cpu_s=1.0, rss_bytes=5, pid=3), *ALIKE[1:]])
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
        assert not are_alike([ALIKE[0], replace(ALIKE[1], **change), *ALIKE[2:]]), change
    assert not are_alike(ALIKE[::-1])


def test_the_longest_own_time_is_told() -> None:
    assert heartbeat(1, 0.0, 1, ALIKE, HOST, []).busy_s == ALIKE[-1].busy_s
    assert heartbeat(1, 0.0, 1, [], HOST, []).busy_s < 0


@st.composite
def reports(draw: st.DrawFn) -> list[WorkerState]:
    """What two ranks of a host report: nearly always the same."""
    first = draw(st.integers(-1, 4))
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
    told, plain = (AttemptWatch(1, 4, now, lambda ended: "process") for _ in range(2))
    for second, workers in enumerate(beats):
        now = Now(1000.0 + second, 5000.0 + second)
        beat = heartbeat(second, 0.0, 1, workers, HOST, [])
        assert told.on_heartbeat(beat, now) == plain.on_heartbeat(replace(beat, are_alike=False), now)
        assert [(seen.rank, seen.step) for seen in told.workers] == [(seen.rank, seen.step) for seen in plain.workers]
        assert (told.step, told.is_running, told.standing(now)) == (plain.step, plain.is_running, plain.standing(now))


def test_a_host_that_is_wrong_about_it_is_heard_rank_by_rank() -> None:
    watch = AttemptWatch(1, 4, Now(1000.0, 5000.0), lambda ended: "process")
    for ranks in ((1, 3), (3, 4), (-1, 0), (2, 1)):
        workers = [WorkerState(rank, 1, "running", 5, steps_here=5) for rank in ranks]
        watch.on_heartbeat(replace(heartbeat(1, 0.0, 1, workers, HOST, []), are_alike=True), Now(1001.0, 5001.0))
    assert [seen.rank for seen in watch.workers] == [0, 1, 2, 3]
