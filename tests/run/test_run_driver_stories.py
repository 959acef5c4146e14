"""Stories of a job whose hosts tell more than steps: log rules, traffic, own times, what they run, and who they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver_helpers import FakeHost, Town, running

from phalanx.run import messages
from phalanx.run.decide import actions, events
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.driver import NO_PROGRESS_AGAIN_S, WatchSettings

JOB = Job("j", hosts=2, workers_per_host=2, spares=1)
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
SCRIPT = messages.Prepare(["train.py", "--fast"], False, "/new", {})

Make = Callable[..., Town]


@pytest.fixture(name="make")
def make_fixture(tmp_path: Path) -> Iterator[Make]:
    towns: list[Town] = []

    def make(hosts: str = "abc", job: Job = JOB, policy: Policy | None = None, **settings: Any) -> Town:
        towns.append(Town(tmp_path, list(hosts), job, policy, WatchSettings(**settings)))
        for number, host in enumerate(towns[-1].hosts.values()):
            host.boot = f"boot {number}"
        towns[-1].begin()
        return towns[-1]

    yield make
    for town in towns:
        town.journal.close()


def found(rule: str, line: str, rank: int = -1, **given: Any) -> messages.Found:
    finding = messages.Finding(
        **{"rank": rank, "rule": rule, "fault": "host", "line": line, "severity": "fatal"} | given
    )
    return messages.Found(1, [finding])


def alerts(town: Town) -> list[str]:
    return [one.text for one in town.told if isinstance(one, actions.Alert)]


def report(town: Town) -> str:
    return "\n".join(one.text for one in town.told if isinstance(one, actions.OpenIncident | actions.AddToIncident))


def checks(town: Town, host: str, since: int = 0) -> list[str]:
    heard = [one for one in town.hosts[host].heard if isinstance(one, messages.Check)]
    return [one.kind for one in heard[since:]]


class TestFindings:
    def test_an_alarm_is_told_and_not_again_within_a_minute(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        for _ in range(100):
            town.say("b", found("throttled", "CPU3 throttled", severity="alarm"))
            town.say("b", found("noted", "x", severity="note"))
            town.go_on(1)
        assert alerts(town) == ["the kernel says: CPU3 throttled (throttled)"] * 2
        assert running(1)(town.driver.state)

    def test_the_kernels_word_classes_the_death_that_follows(self, make: Make) -> None:
        """The rank itself only speaks of an exception."""
        town = make()
        town.until(running(1))
        town.go_on(20)
        before = len(checks(town, "b"))
        town.say("b", found("xid-lost", XID))
        town.go_on(1)
        town.hosts["b"].ranks = [3]
        town.say("b", messages.WorkerEnded(1, 2, 1, "raised", "RuntimeError: CUDA error: unknown error"))
        town.until(running(2))
        assert checks(town, "b", before) == ["quick"]  # of a fault of the host, not of a program
        assert XID in report(town)

    def test_a_word_long_before_is_not_the_cause(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        before = len(checks(town, "b"))
        town.say("b", found("xid-lost", XID))
        town.go_on(60)
        town.hosts["b"].ranks = [3]
        town.say("b", messages.WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL"))
        town.until(running(2))
        assert checks(town, "b", before) == ["passive"]

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_what_was_said_in_an_attempt_is_no_evidence_in_the_next(self, make: Make, rank: int) -> None:
        """They come within seconds of each other."""
        town = make()
        town.until(running(1))
        town.say("b", found("xid-lost", XID, rank))
        town.hosts["b"].ranks = [3]
        town.say("b", messages.WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL"))
        town.until(running(2))
        assert report(town).count(XID) == 1
        before = len(checks(town, "a")), len(checks(town, "b"))
        town.say("b", found("xid-lost", XID, 2))  # of attempt 1: it was on its way
        town.hosts["a"].ranks = [1]
        town.say("a", messages.WorkerEnded(2, 0, -9, "signal", "killed by SIGKILL"))
        town.until(running(3))
        assert checks(town, "a", before[0]) == ["passive"]  # of a process, not of a host
        assert report(town).count(XID) == 1

    def test_what_is_said_again_in_the_next_attempt_is_evidence_of_that(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        for attempt in (1, 2):
            before = len(checks(town, "b"))
            town.say("b", messages.Found(attempt, found("xid-lost", XID).findings))
            town.hosts["b"].ranks = [3]
            town.say("b", messages.WorkerEnded(attempt, 2, -9, "signal", "killed by SIGKILL"))
            town.until(lambda state, next=attempt + 1: running(next)(state) or state.hosts["b"].state == "evicted")
            assert attempt == 2 or checks(town, "b", before) == ["quick"]
        assert report(town).count(XID) == 2 and town.driver.state.hosts["b"].state == "evicted"

    def test_a_lost_device_without_a_death_is_suspected_in_the_hang(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        town.go_on(30)
        before = len(checks(town, "b")), len(checks(town, "a"))
        town.say("b", found("xid-lost", XID))
        assert alerts(town) == [f"the kernel says: {XID} (xid-lost)"]
        for host in town.hosts.values():
            host.stalled = True
        town.until(running(2))
        assert (checks(town, "b", before[0]), checks(town, "a", before[1])) == (["quick"], [])
        assert XID in report(town)

    def test_what_all_ranks_say_does_not_fill_the_report(self, make: Make) -> None:
        town = make("abc", Job("j", hosts=2, workers_per_host=100, spares=1))
        town.until(running(1))
        for host in "ab":
            for rank in town.hosts[host].ranks:
                town.say(host, found(f"rule-{rank}", "timeout", rank, fault="unknown"))
        town.hosts["b"].ranks = []
        town.say("b", messages.WorkerEnded(1, 150, -9, "signal", "killed by SIGKILL"))
        for host in "ab":
            for rank in range(100):
                town.say(host, found(f"rule-{1000 + rank}", "timeout", rank, fault="unknown"))
        town.until(running(2))
        assert 5 < report(town).count("timeout") < 30 and alerts(town) == []


class TestTraffic:
    def go_on(self, town: Town, seconds: int, rate: float, hosts: str = "ab") -> None:
        for _ in range(seconds):
            for name in "ab":
                town.hosts[name].sent_bytes = (town.hosts[name].sent_bytes or 0) + int(
                    rate if name in hosts else 1_000_000
                )
            town.go_on(1)

    def test_a_decline_is_told_once(self, make: Make) -> None:
        town = make()
        for host in town.hosts.values():
            host.sent_bytes = 0
        town.until(running(1))
        self.go_on(town, 120, 1_000_000)
        assert alerts(town) == []
        self.go_on(town, 120, 200_000)
        [text] = alerts(town)
        assert "less than they did" in text and running(1)(town.driver.state)

    @pytest.mark.parametrize("moves", [True, False])
    def test_silence_without_steps_is_a_recovery_where_nothing_else_moves(self, make: Make, moves: bool) -> None:
        """One rank may evaluate for minutes, while the others wait for it and no byte is sent."""
        town = make(policy=Policy())
        for host in town.hosts.values():
            host.sent_bytes = 0
        town.until(running(1))
        self.go_on(town, 120, 1_000_000)
        for host in town.hosts.values():
            host.stalled = True
        town.hosts["b"].moves, stood_s = moves, town.now_s
        for _ in range(120):
            self.go_on(town, 1, 0)
            if town.driver.state.attempt > 1:
                break
        if moves:
            assert town.driver.state.attempt == 1 and "have carried nothing" in "".join(alerts(town))
        else:
            assert town.driver.state.attempt == 2 and 55 < town.now_s - stood_s < 80

    def test_hosts_on_one_machine_are_not_judged(self, make: Make) -> None:
        town = make()
        for host in town.hosts.values():
            host.sent_bytes, host.boot = 0, "the same"
            town.connect(host.name)
        town.until(running(1))
        self.go_on(town, 120, 1_000_000)
        self.go_on(town, 120, 0)
        assert alerts(town) == []


class TestWhatIsRun:
    JOB = msgspec.structs.replace(JOB, previous_version="old.py")
    OLD = msgspec.structs.replace(SCRIPT, script=["old.py"], folder="/old")

    def test_each_host_is_prepared_once(self, make: Make) -> None:
        town = make(versions={"": SCRIPT})
        town.until(running(1))
        town.go_on(30)
        assert town.sent(messages.Prepare) == [(host, SCRIPT) for host in "abc"]

    def test_the_previous_version_is_prepared_before_its_start(self, make: Make) -> None:
        policy = Policy(active_check="quick", max_restarts_without_step=20, backoff_s=0.0, backoff_limit_s=0.0)
        town = make(job=self.JOB, policy=policy, versions={"": SCRIPT, "old.py": self.OLD})
        attempt = 1
        while town.driver.state.version == "" and attempt < 12:
            town.until(running(attempt))
            for host in town.hosts.values():
                host.ranks = []
            town.say("a", messages.WorkerEnded(attempt, 0, -11, "signal", f"killed by SIGSEGV {attempt}"))
            attempt += 1
            town.until(running(attempt))
        assert town.driver.state.version == "old.py"
        for name in town.driver.state.placement:
            heard = [one for one in town.hosts[name].heard if isinstance(one, messages.Prepare | messages.Start)]
            prepared = [one for one in heard if isinstance(one, messages.Prepare)]
            assert prepared[-1].script == ["old.py"] and prepared[-1].folder == "/old"
            assert heard.index(prepared[-1]) == len(heard) - 2  # the start comes right after it
        # a host that comes later is told the same
        town.hosts["z"] = FakeHost("z", pid=9)
        town.connect("z")
        assert [one.script for _, one in town.sent(messages.Prepare) if _ == "z"] == [["old.py"]]  # type: ignore[union-attr]

    def test_what_was_learnt_is_handed_to_spares_and_newcomers(self, make: Make) -> None:
        town = make(versions={"": SCRIPT})
        for host in "abc":
            town.say(host, messages.Prepared(1.0, "", ["torch"]))
        town.until(running(1))
        for host in "ab":
            town.say(host, messages.Prepared(0.0, "", ["torch", "numpy", "mine"]))
        town.go_on(20)
        spare = [one.preload for host, one in town.sent(messages.Prepare) if host == "c"]  # type: ignore[union-attr]
        assert spare == [[], ["torch", "numpy", "mine"]]
        assert [host for host, _ in town.sent(messages.Prepare)].count("a") == 1  # its ranks are left alone
        town.hosts["d"] = FakeHost("d", pid=5)
        town.connect("d")
        assert town.hosts["d"].heard[1].preload == ["torch", "numpy", "mine"]  # type: ignore[union-attr]

    def test_a_script_that_nobody_can_run_ends_the_job_at_once(self, make: Make) -> None:
        town = make(versions={"": SCRIPT})
        for host in "abc":
            town.say(host, messages.Prepared(0.1, "train.py: there is no such file"))
        town.go_on(1)
        ended = town.driver.finished
        assert ended is not None and (ended.status, ended.requeue) == (2, False)
        assert ended.reason == "bad input: train.py: there is no such file"
        assert {one.attempt for _, one in town.sent(messages.Start)} <= {1}  # type: ignore[union-attr]

    def test_a_host_that_alone_cannot_run_it_is_evicted(self, make: Make) -> None:
        town = make(versions={"": SCRIPT})
        town.say("c", messages.Prepared(0.1, "ImportError: libcuda.so"))
        for host in "ab":
            town.say(host, messages.Prepared(1.0))
        town.until(running(1))
        assert town.driver.state.hosts["c"].state == "evicted"
        assert town.driver.state.placement == ("a", "b")

    def test_ranks_that_run_are_not_prepared_again_by_the_next_driver(self, make: Make) -> None:
        town = make(versions={"": SCRIPT})
        town.until(running(1))
        for host in town.hosts.values():
            host.heard.clear()
        town.restart()
        town.go_on(10)
        assert [host for host, _ in town.sent(messages.Prepare)] == ["c"]


class TestWhoIsThere:
    def test_an_evicted_executor_is_told_to_end_until_it_has(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        town.driver.ask(lambda at_s: events.EvictAsked(at_s, "b", "ann"))
        town.until(running(2))
        ends = [one for host, one in town.sent(messages.End) if host == "b"]
        assert len(ends) == 1
        town.connect("b")
        assert len([host for host, _ in town.sent(messages.End) if host == "b"]) == 2
        assert town.driver.state.hosts["b"].state == "evicted"

    def test_a_released_executor_does_not_join_again_but_its_host_may(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        town.driver.ask(lambda at_s: events.DrainAsked(at_s, "b", "ann"))
        town.until(running(2))
        assert town.driver.state.hosts["b"].state == "gone"
        town.connect("b")
        town.go_on(10)
        assert town.driver.state.hosts["b"].state == "gone"
        town.hosts["b"].pid = 77
        town.connect("b")
        town.go_on(10)
        assert town.driver.state.hosts["b"].state == "spare"


def in_checkpoint(make: Make) -> Town:
    """A job all of whose ranks have said, just now, that they write a checkpoint for up to a minute."""
    town = make()
    town.until(running(1))
    town.go_on(30)
    for host in (town.hosts["a"], town.hosts["b"]):
        host.stalled, host.phase, host.expects_s = True, "checkpoint", 60.0
    return town


class TestProgress:
    def test_lost_steps_are_counted_where_the_script_numbers_them(self, make: Make) -> None:
        town = make()
        for host in town.hosts.values():
            host.is_absolute = True
        town.until(running(1))
        town.go_on(38.5)
        done = town.hosts["a"].steps
        for host in town.hosts.values():
            host.saved = done // 10 * 10  # the last checkpoint
        town.hosts["b"].ranks = [3]
        town.say("b", messages.WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL", step=done))
        town.until(running(2))
        [closed] = [one for one in town.told if isinstance(one, actions.CloseIncident)]
        assert closed.lost_steps == done % 10

    def test_no_progress_is_told_again_when_nobody_was_heard_of(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        town.go_on(30)
        for host in town.hosts.values():
            host.is_mute = host.stalled = True
        town.go_on(2 * NO_PROGRESS_AGAIN_S + 60)
        assert len([text for text in alerts(town) if "cut off" in text]) >= 2
        assert running(1)(town.driver.state)
        for host in town.hosts.values():
            host.is_mute = False
            town.connect(host.name)
        town.until(running(2))

    def test_a_host_that_is_cut_off_does_not_hold_up_the_looks_at_the_others(self, make: Make) -> None:
        town = make()
        town.until(running(1))
        town.go_on(30)
        began_s = town.now_s
        town.hosts["b"].is_mute = town.hosts["a"].stalled = town.hosts["b"].stalled = True
        town.until(lambda state: state.phase == "diagnosing")
        assert town.now_s - began_s < 25
        town.until(running(2))
        assert "c takes the ranks of b" in report(town)

    def test_a_host_that_is_cut_off_in_a_checkpoint_does_not_excuse_the_job(self, make: Make) -> None:
        town = in_checkpoint(make)
        town.go_on(1.5)
        began_s, town.hosts["b"].is_mute, town.hosts["a"].phase, town.hosts["a"].expects_s = town.now_s, True, "", 0.0
        town.until(lambda state: state.phase == "diagnosing")
        assert town.now_s - began_s < 25
        town.until(running(2))
        assert "c takes the ranks of b" in report(town)

    def test_a_checkpoint_excuses_the_job_for_the_time_that_it_takes(self, make: Make) -> None:
        town = in_checkpoint(make)
        town.go_on(50)
        town.hosts["a"].phase, town.hosts["a"].expects_s = "", 0.0  # it waits for the other
        assert running(1)(town.driver.state)
        town.until(lambda state: state.phase == "diagnosing", within_s=90)

    def test_a_hang_before_the_first_step_is_found(self, make: Make) -> None:
        town = make()
        for host in town.hosts.values():
            host.stalled = True
        town.until(lambda state: state.attempt == 1 and state.phase == "starting")
        town.until(lambda state: state.attempt == 2, within_s=400)
        assert "nothing has moved for" in report(town)


class TestChecks:
    def test_a_check_that_no_host_passes_ends_the_job_before_it_has_used_up_all_hosts(self, make: Make) -> None:
        town = make("", JOB)
        bad = messages.CheckOutcome("space", "fail", "1 MB are free, 10 are needed")
        for name in "abcdef":
            town.hosts[name] = FakeHost(name)
            town.hosts[name].check = lambda order: [bad]
            town.connect(name)
        assert town.driver.finished is not None
        assert town.driver.finished.status == 4 and not town.driver.finished.requeue
        assert "4 hosts that came one after another" in town.driver.finished.reason
        assert "1 MB are free" in town.driver.finished.reason
        assert [one.host for one in town.orders if isinstance(one, actions.Evict)] == ["a", "b", "c"]

    def test_one_that_passes_shows_that_it_is_the_hosts(self, make: Make) -> None:
        town = make("", JOB)
        bad = messages.CheckOutcome("space", "fail", "1 MB are free, 10 are needed")
        for number, name in enumerate("abcdefgh"):
            town.hosts[name] = FakeHost(name)
            if number % 3:
                town.hosts[name].check = lambda order: [bad]
            town.connect(name)
        town.until(running(1))
        assert [one.host for one in town.orders if isinstance(one, actions.Evict)] == list("bcefh")
