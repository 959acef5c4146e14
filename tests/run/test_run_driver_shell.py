"""The driver with hosts that answer as executors do: stories, told in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_helpers import Town, running

from phalanx.run import messages
from phalanx.run.decide import actions, events
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.journal import JournalError

JOB = Job("j", hosts=2, workers_per_host=2, spares=1)

Make = Callable[..., Town]


@pytest.fixture(name="make")
def make_fixture(tmp_path: Path) -> Iterator[Make]:
    towns: list[Town] = []

    def make(hosts: str = "abc", job: Job = JOB, policy: Policy | None = None) -> Town:
        towns.append(Town(tmp_path, list(hosts), job, policy))
        towns[-1].begin()
        return towns[-1]

    yield make
    for town in towns:
        town.journal.close()


def test_a_job_starts_on_hosts_that_are_good(make: Make) -> None:
    town = make()
    town.until(running(1))
    assert town.here == ["a", "b", "c"] and actions.AskForHosts(3) in town.orders
    starts = dict(town.sent(messages.Start))
    assert set(starts) == {"a", "b"}
    first = starts["a"]
    assert isinstance(first, messages.Start)
    assert (first.ranks, first.world_size, first.store_host, first.store_port) == ([0, 1], 4, "at-a", 2950)
    assert {host for host, _ in town.sent(messages.Check)} == {"a", "b", "c"}
    town.go_on(100)
    assert running(1)(town.driver.state) and town.told == []


def test_a_killed_worker_costs_one_recovery(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(20)
    town.hosts["b"].ranks = [3]
    town.say("b", messages.WorkerEnded(1, 2, -9, "signal", "killed by SIGKILL"))
    town.until(running(2))
    assert {host for host, _ in town.sent(messages.Stop)} >= {"a", "b"}
    assert {type(one).__name__ for one in town.told} >= {"OpenIncident", "CloseIncident"}
    assert not [order for order in town.orders if isinstance(order, actions.Evict)]


def test_a_hang_is_found_in_a_minute_with_the_evidence_and_the_cure(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(30)
    for host in town.hosts.values():
        host.stalled = True
    began_s = town.now_s
    town.until(running(2))
    assert [host for host, _ in town.sent(messages.Gather)].count("a") == 1, "before they are killed"
    [seen] = [one.text for one in town.told if isinstance(one, actions.OpenIncident)]
    assert "set run.limits.floor_s above it (now 60)" in seen and 60 < town.now_s - began_s < 90
    assert not [order for order in town.orders if isinstance(order, actions.Evict)]


def test_no_alarm_where_ranks_move(make: Make) -> None:
    """A step that takes longer than any before, or an evaluation that the script does not tell of."""
    town = make()
    town.until(running(1))
    town.go_on(30)
    for host in town.hosts.values():
        host.stalled = host.moves = True
    town.go_on(600)
    assert running(1)(town.driver.state) and town.told == []
    for host in town.hosts.values():
        host.stalled, host.moves, host.began_s = False, False, host.began_s + 600
    town.go_on(60)
    assert running(1)(town.driver.state)


def test_a_rank_that_is_stopped_is_found_in_twenty_five_seconds(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(30)
    for host in town.hosts.values():
        host.stalled = True
    town.hosts["a"].moves, began_s = True, town.now_s
    while town.driver.state.phase == "running" and town.now_s < began_s + 25:
        town.hosts["b"].stopped_s = town.now_s - began_s
        town.go_on(1)
    assert town.driver.state.phase == "diagnosing" and town.now_s - began_s < 15


def test_silence_alone_is_not_death(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(20)
    town.hosts["b"].is_mute = True
    town.go_on(120)
    assert town.driver.state.hosts["b"].state == "unknown" and running(1)(town.driver.state)
    town.hosts["b"].is_mute = False
    town.connect("b")
    town.go_on(5)
    assert town.driver.state.hosts["b"].state == "active" and running(1)(town.driver.state)
    assert not [order for order in town.orders if isinstance(order, actions.Evict)]


def test_a_host_that_is_gone_is_replaced_by_the_spare(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(20)
    town.hosts["b"].is_mute = True
    town.driver.listener().gone("b", "the node is down")
    town.until(running(2))
    assert town.driver.state.placement == ("a", "c")


def test_killing_the_driver_does_not_disturb_training(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.go_on(20)
    for host in town.hosts.values():
        host.heard.clear()
    steps = town.hosts["a"].steps
    town.restart()
    town.go_on(30)
    assert running(1)(town.driver.state) and town.hosts["a"].steps > steps + 20
    kinds = {type(message) for host in town.hosts.values() for message in host.heard}
    assert not kinds & {messages.Start, messages.Stop, messages.OpenStore}
    town.hosts["a"].ranks = [1]
    town.say("a", messages.WorkerEnded(1, 0, -11, "signal", "killed by SIGSEGV"))
    town.until(running(2))


@pytest.mark.parametrize("kind", [messages.OpenStore, messages.Start, messages.Stop, messages.Check])
def test_what_was_not_answered_before_the_driver_died_is_asked_again(make: Make, kind: type) -> None:
    town = make()
    if kind is messages.Stop:
        town.until(running(1))
    lost = dict(town.hosts)
    plain = type(town.hosts["a"]).answer
    for host in lost.values():
        host.answer = lambda message, now_s, host=host: (  # type: ignore[method-assign,misc]
            [] if isinstance(message, kind) else plain(host, message, now_s)
        )
    if kind is messages.Check:
        town.driver.ask(lambda at_s: events.ReturnAsked(at_s, "a"))
    if kind is messages.Stop:
        town.say("a", messages.WorkerEnded(1, 0, -9, "signal", "killed"))
    town.go_on(1.0)
    for host in lost.values():
        del host.answer
    town.restart()
    town.until(lambda state: state.phase == "running")


def test_a_person_stops_it(make: Make) -> None:
    town = make()
    town.until(running(1))
    town.driver.ask(lambda at_s: events.StopAsked(at_s, "ann"))
    town.deliver()
    town.go_on(5)
    assert town.driver.finished is not None and town.driver.finished.status == 5
    stops = [message for _, message in town.sent(messages.Stop)]
    assert all(isinstance(stop, messages.Stop) and stop.grace_s > 0 for stop in stops)


def test_all_return(make: Make) -> None:
    town = make()
    town.until(running(1))
    for rank in range(4):
        town.say("ab"[rank // 2], messages.WorkerEnded(1, rank, 0, "returned"))
    town.go_on(5)
    assert town.driver.finished == actions.Finish(0, town.driver.finished.reason if town.driver.finished else "")


def test_a_check_that_fails_names_what(make: Make) -> None:
    town = make("ab")
    bad = [messages.CheckOutcome("disk", "fail", "0 bytes free"), messages.CheckOutcome("clock", "pass")]
    plain = type(town.hosts["a"]).answer
    town.hosts["c"] = type(town.hosts["a"])("c")
    town.hosts["c"].answer = lambda message, now_s: (  # type: ignore[method-assign]
        [messages.Checked(message.number, bad)]
        if isinstance(message, messages.Check)
        else plain(town.hosts["c"], message, now_s)
    )
    town.connect("c")
    town.go_on(3)
    host = town.driver.state.hosts["c"]
    assert host.state not in ("spare", "active") and "disk: 0 bytes free" in host.why


def test_a_driver_that_cannot_write_its_journal_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    town = make()
    town.until(running(1))
    town.go_on(5)

    def full(drafts: object) -> int:
        raise JournalError("no space left on device")

    monkeypatch.setattr(town.journal, "append_all", full)
    ended = messages.WorkerEnded(1, 0, -9, "signal", "killed")
    for _ in range(2):
        with pytest.raises(JournalError, match="no space"):
            town.say("a", ended)
    assert isinstance(town.driver.problem, JournalError)
    monkeypatch.undo()
    town.hosts["a"].ranks = [1]
    town.restart()
    town.say("a", ended)  # the executor keeps it until it is confirmed
    town.until(running(2))
