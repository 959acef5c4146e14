"""What the driver makes of reports: hosts that fall silent, attempts that run, advance, break, fail and return."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide.events import (
    Advanced,
    Event,
    HostJoined,
    HostUnknown,
    LeftEarly,
    LossBroken,
    Restored,
    Running,
    WorkerFailed,
    WorkersReturned,
)
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State
from phalanx.run.driver.attempt import ADVANCED_S, BROKEN_STEPS, AttemptWatch
from phalanx.run.driver.hosts import HostWatch
from phalanx.run.driver.job_status import Known, overview
from phalanx.run.messages import Heartbeat, Hello, HostState, WorkerEnded, WorkerState, heartbeat

HOST = HostState(0.0, 0, 0, 0)


def at(seconds: float) -> Now:
    return Now(1000.0 + seconds, 5000.0 + seconds)


def hello(host: str, attempt: int = 0, running: tuple[int, ...] = ()) -> Hello:
    return Hello(1, host, "127.0.0.1", 2, 0, [], "left", "boot", 1, attempt, list(running))


def beat(attempt: int, *workers: WorkerState) -> Heartbeat:
    return heartbeat(1, 0.0, attempt, list(workers), HOST, [])


def worker(rank: int, step: int = -1, **given: Any) -> WorkerState:
    return WorkerState(rank, 10 + rank, **{"state": "running", "step": step, "steps_here": max(step, 0)} | given)


def watch(world_size: int = 2) -> AttemptWatch:
    return AttemptWatch(3, world_size, 1, at(0), lambda ended: "host" if "Xid" in ended.text else "process")


def ended(rank: int, **given: Any) -> WorkerEnded:
    return WorkerEnded(**{"attempt": 3, "rank": rank, "code": -9, "kind": "signal", "summary": "killed"} | given)


class TestHosts:
    def test_silence_is_told_once_and_so_is_its_end(self) -> None:
        hosts = HostWatch(heartbeat_s=1.0)
        assert hosts.on_hello(hello("a"), at(0)) == [HostJoined(5000.0, "a", "left")]
        assert hosts.tick(at(3)) == []
        assert hosts.next_look_s(at(3)) == pytest.approx(0.5)
        assert hosts.tick(at(4)) == [HostUnknown(5004.0, "a")]
        assert hosts.tick(at(9)) == [] and hosts.next_look_s(at(9)) == math.inf
        report = beat(2, worker(4, 7), worker(5, 7, state="ended"))
        assert hosts.on_heartbeat("a", report, at(10)) == [HostJoined(5010.0, "a", "left", 2, (4,))]
        assert hosts.on_heartbeat("a", report, at(11)) == []
        assert hosts.hosts["a"].state == HOST

    def test_connecting_again_says_what_runs(self) -> None:
        hosts = HostWatch(1.0)
        hosts.on_hello(hello("a"), at(0))
        assert hosts.on_hello(hello("a", 3, (0, 1)), at(60)) == [HostJoined(5060.0, "a", "left", 3, (0, 1))]
        assert hosts.tick(at(61)) == []

    def test_nothing_is_expected_of_a_host_that_is_gone(self) -> None:
        hosts = HostWatch(1.0)
        hosts.on_hello(hello("a"), at(0))
        hosts.on_gone("a")
        hosts.on_gone("never there")
        assert hosts.tick(at(100)) == [] and hosts.on_heartbeat("a", beat(1), at(101)) == []


class TestProgress:
    def test_running_when_every_rank_has_made_a_step_here(self) -> None:
        attempt = watch()
        assert attempt.on_heartbeat(beat(3, worker(0, 0), worker(1)), at(1)) == []
        assert attempt.on_heartbeat(beat(3, worker(0, 41, steps_here=1)), at(2)) == []
        # a rank that goes on at step 40 has made none yet
        assert attempt.on_heartbeat(beat(3, worker(1, 40, steps_here=0)), at(2)) == []
        assert not attempt.is_running
        assert attempt.on_heartbeat(beat(3, worker(1, 41, steps_here=1)), at(3)) == [Running(5003.0, 3, 41)]
        assert attempt.is_running and attempt.step == 41

    def test_what_was_restored_is_told_once_before_the_first_step_and_of_a_newer_attempt_again(self) -> None:
        attempt = watch()
        assert attempt.on_heartbeat(beat(3, worker(0, 0, restored=40), worker(1)), at(1)) == [Restored(5001.0, 3, 40)]
        assert attempt.on_heartbeat(beat(3, worker(1, 1, restored=40)), at(2)) == []
        assert attempt.on_heartbeat(beat(3, worker(0, 1, restored=40)), at(3)) == [Running(5003.0, 3, 1)]

    def test_the_slowest_rank_says_how_long_imports_took_before_the_first_step(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(0, 1, imported_s=4.0)), at(1))
        assert attempt.on_heartbeat(beat(3, worker(1, 1, imported_s=3.0)), at(2)) == [
            Running(5002.0, 3, 1, imported_s=4.0)
        ]

    def test_steps_are_told_now_and_then(self) -> None:
        attempt = watch(1)
        told: list[Event] = []
        for second in range(1, 36):
            told += attempt.on_heartbeat(beat(3, worker(0, second, last_step_s=1.0)), at(second))
        assert told[0] == Running(5001.0, 3, 1)
        assert [event.step for event in told[1:] if isinstance(event, Advanced)] == [11, 21, 31]
        assert attempt.on_heartbeat(beat(3, worker(0, 35)), at(36 + ADVANCED_S)) == [
            Advanced(5046.0, 3, 35, age_s=11.0)
        ]
        assert attempt.on_heartbeat(beat(3, worker(0, 35)), at(36 + 2 * ADVANCED_S)) == []  # no step since

    def test_what_storage_keeps_up_with_is_told_of_rank_0(self) -> None:
        attempt = watch(2)
        state = State(Policy(), Job("j", 1, 2), phase="running", attempt=3)
        assert overview(Known(state, attempt=attempt), at(1)).checkpoints == ""
        attempt.on_heartbeat(beat(3, worker(0, 7, checkpoints="about every 19th"), worker(1, 7)), at(1))
        assert overview(Known(state, attempt=attempt), at(1)).checkpoints == "about every 19th"
        attempt.on_heartbeat(beat(3, worker(0, 8), worker(1, 8)), at(2))
        assert overview(Known(state, attempt=attempt), at(2)).checkpoints == ""

    def test_steps_of_the_training_are_told_as_such_from_the_first_of_this_attempt(self) -> None:
        attempt = watch()
        told = attempt.on_heartbeat(
            beat(3, worker(0, 45, steps_here=5, is_absolute=True), worker(1, 40, steps_here=0)), at(1)
        )
        assert told == [] and not attempt.is_absolute
        told = attempt.on_heartbeat(beat(3, worker(1, 45, steps_here=5, is_absolute=True)), at(2))
        assert told == [Running(5002.0, 3, 41, True)] and attempt.step == 45
        assert attempt.catch_up(at(3)) == [Advanced(5003.0, 3, 45, True)]
        assert attempt.catch_up(at(4)) == []

    def test_how_far_it_was_is_told_before_its_end(self) -> None:
        attempt = watch()
        for second in range(1, 6):
            attempt.on_heartbeat(
                beat(3, *(worker(rank, 40 + second, steps_here=second) for rank in (0, 1))), at(second)
            )
        first, failed = attempt.on_ended(ended(1, step=48), at(5.5))
        assert first == Advanced(5005.5, 3, 48) and isinstance(failed, WorkerFailed) and failed.step == 48
        assert len(attempt.on_ended(ended(0, step=48), at(5.6))) == 1

    def test_reports_of_other_attempts_and_ranks_are_nothing(self) -> None:
        attempt = watch(1)
        assert attempt.on_heartbeat(beat(2, worker(0, 5)), at(1)) == []
        assert attempt.on_heartbeat(beat(3, worker(9, 5)), at(1)) == []
        assert not attempt.is_running
        assert attempt.on_ended(ended(0, attempt=2), at(2)) == []
        assert attempt.on_ended(ended(9), at(2)) == []

    def test_a_hang_is_seen_and_told(self) -> None:
        attempt = watch(1)
        for second in range(1, 30):
            attempt.on_heartbeat(beat(3, worker(0, second, last_step_s=1.0)), at(second))
        assert attempt.standing(at(29.5)).kind == "moving"
        wait_s = attempt.next_look_s(at(29.5))
        standing = attempt.standing(at(29.6 + wait_s))
        told = attempt.no_progress(standing, at(29.6 + wait_s))
        assert (standing.kind, told.kind, told.limit_s, told.why) == ("hang", "hang", 60.0, standing.why)
        assert 59 < wait_s < 61


class TestLoss:
    def test_a_loss_that_stays_broken_is_told_once_with_who_began(self) -> None:
        attempt = watch(2)
        told: list[Event] = []
        for step in range(1, 20):
            mine = math.nan if step >= 7 else 1.0
            theirs = math.inf if step >= 8 else 1.0
            told += attempt.on_heartbeat(beat(3, worker(0, step, loss=mine), worker(1, step, loss=theirs)), at(step))
        [broken] = [event for event in told if isinstance(event, LossBroken)]
        assert (broken.step, broken.ranks, broken.at_s) == (7, (0,), 5007.0 + BROKEN_STEPS)

    def test_all_ranks_alike_name_nobody(self) -> None:
        attempt = watch(2)
        told: list[Event] = []
        for step in range(1, 9):
            both = [worker(rank, step, loss=math.nan) for rank in (0, 1)]
            told += attempt.on_heartbeat(beat(3, *both), at(step))
        assert [event.ranks for event in told if isinstance(event, LossBroken)] == [()]

    def test_it_began_where_the_rank_says_and_others_reports_are_waited_for(self) -> None:
        attempt = watch(2)
        told: list[Event] = []
        broken = {"loss": math.nan, "broken_step": 17}
        told += attempt.on_heartbeat(beat(3, worker(0, 10, loss=1.0), worker(1, 10, loss=1.0)), at(1))
        told += attempt.on_heartbeat(beat(3, worker(0, 40, **broken)), at(2))
        assert not [event for event in told if isinstance(event, LossBroken)]
        told += attempt.on_heartbeat(beat(3, worker(1, 43, **broken)), at(3))
        [found] = [event for event in told if isinstance(event, LossBroken)]
        assert (found.step, found.ranks, found.is_from_start) == (17, (), False)

    def test_an_attempt_that_never_had_a_number_says_so(self) -> None:
        attempt = watch(1)
        told: list[Event] = []
        for step in range(1, 9):
            told += attempt.on_heartbeat(beat(3, worker(0, step, loss=math.nan, broken_step=1)), at(step))
        assert [event.is_from_start for event in told if isinstance(event, LossBroken)] == [True]

    def test_one_that_comes_back_is_nothing(self) -> None:
        attempt = watch(1)
        told: list[Event] = []
        for step in range(1, 40):
            told += attempt.on_heartbeat(beat(3, worker(0, step, loss=1.0 if step % 4 else math.nan)), at(step))
        assert not [event for event in told if isinstance(event, LossBroken)]


class TestEnds:
    def test_a_failure_is_told_once_with_its_class_and_step(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(1, 12)), at(1))
        [failed] = attempt.on_ended(ended(1, text="NVRM: Xid 79"), at(2))
        assert failed == WorkerFailed(5002.0, 3, 1, "signal", "host", "killed", False, 12)
        assert attempt.on_ended(ended(1), at(3)) == []
        [other] = attempt.on_ended(ended(0, kind="raised", code=1, step=13, follows=True), at(3))
        assert isinstance(other, WorkerFailed)
        assert (other.kind, other.fault, other.follows, other.step) == ("raised", "process", True, 13)

    def test_before_its_first_step_it_is_where_it_went_on_from(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(0, 15, steps_here=0, is_absolute=True)), at(1))
        [failed] = attempt.on_ended(ended(0, kind="raised", code=1, step=15), at(2))
        assert isinstance(failed, WorkerFailed) and failed.step == 15
        [failed] = watch().on_ended(ended(1, kind="raised", code=1, step=0), at(2))  # it begins, or has not said
        assert isinstance(failed, WorkerFailed) and failed.step == -1

    def test_what_we_killed_is_no_failure(self) -> None:
        assert watch().on_ended(ended(0, by_us=True), at(1)) == []

    def test_returned_when_all_have(self) -> None:
        attempt = watch()
        good = {"kind": "returned", "code": 0, "summary": ""}
        assert attempt.on_ended(ended(0, **good), at(1)) == []
        assert attempt.on_ended(ended(0, **good), at(1)) == []
        assert attempt.on_ended(ended(1, **good), at(2)) == [WorkersReturned(5002.0, 3)]

    def test_who_left_with_status_0_is_told_when_another_fails_whichever_is_heard_first(self) -> None:
        seen = watch(4)
        assert seen.on_ended(ended(1, kind="returned", code=0, step=7), at(1)) == []
        told = seen.on_ended(ended(0, kind="raised", code=1, follows=True), at(2))
        assert [type(event).__name__ for event in told] == ["LeftEarly", "WorkerFailed"]
        assert told[0] == LeftEarly(at(2).unix_s, 3, (1,), (7,))
        assert seen.on_ended(ended(2, kind="returned", code=0, step=8), at(3)) == [
            LeftEarly(at(3).unix_s, 3, (1, 2), (7, 8))
        ]
        # by then most have left: it is the last one that still waits for them
        assert seen.on_ended(ended(3, kind="returned", code=0, step=8), at(4)) == []

    def test_who_left_with_status_0_is_told_before_a_hang(self) -> None:
        seen = watch(2)
        seen.on_ended(ended(1, kind="returned", code=0, step=7), at(1))
        assert seen.catch_up(at(60)) == [LeftEarly(at(60).unix_s, 3, (1,), (7,))]
        assert seen.catch_up(at(61)) == []

    def test_who_is_done_while_others_still_work_has_not_left_early(self) -> None:
        """The last rank saves or evaluates while heartbeats go on."""
        seen = watch(2)
        seen.on_heartbeat(beat(3, worker(0, 27), worker(1, 27)), at(1))
        seen.on_ended(ended(1, kind="returned", code=0, step=30), at(20))
        told = seen.on_heartbeat(beat(3, worker(0, 30)), at(21))
        assert [type(event).__name__ for event in told] == ["Advanced"]

    def test_steps_that_no_heartbeat_has_told_count_at_the_end(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(0, 27), worker(1, 27)), at(1))
        good = {"kind": "returned", "code": 0, "summary": ""}
        attempt.on_ended(ended(0, step=30, **good), at(2))
        told = attempt.on_ended(ended(1, step=29, **good), at(2))
        assert told == [Advanced(5002.0, 3, 30), WorkersReturned(5002.0, 3)]

    def test_how_far_it_came_while_it_was_being_stopped_is_told(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(0, 27), worker(1, 27)), at(1))
        told = attempt.on_ended(ended(0, kind="returned", code=0, step=41, by_us=True), at(2))
        assert told == [Advanced(at(2).unix_s, 3, 41)] and attempt.step == 41
        assert attempt.on_ended(ended(1, by_us=True, step=40), at(2)) == []

    def test_steps_that_are_told_only_when_it_has_stood_still_were_made_before_that(self) -> None:
        attempt = watch()
        attempt.on_heartbeat(beat(3, worker(0, 27), worker(1, 27)), at(1))
        attempt.on_heartbeat(beat(3, worker(0, 28), worker(1, 28)), at(2))
        assert attempt.catch_up(at(1802)) == [Advanced(at(1802).unix_s, 3, 28, age_s=1800.0)]

    def test_one_that_is_over_before_any_heartbeat_has_made_its_steps_too(self) -> None:
        attempt = watch()
        good = {"kind": "returned", "code": 0, "summary": ""}
        attempt.on_ended(ended(0, step=5, **good), at(2))
        told = attempt.on_ended(ended(1, step=4, **good), at(2))
        assert told == [Running(at(2).unix_s, 3, 5), WorkersReturned(at(2).unix_s, 3)]

    def test_another_exit_status_is_a_failure(self) -> None:
        [failed] = watch().on_ended(ended(0, kind="returned", code=7), at(1))
        assert isinstance(failed, WorkerFailed) and failed.kind == "status"
        for kind in ("returned", "status"):
            [failed] = watch().on_ended(ended(0, kind=kind, code=2), at(1))
            assert isinstance(failed, WorkerFailed) and failed.kind == "usage"


def test_the_clocks_go_on() -> None:
    first, second = read_clocks(), read_clocks()
    assert second.monotonic_s >= first.monotonic_s and first.unix_s > 1.6e9
