"""What the driver does when things go wrong, as stories in an emulated world with simulated time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from decide_helpers import SimHost, Speeds, World, attempt_runs, ended, host_names, running
from msgspec.structs import replace

from phalanx.detect.detection import Culprit, Detection
from phalanx.run.clock import Now
from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide
from phalanx.run.decide.escalation import text_of
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Failure, initial
from phalanx.run.driver.job_status import Known, overview
from phalanx.run.incidents.report import Incident, after

WAITS = Policy(give_up_s=0)


def four_hosts(policy: Policy | None = None, *, spares: int = 1, **more: object) -> World:
    """Four hosts with two workers each and spares, running."""
    world = World(Job("j", 4, 2, spares), policy, **more)  # type: ignore[arg-type]
    world.run_until(running)
    world.run_for(10)
    return world


def checks(world: World, since: int) -> list[tuple[str, str]]:
    return [(a.host, a.kind) for _, a in world.log[since:] if isinstance(a, act.Check)]


def finish(world: World) -> act.Finish:
    (action,) = world.taken("Finish")
    assert isinstance(action, act.Finish)
    return action


def last_start(world: World) -> act.Start:
    action = world.taken("Start")[-1]
    assert isinstance(action, act.Start)
    return action


# Beginning


def test_a_job_begins_once_its_hosts_have_passed_their_checks_and_more_hosts_than_needed_stay_spare():
    world = World(Job("j", 4, 2, spares=1), hosts=7)
    world.run_until(running)
    assert last_start(world).placement == ("a", "b", "c", "d")
    assert sorted(world.states().values()) == ["active"] * 4 + ["spare"] * 3


def test_ranks_are_placed_by_rack_and_then_by_name():
    racks = {"a": "r2", "b": "r1", "c": "r2", "d": "r1"}
    world = World(Job("j", 4), racks=racks)
    world.run_until(running)
    assert last_start(world).placement == ("b", "d", "a", "c")


def test_a_bad_spare_is_evicted_before_it_does_harm_and_another_is_asked_for():
    world = World(Job("j", 2, spares=1), pool=["x"])
    world.hosts["c"].fails_checks = "memory bandwidth 3 GB/s, at least 20"
    world.run_until(running)
    world.run_until(lambda w: w.states().get("x") == "spare")
    assert world.states()["c"] == "evicted"
    assert "memory bandwidth" in str(world.taken("Alert")[0])


def test_a_job_without_enough_hosts_gives_up_with_status_3_and_may_be_queued_again():
    world = World(Job("j", 4), Policy(give_up_s=60), hosts=3)
    world.run_until(ended)
    assert (finish(world).status, finish(world).requeue, world.now_s) == (3, True, 60.0)


def test_it_ends_when_every_rank_has_returned():
    world = four_hosts()
    world.finish_work()
    assert finish(world).status == 0


def test_the_steps_that_are_made_until_the_ranks_have_stopped_count():
    world = four_hosts()
    world.deliver(ev.StopAsked(world.now_s, "ada"))
    world.deliver(ev.Advanced(world.now_s, 1, 5000, True))
    world.run_until(ended)
    assert world.state.progress.done == 5000


# Clean deaths


@pytest.mark.parametrize("rank", [0, 1, 4, 7])
def test_a_killed_rank_costs_a_passive_check_of_its_host_and_nothing_else(rank: int):
    world = four_hosts()
    before, since = world.now_s, len(world.log)
    world.kill(rank)
    world.run_until(attempt_runs(2))
    host = "abcd"[rank // 2]
    assert checks(world, since) == [(host, "passive")]
    assert not {"Gather", "Evict", "Release"} & set(world.kinds(since))
    assert last_start(world).placement == ("a", "b", "c", "d")
    assert world.now_s - before < 0.6
    assert f"rank {rank} on {host}: killed by SIGKILL" in world.story()


@pytest.mark.parametrize(
    ("imported_s", "more"), [(4.06, "; --start warm would have spared 4.1 s of it"), (0.9, ""), (-1.0, "")]
)
def test_a_restart_says_what_a_warm_one_would_have_spared(imported_s: float, more: str):
    world = four_hosts()
    world.imported_s = imported_s
    world.kill(0)
    world.run_until(attempt_runs(2))
    [close] = world.taken("CloseIncident")
    assert isinstance(close, act.CloseIncident) and close.text == f"attempt 2 makes steps{more}"


def test_the_incident_says_what_was_seen_and_decided_and_how_long_each_phase_took():
    world = four_hosts(resumes_every=50)
    world.kill(3)
    world.run_until(attempt_runs(2))
    opened, closed = world.taken("OpenIncident"), world.taken("CloseIncident")
    assert isinstance(opened[0], act.OpenIncident) and opened[0].seen_by == "executor of b"
    (close,) = closed
    assert isinstance(close, act.CloseIncident)
    assert set(close.seconds) == {"stopping", "checking", "opening", "starting", "first step"}
    assert 0 <= close.lost_steps < 50 and close.lost_steps == close.from_step - close.to_step
    assert (close.result, close.status) == ("recovered", -1)
    assert opened[0].where == act.Where("b", 3, close.from_step)


def test_last_lines_of_ranks_that_left_with_one_status_may_differ() -> None:
    said = [Failure(0, "status", "process", f"returned exit status {code}{ev.LAST_LINE}{line}") for code, line in
            ((1, "no data on /disk/a"), (1, "gone"))]  # fmt: skip
    assert text_of(said[0]) == text_of(said[1])


def test_a_script_that_starts_over_is_told_so_loudly_with_what_to_do() -> None:
    world = four_hosts(resumes_every=0)
    for attempt in (2, 3):
        world.kill(3)
        world.run_until(attempt_runs(attempt))
    for close in world.taken("CloseIncident"):
        assert isinstance(close, act.CloseIncident) and close.lost_steps == close.from_step - close.to_step > 0
        assert close.text.endswith("started over: your script does not load its checkpoint")
        assert any(act.GO_ON_PAGE in text for text in close.to_do)
    assert [alert.level for alert in world.taken("Alert") if "started over" in alert.text] == ["error", "error"]


@pytest.mark.parametrize("how", [{"resumes_every": 1}, {"resumes_every": 0, "says_restored": True}])
def test_who_goes_on_or_knows_that_there_is_nothing_to_load_is_not_told_to_load_it(how: dict[str, Any]) -> None:
    world = four_hosts(**how)
    world.kill(3)
    world.run_until(attempt_runs(2))
    assert "started over" not in world.story()


def test_what_is_lost_by_a_script_without_numbers_is_not_known_and_all_attempts_count_at_the_end() -> None:
    world = four_hosts(is_absolute=False)
    made = 0
    for attempt in (2, 3):
        world.kill(3)
        world.run_until(attempt_runs(attempt))
        made += world.state.progress.last_done
    (first, _) = world.taken("CloseIncident")
    assert isinstance(first, act.CloseIncident) and first.lost_steps is None
    end = replace(world.state, phase="ended", progress=replace(world.state.progress, done=7))
    assert made > 0 and overview(Known(end), Now(0.0, world.now_s)).step == made + 7


def test_a_word_that_only_follows_waits_for_the_culprits():
    world = four_hosts()
    follow = ev.WorkerFailed(world.now_s, 1, 0, "raised", "network", "Connection closed by peer", True)
    world.deliver(follow)
    assert world.state.phase == "diagnosing"
    world.kill(5)
    world.run_until(attempt_runs(2))
    assert "c: first fault" in world.story() and "a: first fault" not in world.story()


def test_if_all_only_follow_every_host_is_checked_passively():
    world = four_hosts()
    since = len(world.log)
    for rank in range(8):
        world.deliver(ev.WorkerFailed(world.now_s, 1, rank, "raised", "network", "Connection closed", True))
    world.run_until(attempt_runs(2))
    assert checks(world, since) == [(host, "passive") for host in "abcd"]


def test_500_deaths_in_a_burst_are_one_recovery():
    world = World(Job("j", 1600, 8, spares=0))
    world.run_until(running)
    world.run_for(5)
    since = len(world.log)
    for rank in range(0, 4000, 8):
        world.deliver(ev.WorkerFailed(world.now_s, 1, rank, "signal", "process", "killed by SIGKILL"))
    world.run_until(attempt_runs(2))
    kinds = world.kinds(since)
    assert (kinds.count("OpenIncident"), kinds.count("Stop"), kinds.count("Start")) == (1, 1, 1)
    assert "a common cause, no host is blamed" in world.story()
    assert len(checks(world, since)) == 500


# User code


def test_an_exception_that_most_ranks_raise_stops_at_once_and_burns_no_host():
    world = four_hosts()
    world.throw(list(range(8)), "ValueError: batch 8 does not divide")
    world.run_until(ended)
    assert finish(world).status == 1 and not finish(world).requeue
    assert "batch 8 does not divide" in finish(world).reason
    assert not world.taken("Evict", "Release")


@pytest.mark.parametrize("fault", ["user", "host"])
def test_source_that_cannot_be_compiled_is_the_users_code_at_the_word_of_the_first_rank(fault: ev.Fault):
    world = World(Job("j", 4, 2))
    world.run_until(lambda w: w.state.phase == "starting")
    began_s, words = world.now_s, "SyntaxError: invalid syntax (train.py, line 2)"
    world.deliver(ev.WorkerFailed(world.now_s, 1, 5, "syntax", fault, words))  # the others follow much later
    world.run_until(ended)
    assert world.now_s - began_s < 1.0
    assert finish(world).status == 1 and not finish(world).requeue
    assert finish(world).reason == f"the source is wrong, whichever host runs it: {words}"
    assert not world.taken("Check", "Evict")[4:] and len(world.taken("Start")) == 1


def test_source_that_one_host_alone_cannot_compile_is_not_blamed_on_a_code_that_has_run():
    world = four_hosts()
    world.kill(1)
    world.run_until(lambda w: w.state.phase == "starting" and w.state.attempt == 2)
    world.deliver(
        ev.WorkerFailed(world.now_s, 2, 5, "syntax", "user", "SyntaxError: invalid syntax (train.py, line 2)")
    )
    world.run_until(attempt_runs(3))
    assert running(world)


def left_early(world: World, rank: int = 3) -> None:
    """A rank leaves with status 0, and the others only see that it is gone."""
    attempt, step = world.state.attempt, world.step
    world._freeze()
    for other in range(8):
        event = ev.WorkerFailed(world.now_s, attempt, other, "raised", "network", "closed by peer", True, step)
        if other != rank:
            world.deliver(event)
        if other == 5:  # its word comes late
            world.deliver(ev.LeftEarly(world.now_s, attempt, (rank,), (step,)))


def test_a_rank_that_leaves_with_status_0_before_the_others_is_named_and_no_host_is_blamed():
    world = four_hosts()
    since, step = len(world.log), world.step
    left_early(world)
    world.run_until(attempt_runs(2))
    said = f"rank 3 left with exit status 0 while others had not ended (step {step})"
    assert said in world.story() and "the script let it go" in world.story()
    assert checks(world, since) == [(host, "passive") for host in "abcd"]
    assert world.state.history == {}


def report_of(world: World) -> Incident:
    """The first of its reports, as it is written."""
    report: Incident | None = None
    for _, action in world.log:
        if isinstance(action, act.OpenIncident | act.AddToIncident | act.CloseIncident) and action.number == 1:
            report = after(report, action, "j", world.now_s, lambda text: text)
    assert report is not None
    return report


def advice_of(world: World) -> list[str]:
    outcome = report_of(world).outcome
    assert outcome is not None
    return outcome.to_do


def test_the_title_and_the_advice_are_of_the_rank_that_left_and_not_of_those_that_noticed():
    world = four_hosts()
    left_early(world)
    world.run_until(attempt_runs(2))
    report = report_of(world)
    assert report.title.startswith("rank 3 on b: left with exit status 0 while others had not ended; ")
    assert [text for text in advice_of(world) if text.endswith("phalanx run logs 3")]
    assert not [text for text in advice_of(world) if "logs 0" in text]


def test_the_title_is_of_the_rank_that_was_killed_also_where_others_of_its_host_were_heard_first():
    world = four_hosts()
    world.deliver(ev.WorkerFailed(world.now_s, 1, 2, "raised", "network", "closed by peer", True, world.step))
    world.deliver(ev.WorkerFailed(world.now_s, 1, 3, "signal", "process", "killed by SIGKILL", False, world.step))
    world._freeze()
    world.run_until(attempt_runs(2))
    report = report_of(world)
    assert report.title.startswith("rank 3 on b: killed by SIGKILL; ")
    assert advice_of(world) == []  # it came from outside


def test_a_hang_of_the_others_is_titled_with_the_rank_that_left():
    world = four_hosts()
    world.deliver(ev.LeftEarly(world.now_s, 1, (3,), (world.step,)))
    world.hang(6)
    world.run_until(attempt_runs(2))
    assert ", rank 3 on b left with exit status 0" in report_of(world).title
    assert "suspected" not in report_of(world).title


def test_an_exception_of_the_script_is_advised_to_be_read_after_the_restart_too():
    world = four_hosts()
    world.throw([5], "IndexError: index 7 is out of range")
    world.run_until(attempt_runs(2))
    advice = "read the log of rank 5 (IndexError: index 7 is out of range): phalanx run logs 5"
    assert advice_of(world) == [advice]


def test_a_rank_that_leaves_early_at_the_same_step_again_is_the_users_code():
    world = four_hosts(is_absolute=False, resumes_every=0)
    for _ in range(2):
        world.run_until(running)
        world.base_step, world.running_since_s = 100, world.now_s
        left_early(world)
        world.run_for(10)
    assert ended(world) and finish(world).status == 1
    assert "rank 3 left with exit status 0 while others had not ended" in finish(world).reason


def test_a_hang_of_the_others_is_of_the_rank_that_left_and_of_nobody_whom_the_evidence_names():
    world = four_hosts()
    since = len(world.log)
    world.deliver(ev.LeftEarly(world.now_s, 1, (3,), (world.step,)))
    world.hang(6)
    world.run_until(attempt_runs(2))
    assert "rank 3 left with exit status 0" in world.story()
    assert ("d", "quick") not in checks(world, since)


def test_a_rank_that_fails_by_itself_counts_more_than_others_that_left():
    world = four_hosts()
    world.deliver(ev.LeftEarly(world.now_s, 1, (3,), (world.step,)))
    world.kill(6)
    world.run_until(attempt_runs(2))
    assert "d: first fault" in world.story() and "rank 3 left" not in world.story()


def test_an_exception_of_one_rank_restarts_once_and_stops_when_it_comes_back_at_the_same_step():
    world = four_hosts()
    step = world.step
    world.throw([5], f"IndexError: index {step} is out of range")
    world.run_until(attempt_runs(2))
    world.deliver(
        ev.WorkerFailed(world.now_s, 2, 5, "raised", "user", f"IndexError: index {step} is out of range", False, step)
    )
    world.run_until(ended)
    assert finish(world).status == 1
    assert "came back in the next attempt" in finish(world).reason


def test_the_same_exception_at_another_step_is_no_proof_and_restarts():
    world = four_hosts()
    world.throw([5], "OSError: hiccup")
    world.run_until(attempt_runs(2))
    world.run_for(20)
    world.throw([5], "OSError: hiccup")
    world.run_until(attempt_runs(3))


def test_bad_input_that_a_rank_says_before_the_first_step_ends_with_status_2():
    world = World(Job("j", 2, 2))
    world.run_until(lambda w: w.state.phase == "starting")
    world.throw([0], "train.lr = -1: it is negative; use more", "user")
    world.run_until(ended)
    assert finish(world).status == 2


def test_a_program_that_refuses_its_input_on_all_ranks_is_not_started_again_and_on_one_rank_it_is():
    everywhere = World(Job("j", 2, 2))
    everywhere.run_until(lambda w: w.state.phase == "starting")
    everywhere.throw([0, 1, 2, 3], "returned exit status 2: error: model.heads = 3", "usage")
    everywhere.run_until(ended)
    assert finish(everywhere).status == 2 and not finish(everywhere).requeue
    assert finish(everywhere).reason == "bad input: returned exit status 2: error: model.heads = 3"
    assert len(everywhere.taken("Start")) == 1 and not everywhere.taken("Evict", "Release")

    one = World(Job("j", 2, 2))
    one.run_until(lambda w: w.state.phase == "starting")
    one.throw([1], "returned exit status 2: error: no such file", "usage")
    one.run_until(attempt_runs(2))


def test_ranks_that_refuse_their_input_seconds_apart_are_waited_for():
    world = World(Job("j", 2, 2))
    world.run_until(lambda w: w.state.phase == "starting")
    for rank in (1, 3, 0):
        world.refuse(rank, "returned exit status 2: error: model.heads = 3")
        world.run_for(1.5)
    world.run_until(ended)
    assert finish(world).status == 2 and len(world.taken("Start")) == 1


def test_input_that_one_rank_refuses_twice_before_any_step_is_bad_input():
    world = World(Job("j", 2, 2))
    for attempt in (1, 2):
        world.run_until(lambda w, n=attempt: w.state.phase == "starting" and w.state.attempt == n)
        world.throw([1], "returned exit status 2: error: no such file", "usage")
    world.run_until(ended)
    assert finish(world).status == 2 and "before any step" in finish(world).reason


def test_a_script_that_starts_on_no_host_is_bad_input_and_one_host_that_cannot_start_is_not():
    everywhere = World(Job("j", 3))
    for host in everywhere.hosts.values():
        host.fails_start = "no file train.py"
    everywhere.run_until(ended)
    assert finish(everywhere).status == 2

    one = World(Job("j", 3, spares=1))
    one.hosts["b"].fails_start = "no space left on device"
    one.hosts["b"].fails_checks = "disk is full"
    one.run_until(lambda w: w.state.phase == "waiting" and w.state.hosts != {} and w.states().get("b") == "evicted")
    one.run_until(running, 60)
    assert last_start(one).placement == ("a", "c", "d") or "b" not in last_start(one).placement


def test_a_loss_that_is_no_number_goes_back_once_and_stops_when_it_comes_back_at_the_same_step():
    world = four_hosts()
    world.deliver(ev.LossBroken(world.now_s, 1, 210))
    world.run_until(attempt_runs(2))
    world.deliver(ev.LossBroken(world.now_s, 2, 210))
    world.run_until(ended)
    assert finish(world).status == 1 and not world.taken("Evict")


def test_a_loss_of_one_rank_that_breaks_at_the_same_step_again_is_no_host():
    world = four_hosts()
    world.deliver(ev.LossBroken(world.now_s, 1, 210, (0,)))
    world.run_until(attempt_runs(2))
    world.deliver(ev.LossBroken(world.now_s, 2, 210, (0,)))
    world.run_until(ended)
    assert finish(world).status == 1 and not world.taken("Evict")


def test_a_state_that_was_broken_when_it_was_written_is_not_gone_on_from_for_ever():
    world = four_hosts()
    world.deliver(ev.LossBroken(world.now_s, 1, 210))
    world.run_until(attempt_runs(2))
    world.deliver(ev.LossBroken(world.now_s, 2, 226, is_from_start=True))
    world.run_until(ended)
    assert finish(world).status == 1 and not world.taken("Evict")


# Escalation


def test_a_host_that_fails_again_and_again_is_checked_and_then_evicted():
    world = four_hosts()
    seen = []
    for attempt in (2, 3, 4):
        since = len(world.log)
        world.kill(3)
        world.run_until(attempt_runs(attempt))
        seen.append((checks(world, since), world.states()["b"]))
        world.run_for(30)
    assert seen == [([("b", "passive")], "active"), ([("b", "quick")], "active"), ([], "evicted")]
    assert last_start(world).placement == ("a", "e", "c", "d")


def test_a_suspect_that_does_not_pass_its_check_is_evicted_and_its_ranks_go_to_the_spare():
    world = four_hosts()
    world.kill(3, fault="host")
    world.hosts["b"].fails_checks = "uncorrectable ECC errors"
    world.run_until(attempt_runs(2))
    assert world.states()["b"] == "evicted"
    assert last_start(world).placement == ("a", "e", "c", "d")
    assert "e takes the ranks of b" in world.story()


def test_active_checks_have_good_peers_of_the_same_rack_first():
    world = four_hosts(racks={"a": "r1", "b": "r2", "c": "r2", "d": "r1", "e": "r3"})
    rank = world.state.placement.index("b") * 2
    world.kill(rank, fault="network")
    world.run_until(attempt_runs(2))
    (check,) = [a for a in world.taken("Check") if isinstance(a, act.Check) and a.peers]
    assert check.host == "b" and check.peers == ("c", "a")


def test_a_suspect_whose_checks_pass_is_not_evicted_when_nothing_can_replace_it():
    world = four_hosts(WAITS, spares=0)
    for attempt in (2, 3, 4):
        world.kill(3)
        world.run_until(attempt_runs(attempt))
        world.run_for(30)
    assert not world.taken("Evict")
    assert "nothing can replace it" in world.story()


def test_a_fault_that_stays_with_its_place_goes_back_to_the_previous_code_and_then_stops():
    world = World(Job("j", 4, 2, 2, previous_version="v1"), resumes_every=0)

    def crash(world: World, attempt: int) -> None:
        world.at(0.0, lambda: world.kill(3, "SIGSEGV") if running(world) else None)

    world.on_attempt = crash
    world.run_until(ended)
    versions = [a.version for a in world.taken("Start") if isinstance(a, act.Start)]
    assert versions[0] == "" and versions[-1] == "v1"
    assert versions == sorted(versions)
    assert finish(world).status == 4 and not finish(world).requeue
    assert sorted(name for name, state in world.states().items() if state == "evicted") == ["b"]


def test_a_fault_that_stays_with_a_group_evicts_the_hosts_of_the_group():
    world = World(Job("j", 6, 1, 3), names_suspects=False)
    world.run_until(running)
    while not world.taken("Evict") or len(world.taken("Evict")) < 3:
        attempt = world.state.attempt
        world.hang(2)
        world.run_until(lambda w: w.state.phase == "diagnosing")
        world.deliver(ev.SuspectsNamed(world.now_s, attempt, (2,), "it is silent", "pipeline 1", (2, 3)))
        world.run_until(attempt_runs(attempt + 1))
        world.run_for(20)
    assert "the fault stays with pipeline 1" in world.story()
    evicted = [name for name, state in world.states().items() if state == "evicted"]
    assert "c" in evicted and "d" in evicted and len(evicted) == 3


def test_if_many_hosts_fail_their_checks_at_once_the_check_may_be_at_fault_and_few_are_evicted():
    world = World(Job("j", 16), Policy(give_up_s=0))
    world.run_until(running)
    for attempt in (2, 3):
        for rank in range(16):
            world.deliver(
                ev.WorkerFailed(world.now_s, attempt - 1, rank, "raised", "network", "Connection closed", True)
            )
        if attempt == 3:
            for host in world.hosts.values():
                host.fails_checks = "storage does not answer"
            world.run_until(lambda w: w.state.phase == "waiting")
        else:
            world.run_until(attempt_runs(2))
    assert sorted(world.states().values()).count("evicted") == 2
    assert sorted(world.states().values()).count("gone") == 14


# Hangs


def test_a_hang_is_killed_only_after_the_evidence_and_the_silent_rank_is_checked():
    world = four_hosts()
    since = len(world.log)
    world.hang(4)
    world.run_until(attempt_runs(2))
    kinds = world.kinds(since)
    assert kinds.index("Gather") < kinds.index("Stop")
    assert checks(world, since) == [("c", "quick")]
    assert "suspected: rank 4 on c" in world.story()


def test_a_hang_where_nobody_stands_out_does_not_wait_for_ever_and_checks_all_passively():
    world = four_hosts(names_suspects=False)
    since = len(world.log)
    world.hang(4)
    world.run_until(attempt_runs(2))
    assert checks(world, since) == [(host, "passive") for host in "abcd"]


def test_the_report_of_a_hang_advises_the_setting_and_tells_what_ranks_waited_for():
    world = four_hosts(names_suspects=False)
    waits = ("rank 4: waits for a pipe, in read (data.py:3)", "ranks 0, 1, 2: each waits for other ranks")
    world._on_Gather = lambda action: world.at(  # type: ignore[method-assign]
        0.1, lambda: world.deliver(ev.SuspectsNamed(world.now_s, 1, (), "nobody", waits=waits))
    )
    world.hang(4)
    world.run_until(attempt_runs(2))
    [close] = world.taken("CloseIncident")
    longer = f"run.limits.floor_s={2 * world.speeds.hang_limit:g}"
    assert any(longer in text for text in close.to_do) and all(wait in world.story() for wait in waits)


def test_the_report_of_a_stopped_rank_says_what_to_look_for():
    world = four_hosts()
    world.deliver(ev.NoProgress(world.now_s, 1, 11.0, 10.0, "stopped", "rank 4 has been stopped for 10 s", (4,)))
    world._freeze()
    world.run_until(attempt_runs(2))
    [close] = world.taken("CloseIncident")
    assert [text for text in close.to_do if "stopped" in text] and "floor_s" not in "".join(close.to_do)


def test_a_first_step_that_takes_too_long_has_a_setting_of_its_own():
    world = four_hosts()
    world.hang(4)
    world.run_until(lambda world: world.state.phase == "starting")
    world.deliver(ev.NoProgress(world.now_s, world.state.attempt, 301.0, 300.0))
    assert "set run.limits.first_step_s above it (now 300)" in world.story()
    assert any("run.limits.first_step_s=600" in text for text in world.state.incident.to_do)


def test_a_judge_that_never_answers_is_not_waited_for():
    world = four_hosts()
    world._on_Gather = lambda action: None  # type: ignore[method-assign]
    world.hang(0)
    world.run_until(attempt_runs(2))


def test_steps_that_advance_again_while_evidence_is_gathered_call_the_recovery_off():
    world = four_hosts()
    world.deliver(ev.NoProgress(world.now_s, 1, 9.0, 5.0))
    assert world.state.phase == "diagnosing"
    world.run_for(0.9)
    world.deliver(ev.Advanced(world.now_s, 1, world.step + 5, True))
    assert running(world) and not world.taken("Stop")


def test_silent_interfaces_with_no_step_recover_and_less_traffic_only_alerts():
    world = four_hosts()
    world.deliver(ev.TrafficSilent(world.now_s, 1, ("b",), 70, is_total=False))
    world.deliver(ev.TrafficSilent(world.now_s, 1, ("b",), 70, without_progress=False))
    assert running(world) and len(world.taken("Alert")) == 2
    world.deliver(ev.TrafficSilent(world.now_s, 1, ("b",), 70))
    assert world.state.phase == "diagnosing"


# Hosts that are lost, cut off, or unknown


def test_a_lost_host_is_replaced_by_the_spare_that_takes_its_ranks():
    world = four_hosts(pool=["x"])
    before = world.now_s
    world.lose_host("b")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "e", "c", "d")
    assert world.now_s - before < 2
    world.run_until(lambda w: w.states().get("x") == "spare")


def test_a_replacement_of_the_same_rack_is_preferred():
    racks = {"a": "r1", "b": "r2", "c": "r3", "d": "r4", "e": "r1", "f": "r3"}
    world = four_hosts(spares=2, racks=racks)
    place = world.state.placement.index("c")
    world.lose_host("c")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement[place] == "f"


def test_a_host_that_is_not_heard_of_stays_while_steps_advance():
    world = four_hosts()
    since = len(world.log)
    world.cut("c")
    world.run_for(600)
    assert running(world) and world.states()["c"] == "unknown" and world.state.attempt == 1
    assert world.kinds(since) == ["Alert"]
    world.reconnect("c")
    assert world.states()["c"] == "active" and world.kinds(since) == ["Alert"]


def test_a_host_that_is_neither_heard_of_nor_lets_steps_advance_is_given_back_and_replaced():
    world = four_hosts()
    world.lose_host("c", says_why="")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "e", "d")
    assert [a.host for a in world.taken("Release")] == ["c"]  # type: ignore[attr-defined]
    assert not world.taken("Evict")


def test_if_no_host_is_heard_of_the_driver_waits_since_it_may_be_cut_off_itself():
    world = four_hosts()
    for name in "abcd":
        world.cut(name)
    world.run_for(10)
    world.deliver(ev.NoProgress(world.now_s, 1, 10, 5))
    assert running(world) and "driver that is cut off" in str(world.taken("Alert")[-1])


def test_an_executor_that_comes_back_without_its_workers_begins_a_recovery():
    world = four_hosts()
    world.deliver(ev.HostJoined(world.now_s, "b", attempt=0))
    world.run_until(attempt_runs(2))
    assert "without the workers" in world.story()


def test_without_a_spare_the_job_waits_for_a_replacement_and_asks_for_one():
    world = four_hosts(WAITS, spares=0, pool=["x"])
    world.lose_host("d")
    world.run_until(lambda w: w.state.phase == "waiting")
    assert world.taken("AskForHosts")[-1] == act.AskForHosts(1)
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "c", "x")


def test_with_shrink_it_goes_on_with_the_largest_number_that_divides_and_grows_when_hosts_come():
    policy = Policy(when_missing="shrink", replace_wait_s=60)
    world = four_hosts(policy, spares=0)
    world.lose_host("b")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "c")
    assert world.states()["d"] == "spare"
    world.run_for(20)
    world.bring("x")
    world.run_until(attempt_runs(3))
    assert last_start(world).placement == ("a", "c", "d", "x")


def test_shrinking_keeps_to_the_allowed_numbers():
    policy = Policy(when_missing="shrink", replace_wait_s=5)
    world = World(Job("j", 4, allowed_hosts=(3, 1)), policy)
    world.run_until(running)
    world.lose_host("a")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("b", "c", "d")


def test_a_spare_that_is_lost_is_replaced_without_disturbing_training():
    world = four_hosts(pool=["x"])
    since = len(world.log)
    world.lose_host("e")
    world.run_until(lambda w: w.states().get("x") == "spare")
    assert world.state.attempt == 1 and "Stop" not in world.kinds(since)


# Faults during a recovery


@pytest.mark.parametrize("phase", ["diagnosing", "stopping", "checking", "opening", "starting"])
def test_a_host_that_is_lost_in_any_phase_of_a_recovery_is_replaced_too(phase: str):
    world = four_hosts(spares=2)
    world.hang(2)
    world.run_until(lambda w: w.state.phase == phase)
    world.lose_host("d")
    world.run_until(lambda w: w.state.phase == "running" and "d" not in w.state.placement)
    assert set(last_start(world).placement) <= {"a", "b", "c", "e", "f"}
    world.run_for(30)
    assert running(world) and world.state.incident is None
    assert len(world.taken("OpenIncident")) == len(world.taken("CloseIncident"))


def test_the_host_of_the_store_is_lost_while_the_ranks_start():
    world = World(Job("j", 3, spares=1))
    world.run_until(lambda w: w.state.phase == "starting")
    world.lose_host("a")
    world.run_until(running)
    assert last_start(world).placement == ("d", "b", "c")


def test_a_host_that_opens_no_store_is_checked_and_then_leaves():
    world = World(Job("j", 3, spares=1))
    world.hosts["a"].mute = {"OpenStore"}
    world.hosts["a"].fails_checks = "no free port"
    world.run_until(running)
    assert "a" not in world.state.placement and world.states()["a"] == "evicted"


def test_a_host_that_never_answers_the_start_is_not_waited_for_for_ever():
    world = World(Job("j", 3, spares=1))
    world.hosts["b"].mute = {"Start", "Stop", "Check"}
    world.run_until(lambda w: bool(w.taken("Release")) or running(w))
    world.hosts["b"].mute = set()
    world.run_until(running)
    assert "b" not in world.state.placement


def test_processes_that_do_not_end_take_their_host_out():
    world = four_hosts()
    world.hosts["a"].stuck = (4711,)
    world.kill(6)
    world.run_until(attempt_runs(2))
    assert world.states()["a"] == "evicted"
    assert last_start(world).placement == ("e", "b", "c", "d")
    assert "4711" in world.story()


# Restart limits


def test_a_job_that_never_makes_a_step_stops_with_status_4_after_pauses_that_double():
    policy = Policy(max_restarts_without_step=4, backoff_s=2, backoff_limit_s=5)
    world = World(Job("j", 2), policy)

    def die_in_start(world: World) -> None:
        attempt = world.state.attempt
        for rank in range(world.state.world_size):
            world.deliver(ev.WorkerFailed(world.now_s, attempt, rank, "raised", "network", "Connection closed", True))

    while not ended(world):
        world.run_until(lambda w: w.state.phase in ("starting", "ended"))
        if not ended(world):
            die_in_start(world)
            world.run_until(lambda w: w.state.phase != "starting")
    assert finish(world).status == 4 and not finish(world).requeue
    assert len(world.taken("Start")) <= 5
    times = [time_s for time_s, action in world.log if isinstance(action, act.OpenStore)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] < 1 and gaps[1] >= 2 and all(gap < 10 for gap in gaps)


def test_scripts_that_count_steps_from_their_start_progress_where_each_attempt_makes_more_than_all_before():
    world = four_hosts(WAITS, is_absolute=False, resumes_every=10)
    for attempt in range(2, 12):
        world.kill(attempt % 8)
        world.run_until(attempt_runs(attempt))
        world.run_for(10 + attempt)
    assert running(world)


def test_what_a_spare_has_left_of_an_attempt_that_the_journal_does_not_know_is_ended_and_its_number_not_used():
    world = four_hosts(spares=0)
    world.hosts["x"] = SimHost("x", attempt=7, ranks=[5])
    world._join(world.hosts["x"])
    world.run_for(10)
    assert world.hosts["x"].ranks == [] and world.states()["x"] == "spare"
    assert [(a.attempt, a.hosts) for a in world.taken("Stop")] == [(7, ("x",))]  # type: ignore[attr-defined]
    assert world.state.attempt == 1 and running(world)  # nobody else is disturbed
    world.kill(2)
    world.run_until(attempt_runs(8))


# The driver's own network


def cut_off(silent: int, policy: Policy | None = None) -> World:
    """Of eight hosts so many are not reached any more, just when all have to stop."""
    world = World(Job("j", 8), policy, hosts=8)
    world.run_until(running)
    world.run_for(5)
    for name in list(world.hosts)[1 : 1 + silent]:
        world.cut(name)
    world.kill(0)
    world.run_for(60)
    return world


def test_where_most_hosts_do_not_answer_at_once_none_is_given_back_but_people_are_told():
    world = cut_off(6)
    assert world.state.phase == "stopping" and world.taken("Release") == []
    (alert,) = [a.text for a in world.taken("Alert") if "cut off" in a.text]  # type: ignore[attr-defined]
    assert "6 of 8 hosts do not say that their processes are gone" in alert
    for name in world.state.placement[1:7]:
        world.reconnect(name)
    world.run_until(attempt_runs(2))
    assert world.taken("Release") == [] and set(last_start(world).placement) == set(host_names(8))


def test_where_most_hosts_never_answer_they_are_given_back_in_the_end():
    world = cut_off(6)
    begun_s = world.state.phase_since_s
    world.run_until(lambda world: bool(world.taken("Release")))
    assert world.now_s - begun_s == pytest.approx(world.policy.cut_off_s, abs=0.1)
    assert len(world.taken("Release")) == 6


def test_few_hosts_that_do_not_answer_are_given_back_soon():
    world = cut_off(2)
    assert len(world.taken("Release")) == 2 and world.state.phase == "waiting"


def test_those_that_are_left_when_most_have_answered_are_not_waited_for_longer():
    world = cut_off(6)
    for name in world.state.placement[1:6]:
        world.reconnect(name)
        world.run_for(1)
    world.run_for(world.policy.unknown_stop_s)
    assert [a.host for a in world.taken("Release")] == ["g"]  # type: ignore[attr-defined]


def test_a_job_that_ends_does_not_wait_for_hosts_that_are_not_reached():
    world = cut_off(0)
    for host in world.hosts.values():
        world.cut(host.name)
    world.deliver(ev.StopAsked(world.now_s, "ada", 0.0))
    begun_s = world.now_s
    world.run_until(ended)
    assert world.now_s - begun_s <= world.policy.stop_s + 0.1


def cut_off_in_checks(silent: int) -> World:
    """Of eight hosts so many are not reached any more, just when all are checked because nobody stands out."""
    world = World(Job("j", 8), None, hosts=8)
    world.run_until(running)
    world.run_for(5)
    for name in list(world.hosts)[1 : 1 + silent]:
        world.hosts[name].mute.add("Check")
    world.names_suspects = False
    world.hang(0)
    world.run_until(lambda world: world.state.phase == "checking")
    world.run_for(world.policy.passive_check_s + 1)
    return world


def test_where_most_hosts_do_not_answer_checks_none_is_given_back_at_once():
    world = cut_off_in_checks(6)
    assert world.state.phase == "checking" and world.taken("Release") == []
    (alert,) = [a.text for a in world.taken("Alert") if "cut off" in a.text]  # type: ignore[attr-defined]
    assert "6 of 8 hosts do not answer their checks" in alert
    world.run_until(lambda world: bool(world.taken("Release")))
    assert len(world.taken("Release")) == 6, "in the end they are"
    assert len([a for a in world.taken("Alert") if "cut off" in a.text]) == 1  # type: ignore[attr-defined]


def test_few_hosts_that_do_not_answer_their_checks_are_given_back_soon():
    world = cut_off_in_checks(2)
    assert len(world.taken("Release")) == 2 and not [a for a in world.taken("Alert") if "cut off" in a.text]  # type: ignore[attr-defined]


# People


def test_a_person_stops_the_job_with_grace_and_the_second_time_at_once():
    world = four_hosts()
    world.deliver(ev.StopAsked(world.now_s, "ada"))
    world.deliver(ev.StopAsked(world.now_s, "ada"))
    assert [a.grace_s for a in world.taken("Stop")] == [30.0, 0.0]  # type: ignore[attr-defined]
    world.run_until(ended)
    assert finish(world).status == 5 and "ada" in finish(world).reason


def test_a_person_says_how_long_ranks_have_and_a_driver_that_is_started_again_knows_it():
    world = four_hosts()
    for host in world.hosts.values():
        host.mute.add("Stop")  # their ranks are still saving
    world.deliver(ev.StopAsked(world.now_s, "ada", 300.0))
    world.run_for(100)
    assert world.state.phase == "stopping"
    world.stop_driver()
    world.restart_driver()
    world.run_for(1)  # hosts connect again, and hear it again: nobody is killed for that
    assert {a.grace_s for a in world.taken("Stop")} == {300.0}  # type: ignore[attr-defined]
    world.deliver(ev.StopAsked(world.now_s, "ada", 5.0))
    assert world.taken("Stop")[-1].grace_s == 5  # type: ignore[attr-defined]
    begun_s = world.now_s
    world.run_until(ended)
    assert finish(world).status == 5
    assert world.now_s - begun_s == pytest.approx(5 + world.policy.stop_s, abs=0.1)


def test_a_person_may_give_no_grace_at_once():
    world = four_hosts()
    world.deliver(ev.StopAsked(world.now_s, "ada", 0.0))
    assert [a.grace_s for a in world.taken("Stop")] == [0.0]  # type: ignore[attr-defined]


def test_when_time_is_short_it_stops_in_time_and_asks_to_be_queued_again():
    world = four_hosts()
    world.deliver(ev.TimeShort(world.now_s, 20))
    assert world.taken("Stop")[-1].grace_s == 10  # type: ignore[attr-defined]
    world.run_until(ended)
    assert (finish(world).status, finish(world).requeue) == (6, True)


def test_a_drained_host_leaves_when_a_spare_takes_its_place():
    world = four_hosts(spares=0)
    world.deliver(ev.DrainAsked(world.now_s, "b", "ada"))
    world.run_for(60)
    assert world.state.attempt == 1 and world.states()["b"] == "draining"
    world.bring("x")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "x", "c", "d") and world.states()["b"] == "gone"


def test_two_hosts_are_drained_one_by_one_as_replacements_come():
    world = four_hosts(WAITS, spares=0)
    for name in "bc":
        world.deliver(ev.DrainAsked(world.now_s, name, "ada"))
    world.bring("x")
    world.run_for(60)
    assert world.state.attempt == 2 and last_start(world).placement == ("a", "x", "c", "d")
    world.bring("y")
    world.run_for(60)
    assert world.state.attempt == 3 and last_start(world).placement == ("a", "x", "y", "d")


def test_a_drained_host_still_serves_when_another_is_lost_and_nothing_can_replace_both():
    world = four_hosts(WAITS, spares=0)
    world.deliver(ev.DrainAsked(world.now_s, "b", "ada"))
    world.lose_host("d")
    world.run_for(60)
    assert world.state.phase == "waiting"
    world.bring("x")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "c", "x") and world.states()["b"] == "draining"


def test_an_evicted_host_leaves_at_once_and_comes_back_only_if_a_person_lets_it():
    world = four_hosts()
    world.deliver(ev.EvictAsked(world.now_s, "b", "ada"))
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "e", "c", "d")
    world.bring("b")
    assert world.states()["b"] == "evicted"
    world.deliver(ev.ReturnAsked(world.now_s, "b", "ada"))
    world.bring("b")
    world.run_until(lambda w: w.states()["b"] == "spare")


def test_a_slow_host_is_told_and_replaced_only_where_the_policy_says_so():
    world = four_hosts()
    world.deliver(ev.SlowHost(world.now_s, 1, "c", 1.3))
    world.run_for(20)
    assert world.state.attempt == 1 and len(world.taken("Alert")) == 1

    world = four_hosts(Policy(replace_slow=True))
    world.deliver(ev.SlowHost(world.now_s, 1, "c", 1.3))
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "e", "d")


def faulty(world: World, *hosts: str, judge: str = "machines", advice: str = "evict") -> ev.Detected:
    who = tuple(Culprit("host", host, (), (host,)) for host in hosts)
    found = Detection("faulty machine", f"{' and '.join(hosts)} differ", who, then=("look at it",), advice=advice)
    return ev.Detected(world.now_s, judge, found)


def test_a_host_that_is_faulty_by_its_metrics_is_told_and_replaced_only_where_the_policy_says_so():
    world = four_hosts()
    world.deliver(faulty(world, "c"))
    world.run_for(20)
    assert world.state.attempt == 1 and not world.state.leaving
    assert [one.text for one in world.taken("Alert")] == ["c differ. What to do: look at it"]

    world = four_hosts(Policy(replace_faulty=True))
    world.deliver(faulty(world, "c"))
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "e", "d")
    assert not world.taken("Evict") and world.states()["c"] == "gone"  # it may come back, and is checked then
    world.bring("c")
    world.run_until(lambda w: w.states()["c"] == "spare")
    assert world.taken("Check")[-1].host == "c"


def test_a_faulty_host_stays_until_there_is_a_spare():
    world = World(Job("j", 4, 2), Policy(replace_faulty=True))
    world.run_until(running)
    world.deliver(faulty(world, "c"))
    world.run_for(60)
    assert world.state.attempt == 1 and world.states()["c"] == "draining"
    world.bring("e")
    world.run_until(attempt_runs(2))
    assert last_start(world).placement == ("a", "b", "e", "d")


@pytest.mark.parametrize(
    ("hosts", "judge", "advice"),
    [("c", "machines", "check"), ("c", "machines", "watch"), ("c", "drift", "evict"), ("cd", "machines", "evict")],
)
def test_less_sure_verdicts_other_judges_and_several_hosts_at_once_are_only_told(hosts: str, judge: str, advice: str):
    world = four_hosts(Policy(replace_faulty=True))
    world.deliver(faulty(world, *hosts, judge=judge, advice=advice))
    world.run_for(20)
    assert world.state.attempt == 1 and not world.state.leaving and len(world.taken("Alert")) == 1


def test_so_many_faulty_hosts_in_an_hour_leave_and_the_next_one_stays():
    world = World(Job("j", 6, 1, 4), Policy(replace_faulty=True, faulty_per_hour=2))
    world.run_until(running)
    for attempt, host in enumerate("abc", 2):
        world.deliver(faulty(world, host))
        world.run_for(60)
        assert world.state.attempt == min(attempt, 3)
    assert "policy.faulty_per_hour" in world.taken("Alert")[-1].text and world.state.has_place("c")
    assert "`phalanx run evict c`" in world.taken("Alert")[-1].text
    world.run_for(3600)
    world.deliver(faulty(world, "d"))
    world.run_for(60)
    assert world.state.attempt == 4 and not world.state.has_place("d")


# Advice only


@pytest.mark.parametrize("what", ["kill", "hang", "lose", "slow"])
def test_a_policy_that_only_advises_says_what_it_would_do_and_does_nothing(what: str):
    world = four_hosts(Policy(advise_only=True, replace_slow=True))
    since = len(world.log)
    if what == "kill":
        world.deliver(ev.WorkerFailed(world.now_s, 1, 3, "signal", "process", "killed by SIGKILL"))
    elif what == "hang":
        world.deliver(ev.NoProgress(world.now_s, 1, 9, 5))
    elif what == "lose":
        world.deliver(ev.HostGone(world.now_s, "b", "power"))
    else:
        world.deliver(ev.SlowHost(world.now_s, 1, "b", 1.5))
    world.run_for(5)
    assert set(world.kinds(since)) == {"Alert"}
    assert "would" in str(world.log[-1][1]) and world.state.attempt == 1


def test_with_advice_only_a_job_whose_ranks_have_all_ended_is_over():
    world = four_hosts(Policy(advise_only=True))
    world.throw([2])
    world.run_until(ended)
    assert finish(world).status == 4
    assert "Stop" not in world.kinds()


# The driver itself


@pytest.mark.parametrize("phase", ["waiting", "opening", "starting", "running", "diagnosing", "stopping", "checking"])
def test_a_driver_that_is_killed_in_any_phase_goes_on_from_its_journal(phase: str):
    world = World(Job("j", 4, 2, 1), speeds=Speeds(step=0.05))
    if phase in ("diagnosing", "stopping", "checking"):
        world.run_until(running)
        world.run_for(10)
        world.hang(2)
    world.run_until(lambda w: w.state.phase == phase)
    attempt, since = world.state.attempt, len(world.log)
    world.stop_driver()
    world.run_for(5)
    world.restart_driver()
    world.run_until(running)
    if phase == "running":
        assert world.kinds(since) == ["AskForHosts"] and world.state.attempt == attempt
    world.run_for(60)
    assert running(world)


def test_a_driver_that_was_down_when_a_rank_died_learns_of_it_and_recovers():
    world = four_hosts()
    world.stop_driver()
    world.run_for(3)
    world.restart_driver()
    world.kill(1)
    world.run_until(attempt_runs(2))


def test_time_in_which_the_driver_was_down_counts_against_no_host():
    world = four_hosts()
    world.cut("a")
    world.run_for(30)
    world.kill(3)
    world.run_until(lambda w: w.state.phase == "stopping")
    world.stop_driver()
    world.run_for(100)
    world.hosts["a"].is_cut = False
    world.restart_driver()
    world.run_until(attempt_runs(2))
    assert not world.taken("Release") and last_start(world).placement == ("a", "b", "c", "d")


def test_a_driver_that_is_restarted_after_the_end_says_the_end_again():
    world = four_hosts()
    world.finish_work()
    world.restart_driver()
    assert len(world.taken("Finish")) == 2


def test_a_job_whose_time_was_short_goes_on_with_other_hosts_when_it_is_started_again():
    world = four_hosts()
    world.deliver(ev.TimeShort(world.now_s, 60.0))
    world.run_until(ended)
    assert world.taken("Finish")[-1].status == 6 and world.taken("Finish")[-1].requeue
    attempt = world.state.attempt
    world.restart_driver()
    assert world.taken("AskForHosts")[-1].count == 5  # all of them, and the spare
    world.run_until(attempt_runs(attempt + 1))
    assert len(world.taken("Finish")) == 1


def test_a_driver_that_has_lost_its_journal_goes_above_the_attempts_that_executors_have_seen():
    world = World(Job("j", 2))
    for host in world.hosts.values():
        host.attempt = 7
    world.run_until(running)
    assert world.state.attempt == 8


def test_a_host_that_comes_back_when_time_is_over_hears_of_the_next_attempt_only() -> None:
    state = initial(Policy(when_missing="shrink", replace_wait_s=0.0), Job("j", hosts=2))
    for event in (ev.JobBegun(0.0), ev.HostJoined(1.0, "a"), ev.HostJoined(1.0, "b")):
        state, _ = decide(state, event)
    for name, check in list(state.checks.items()):
        state, _ = decide(state, ev.CheckPassed(2.0, name, check.number))
    for event in (ev.StoreOpened(3.0, 1, 2950), ev.Started(4.0, 1, "a"), ev.Running(5.0, 1, 1)):
        state, _ = decide(state, event)
    assert (state.phase, state.placement, list(state.awaited)) == ("stopping", ("a",), ["a"])  # it grows to both
    assert state.deadline_s is not None
    after, actions = decide(state, ev.HostJoined(state.deadline_s, "a"))
    assert after.attempt == 2
    told = [action.attempt for action in actions if isinstance(action, act.OpenStore | act.Start | act.Stop)]
    assert told and set(told) == {2}


@pytest.mark.parametrize("seconds", [45.0, 200.0])
def test_a_check_that_is_only_late_is_asked_once_more_before_its_host_loses_its_place(seconds: float):
    world = four_hosts()
    usual_s = world.policy.quick_check_s
    for attempt in (2, 3):  # the second time that a host loses a rank it has to pass a quick check
        world.run_for(20)
        if attempt == 3:
            world.speeds.check["quick"] = seconds
        since, began_s = len(world.log), world.now_s
        world.kill(3)
        world.run_until(attempt_runs(attempt))
    asked = [one for one in checks(world, since) if one == ("b", "quick")]
    assert len(asked) == 2
    late = [a for a in world.taken("Release") if isinstance(a, act.Release) and a.host == "b"]
    assert bool(late) == (seconds > 3 * usual_s)
    assert world.now_s - began_s < 3 * usual_s + 60


def test_a_late_check_of_a_host_that_is_not_heard_of_is_not_asked_again():
    world = four_hosts()
    world.kill(3)
    world.run_until(attempt_runs(2))
    world.run_for(20)
    world.speeds.check["quick"] = 1000.0
    since = len(world.log)
    world.kill(3)
    world.run_until(lambda w: ("b", "quick") in checks(w, since))
    world.deliver(ev.HostUnknown(world.now_s, "b"))
    world.run_until(lambda w: w.taken("Release"))
    assert checks(world, since).count(("b", "quick")) == 1
