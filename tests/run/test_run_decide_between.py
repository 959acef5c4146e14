"""Hosts that are tested with each other in two rounds, when nobody stands out: stories, what must hold, the cost."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import pytest
from decide_helpers import World, attempt_runs, host_names, running
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide, event_from_json, replay, to_json
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State

WAITS = Policy(give_up_s=0)


def stuck(hosts: int, policy: Policy | None = None, *, spares: int = 0, **more: object) -> World:
    """A job that hangs for the second time, and nobody stands out; nothing has been done about it yet."""
    world = World(Job("j", hosts, 1, spares), policy, names_suspects=False, **more)  # type: ignore[arg-type]
    world.run_until(running)
    world.run_for(10)
    world.hang(0)
    world.run_until(attempt_runs(2))
    world.run_for(10)
    world.log.clear()
    world.hang(0)
    return world


def peers_asked(world: World) -> list[tuple[str, tuple[str, ...]]]:
    return [(a.host, a.peers) for a in world.taken("Check") if isinstance(a, act.Check)]


def evicted(world: World) -> list[str]:
    return [a.host for a in world.taken("Evict") if isinstance(a, act.Evict)]


def alerts(world: World) -> str:
    return "\n".join(a.text for a in world.taken("Alert") if isinstance(a, act.Alert))


# Stories


@pytest.mark.parametrize("bad", ["c", "d"])
def test_a_host_with_a_bad_link_is_named_out_of_its_pair_and_replaced(bad: str):
    world = stuck(4, spares=1)
    other = "d" if bad == "c" else "c"
    world.hosts[bad].link = "timed out"
    world.run_until(attempt_runs(3))
    first = [("a", ("b",)), ("b", ("a",)), ("c", ("d",)), ("d", ("c",))]
    assert peers_asked(world) == [*first, ("c", ("a",)), ("d", ("b",))]
    assert evicted(world) == [bad]
    story = world.story()
    assert "first round: a with b, c with d: each host is tested with its neighbour" in story
    assert "bad: c with d: timed out; good: a with b" in story
    assert "second round: c with a, d with b: each is tested with a host of a good pair" in story
    assert f"{other} cleared: good with a good host" in story
    assert f"{bad} is evicted: bad with {'a' if bad == 'c' else 'b'} too, which is good" in story
    assert f"e takes the ranks of {bad}" in story
    assert "it is evicted" in alerts(world) and "bad in both rounds: with" in alerts(world)


def test_where_all_pairs_are_good_one_round_is_enough():
    world = stuck(5)
    world.run_until(attempt_runs(3))
    assert peers_asked(world) == [("a", ("b",)), ("b", ("a",)), ("c", ("d",)), ("d", ("c",)), ("e", ("d",))]
    assert evicted(world) == [] and "second round" not in world.story()
    assert "good: a with b, c with d, d with e" in world.story()


def test_the_odd_host_is_named_and_its_partner_that_is_good_with_another_is_in_no_doubt():
    world = stuck(5, spares=1)
    world.hosts["e"].link = "no route"
    world.run_until(attempt_runs(3))
    assert peers_asked(world)[5:] == [("e", ("a",))] and evicted(world) == ["e"]


def test_a_bad_host_in_two_pairs_makes_all_three_doubtful():
    world = stuck(5, spares=1)
    world.hosts["d"].link = "no route"
    world.run_until(attempt_runs(3))
    assert peers_asked(world)[5:] == [
        ("c", ("a",)),
        ("d", ("b",)),
        ("e", ("a",)),
    ]  # in two turns
    assert evicted(world) == ["d"] and "c, e cleared" in world.story()


def test_where_no_pair_is_good_nobody_is_evicted():
    world = stuck(4)
    for host in world.hosts.values():
        host.link = "no route"
    world.run_until(attempt_runs(3))
    assert evicted(world) == [] and world.taken("Release") == [] and len(peers_asked(world)) == 4
    assert "nobody is evicted: 2 of 2 pairs of hosts are bad: a common cause" in world.story()
    assert "nobody is evicted" in alerts(world)


def test_where_more_pairs_are_bad_than_by_chance_nobody_is_evicted_though_some_are_good():
    world = stuck(16)
    for name in "acegi":
        world.hosts[name].link = "no route"
    world.run_until(attempt_runs(3))
    assert evicted(world) == [] and len(peers_asked(world)) == 16
    assert "5 of 8 pairs of hosts are bad: a common cause" in world.story()


@pytest.mark.parametrize("bad", ["a", "b"])
def test_of_two_hosts_a_spare_tells_which_is_bad(bad: str):
    world = stuck(2, spares=1)
    world.hosts[bad].link = "timed out"
    world.run_until(attempt_runs(3))
    assert peers_asked(world) == [("a", ("b",)), ("b", ("a",)), ("a", ("c",)), ("b", ("c",))]
    assert evicted(world) == [bad]
    assert "no pair is good, so each is tested with a spare" in world.story()


def test_where_spares_are_no_better_nobody_is_evicted():
    world = stuck(2, spares=1)
    for host in world.hosts.values():
        host.link = "no route"
    world.run_until(attempt_runs(3))
    assert len(peers_asked(world)) == 4 and evicted(world) == []
    assert "no host is good with another, nor with a spare: a common cause" in world.story()


def test_a_slow_link_is_named_against_the_other_pairs():
    world = stuck(8, spares=1)
    world.hosts["f"].rate = 2e9
    world.run_until(attempt_runs(3))
    assert peers_asked(world)[8:] == [("e", ("a",)), ("f", ("b",))] and evicted(world) == ["f"]
    assert "e with f: 2 GB/s, less than 5 (50% of the median of the other pairs)" in world.story()


def test_a_slow_link_is_only_told_where_nothing_can_replace_its_host_and_a_dead_one_is_evicted():
    world = stuck(8, WAITS)
    world.hosts["f"].rate = 2e9
    world.run_until(attempt_runs(3))
    assert evicted(world) == [] and "f stays: it is only slow, and nothing can replace it" in world.story()
    assert "its network is bad in both rounds" in alerts(world)
    world = stuck(8, WAITS)
    world.hosts["f"].link = "timed out"
    world.run_until(lambda world: bool(evicted(world)))
    assert evicted(world) == ["f"]


def test_rates_that_tell_nothing_are_not_judged():
    world = stuck(8, spares=1)
    for name, host in world.hosts.items():
        host.rate = 0.0 if name in "ab" else 10e9
    world.run_until(attempt_runs(3))
    assert len(peers_asked(world)) == 8 and evicted(world) == []


def test_partners_in_the_second_round_are_of_the_same_rack_where_that_can_be():
    racks = dict(zip("abcdefgh", ["r1", "r1", "r1", "r2", "r2", "r2", "r3", "r3"], strict=True))
    world = stuck(8, spares=1, racks=racks)
    world.hosts["d"].link = "no route"  # with c, of another rack
    world.run_until(attempt_runs(3))
    assert peers_asked(world)[8:] == [("c", ("a",)), ("d", ("e",))] and evicted(world) == ["d"]


def test_a_host_that_fails_a_test_of_its_own_is_evicted_at_once_and_its_partner_cleared():
    world = stuck(4, spares=1)
    world.hosts["d"].fails_checks = "gemm-repeat: not the same bits"
    world.hosts["d"].link = "timed out"
    world.run_until(attempt_runs(3))
    assert evicted(world) == ["d"] and peers_asked(world)[4:] == [("c", ("a",))]
    assert "it has not passed its quick check: gemm-repeat" in alerts(world) and "c cleared" in world.story()


def test_a_host_that_is_lost_in_a_round_blames_nobody():
    world = stuck(4, spares=1)
    world.run_until(lambda world: world.state.phase == "checking")
    world.lose_host("d")
    world.run_until(attempt_runs(3))
    assert evicted(world) == [] and peers_asked(world)[4:] == [("c", ("a",))] and "c cleared" in world.story()


def test_a_partner_that_is_lost_before_the_second_round_evicts_nobody():
    world = stuck(4, spares=1)
    world.hosts["c"].link = "timed out"
    world.run_until(lambda world: len(peers_asked(world)) == 6)
    world.deliver(ev.HostGone(world.now_s, "c", "power"))
    world.run_until(attempt_runs(3))
    assert evicted(world) == [] and "d cleared" in world.story()


@pytest.mark.parametrize("says_why", ["power", ""])
def test_a_partner_that_is_lost_in_the_second_round_evicts_nobody(says_why: str):
    """Who could not reach it is not bad for that, whether the back end has told of it or it is only not heard of."""
    world = stuck(4, spares=1)
    world.hosts["c"].link = "timed out"  # with d, which is tested with b then
    world.speeds.check["quick"] = 8.0
    world.run_until(lambda world: len(peers_asked(world)) == 6)
    world.lose_host("b", says_why)
    world.run_until(lambda world: world.state.phase != "checking")
    assert evicted(world) == ["c"] and "not measured: d with b" in world.story()


def test_a_single_host_is_tested_with_spares_as_before():
    world = stuck(1, spares=2)
    world.run_until(attempt_runs(3))
    assert peers_asked(world) == [("a", ("b", "c"))] and "round" not in world.story()


@pytest.mark.parametrize("asked", [2, 5])
def test_a_driver_that_is_killed_in_a_round_goes_on_with_it(asked: int):
    world = stuck(4, spares=1)
    world.hosts["d"].link = "timed out"
    world.run_until(lambda world: len(peers_asked(world)) >= asked)
    world.stop_driver()
    world.run_for(60)
    world.restart_driver()
    world.run_until(attempt_runs(3))
    assert evicted(world) == ["d"] and "c cleared" in world.story()


def test_a_suspect_that_was_named_is_tested_with_good_hosts_as_before():
    """It is the only one in doubt, so what it finds with others is its own."""
    world = World(Job("j", 4, 1, 1), names_suspects=True)
    world.run_until(running)
    world.run_for(5)
    world.hosts["b"].link = "timed out"
    world.hang(1)
    world.run_until(attempt_runs(2))
    assert evicted(world) == ["b"]


# What was written before


def test_events_of_earlier_journals_are_read():
    old = b'{"event":"check-passed","at_s":3.0,"host":"a","number":4}'
    assert event_from_json(old) == ev.CheckPassed(3.0, "a", 4)
    old = b'{"event":"check-failed","at_s":3.0,"host":"a","number":4,"why":"peers: b:1"}'
    assert event_from_json(old) == ev.CheckFailed(3.0, "a", 4, "peers: b:1")


def test_a_recovery_in_which_no_peer_was_told_of_ends_as_it_did():
    world = stuck(5)
    world.run_until(attempt_runs(3))
    told = {"bad_peers", "peer_rates", "is_between"}
    old = [
        msgspec.convert({k: v for k, v in msgspec.to_builtins(event).items() if k not in told}, ev.Event)
        for event in world.journal
    ]
    assert replay(world.policy, world.job, old) == world.state


# Whatever is bad


def pairs_of(hosts: Iterable[str]) -> list[tuple[str, str]]:
    hosts = list(hosts)
    pairs = list(zip(hosts[::2], hosts[1::2], strict=False))
    return [*pairs, (hosts[-2], hosts[-1])] if len(hosts) % 2 else pairs


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.integers(0, 2), st.data())
def test_whoever_is_bad_is_evicted_and_nobody_else(size: int, spares: int, data: st.DataObject):
    world = stuck(size, WAITS, spares=spares)
    names = list(world.state.placement)
    dead = data.draw(st.sets(st.sampled_from(names), max_size=4))
    cut_s = data.draw(st.sampled_from([None, 0.5, 4.5]))
    for name in dead:
        world.hosts[name].link = "timed out"
    bad = [pair for pair in pairs_of(names) if dead & set(pair)]
    world.run_until(lambda world: world.state.phase == "checking")
    if cut_s is not None:  # a driver that dies in a round
        world.run_for(cut_s)
        world.stop_driver()
        world.run_for(5)
        world.restart_driver()
    world.run_until(lambda world: world.state.phase in ("waiting", "running"))
    good = [pair for pair in pairs_of(names) if pair not in bad]
    doubtful = {name for pair in bad for name in pair} - {name for pair in good for name in pair}
    tells = bool(good) or (bool(spares) and not doubtful <= dead)
    is_common = len(bad) > world.state.most_to_blame or not tells
    left = {a.host for a in world.taken("Evict", "Release")}  # type: ignore[attr-defined]
    assert left == (set() if is_common else dead)
    assert len(evicted(world)) <= world.state.most_to_blame, "more of them are only given back"
    assert world.state.peer_tests == {} and world.state.recovery is None
    assert len(peers_asked(world)) >= size
    assert ("nobody is evicted" in world.story()) == (is_common and bool(dead))
    assert replay(world.policy, world.job, world.journal) == world.state
    assert [event_from_json(to_json(event)) for event in world.journal] == world.journal


def test_a_state_between_the_rounds_is_json():
    world = stuck(5, spares=1)
    world.hosts["d"].link = "no route"
    world.run_until(lambda world: len(peers_asked(world)) == 7)
    assert world.state.recovery is not None and world.state.recovery.rounds is not None
    assert world.state.recovery.rounds.turns and msgspec.json.decode(to_json(world.state), type=State) == world.state


# Very many


class Work:
    """What decisions cost, in figures that no other process changes: lines that are run, and bytes that are taken.

    Copying what is known of every host runs one line, and takes memory for each host.
    """

    def __init__(self) -> None:
        self.lines = self.bytes = 0

    def of(self, decision: Callable[[], Any]) -> Any:
        """What the decision gives; its work is added."""
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return decision()
        finally:
            sys.settrace(before)
            self.bytes += tracemalloc.get_traced_memory()[1] - held_bytes

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        return self._trace


def work_of(size: int) -> Work:
    """The two rounds of so many hosts, of which a twentieth is bad."""
    world = stuck(size, spares=1)
    for name in host_names(size)[::20]:
        world.hosts[name].link = "timed out"
    world.run_until(lambda world: world.state.phase == "checking")
    state, own, work = world.state, {}, Work()
    tracemalloc.start()
    try:
        while state.phase == "checking":
            for name, check in list(state.checks.items()):
                peer = check.peers[0]
                why = world._way(world.hosts[name], peer)[0]
                event = (
                    ev.CheckFailed(state.now_s, name, check.number, "", {peer: why}, {}, True)
                    if why
                    else ev.CheckPassed(state.now_s, name, check.number, {}, {peer: 10e9})
                )
                state, _ = work.of(partial(decide, state, event, own))
    finally:
        tracemalloc.stop()
    gone = [name for name, host in state.hosts.items() if host.state in ("evicted", "gone")]
    assert gone == host_names(size)[::20]
    return work


def test_the_cost_of_very_many_hosts_is_no_square(capsys: pytest.CaptureFixture[str]):
    few, many = work_of(250), work_of(2000)
    with capsys.disabled():
        print(f"\ntwo rounds of 250 hosts: {few.lines:,} lines, {few.bytes:,} bytes; of 2,000: ", end="")
        print(f"{many.lines:,} lines, {many.bytes:,} bytes")
    assert many.lines < 2 * 8 * few.lines
    assert many.bytes < 2 * 8 * few.bytes
