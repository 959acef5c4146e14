"""Checks that hosts are asked for, their answers, and what follows when one does not pass.

Hosts of an attempt are tested with each other, in two rounds, so that a bad link is named.

In the first round each is tested with its neighbour in the placement, beside its other tests. A pair that is bad makes
both of its hosts doubtful, and no more than that: the host that reports a failure need not be at fault. In the second
round each doubtful host is tested with a host of a good pair (see `phalanx.checks.pairwise_tests`). One that is bad
there too is bad. Where no pair is good, or more are bad than can be by chance, there is a common cause, and nobody is
blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from phalanx.checks.pairwise_tests import Pair, bad_pairs, doubtful, plan_neighbours, plan_suspects
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Check, Where
from phalanx.run.decide.events import CheckFailed, CheckKind, CheckPassed
from phalanx.run.decide.state import (
    Ending,
    HostState,
    PeerTests,
    PendingCheck,
    Rounds,
    State,
    Turn,
    can_spare,
    listed,
    ready_hosts,
)


def ask(turn: Turn, host: str, kind: CheckKind, peers: tuple[str, ...] = ()) -> None:
    """Have a host checked, and wait for its answer."""
    number = turn.state.check_count + 1
    turn.set(check_count=number)
    turn.await_check(host, PendingCheck(number, kind, turn.now_s + limit_s(turn.state, kind), peers))
    turn.act(Check(host, number, kind, peers))


def limit_s(state: State, kind: CheckKind) -> float:
    """How long the answer of a check of this kind is waited for."""
    policy = state.policy
    return {"passive": policy.passive_check_s, "quick": policy.quick_check_s, "full": policy.full_check_s}[kind]


def ask_suspects(turn: Turn, kinds: dict[str, CheckKind]) -> None:
    """Have hosts checked before the next attempt, the network with hosts that are believed good."""
    state = turn.state
    good = [host for host in ready_hosts(state) if host not in kinds]
    for host, kind in kinds.items():
        if state.hosts[host].state in _AWAY:
            continue
        turn.set_host(host, state="suspect", why=f"{kind} check after a fault")
        # Two hosts believed good, of the same rack if possible: a slow link between racks says nothing about this one.
        peers = sorted(good, key=lambda other: state.hosts[other].rack != state.hosts[host].rack)[:2]
        ask(turn, host, kind, tuple(peers) if kind != "passive" else ())
    turn.set(awaited={host: None for host in kinds if host in turn.state.checks})


# Answers


def on_check_passed(turn: Turn, event: CheckPassed) -> None:
    """A host may take part."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:  # an answer to an earlier check, which was late
        return
    if not _keep_peer_tests(turn, event) and name in state.awaited:
        turn.note(f"{check.kind} check of {name}", "passed", Where(name))
    _let_take_part(turn, name)


def _let_take_part(turn: Turn, name: str) -> None:
    turn.drop_check(name)
    if name in turn.state.awaited:
        turn.no_longer_awaited(name)
        turn.set_host(name, state="draining" if turn.state.hosts[name].leaves else "active", why="")
    else:
        if turn.state.restarts.unfit:  # a host that has come is good: so it is not all of them
            turn.set(restarts=replace(turn.state.restarts, unfit=0))
        turn.set_host(name, state="spare", why="ready")


def on_check_failed(turn: Turn, event: CheckFailed) -> None:
    """A host must not take part, unless it is the network between it and another that is bad."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:
        return
    if event.is_between and _keep_peer_tests(turn, event):
        _let_take_part(turn, name)
        return
    short = f"it has not passed its {check.kind} check"
    why = f"{short}: {event.why}"
    if name not in state.awaited and state.policy.advise_only:
        turn.drop_check(name)
        turn.set_host(name, state="spare", why=why)
        turn.alert("warning", f"{why}; it would be evicted", name)
        return
    turn.note(f"{check.kind} check of {name}", f"not passed: {event.why}", Where(name))
    if name in state.awaited:
        _fail_in_recovery(turn, name, why, short)
        return
    # It came and was tested before it could take part.
    unfit = state.restarts.unfit + 1
    turn.set(restarts=replace(state.restarts, unfit=unfit))
    if unfit <= state.most_unfit:
        _evict(turn, name, why, short)
        return
    # What all hosts lack is not theirs: without any of them the job ends, before it has used up all that there are.
    text = f"{unfit} hosts that came one after another have not passed their checks: a common cause"
    turn.decided(f"{name} is given back, not evicted", text)
    turn.alert("error", f"{why}; {text}, so it is given back, not evicted", name)
    turn.release(name, why)
    if state.phase == "waiting":
        turn.finish(Ending(actions.NO_PROGRESS, f"{text}; of the last one: {why}"))


def _fail_in_recovery(turn: Turn, name: str, why: str, short: str) -> None:
    """A host of the attempt is bad: evict it, or only give it back where so many are bad that it may be the check.

    Args:
        why: for people, and the reason that stays with the host; `short`: the same in a few words.
    """
    found = turn.state.recovery
    # Evicted hosts never come back: where a check fails on many, its own cause would use up the whole cluster.
    if found is not None:
        turn.learn(evict={**found.evict, name: why})
    if found is None or len(found.evict) < turn.state.most_to_blame:
        _evict(turn, name, why, short)
        return
    turn.decided(f"{name} is given back, not evicted", "many others have not passed their checks either")
    turn.alert("error", f"{why}; so have many others, so it is given back, not evicted", name)
    turn.release(name, why)


def _evict(turn: Turn, name: str, why: str, short: str) -> None:
    turn.decided(f"{name} is evicted", short)
    turn.alert("error", f"{why}; it is evicted", name)
    turn.evict(name, why)


def act_on_late(turn: Turn) -> bool:
    """Ask hosts whose check has not been answered in time again, or give them back; whether there were any."""
    state, due_s = turn.state, turn.state.checks_due_s
    if due_s is None or turn.now_s < due_s:
        return False
    late = [name for name, check in state.checks.items() if turn.now_s >= check.deadline_s]
    if not late:
        turn.set(checks_due_s=min((check.deadline_s for check in state.checks.values()), default=None))
        return False
    first_time = [name for name in late if name in state.awaited and not state.checks[name].is_extended]
    waits_s: dict[str, float] = {}
    if state.is_driver_cut_off(len(first_time)):
        wait_s = state.policy.cut_off_s
        why = f"{len(first_time)} of {len(state.placement)} hosts do not answer their checks"
        turn.alert("error", f"{why}; it may be the driver that is cut off: it waits {wait_s:.0f} s")
        turn.decided("no host is given back yet", f"{why}: a common cause")
        waits_s = dict.fromkeys(first_time, wait_s)
    else:
        for name in first_time:
            # The executor lives and only its measurement is late: seconds of work on a machine that others use too.
            if state.checks[name].kind == "quick" and state.hosts[name].state != "unknown":
                waits_s[name] = 2 * state.policy.quick_check_s
                why = "its quick check is late, and its executor is heard of: it is asked again, with twice the time"
                turn.decided(f"{name} is not given back yet", why)
    for name, wait_s in waits_s.items():
        check = replace(state.checks[name], deadline_s=turn.now_s + wait_s, is_extended=True)
        turn.await_check(name, check)
        turn.act(Check(name, check.number, check.kind, check.peers))
    for name in late:
        if name in waits_s:
            continue
        why = f"it did not answer its {turn.state.checks[name].kind} check in time"
        if state.policy.advise_only and name not in turn.state.awaited:
            turn.drop_check(name)
            turn.alert("warning", f"{why}; it would be given back", name)
        else:
            turn.decided(f"{name} is given back", why)
            turn.alert("warning", f"{why}; it is given back", name)
            turn.release(name, why)
    return True


# The first round between hosts

SLOW_SHARE = 0.5
"""Of the median of the other pairs: in a recovery pairs are measured once, and beside tests of other hosts."""

_THERE: tuple[HostState, ...] = ("active", "draining")
_AWAY: tuple[HostState, ...] = ("gone", "evicted")
_NOTHING = PeerTests()


class _Pairs(NamedTuple):
    """What was found of pairs.

    Attributes:
        rates: bytes per second of those that are good; 0: unknown, the pair answers.
        bad: the others, and why; `slow`: of these, those that are only slower than the rest.
    """

    rates: dict[Pair, float]
    bad: dict[Pair, str]
    slow: set[Pair]


def begin_rounds(turn: Turn, hosts: Sequence[str], kind: CheckKind) -> None:
    """Check all of them, the network with their neighbours."""
    pairs = [pair for one_turn in plan_neighbours(hosts) for pair in one_turn]
    partners: dict[str, str] = {}
    for one, other in pairs:
        partners.setdefault(one, other)
        partners.setdefault(other, one)
    turn.set(peer_tests={})
    turn.learn(rounds=Rounds(kind, tuple(pairs)))
    for host in hosts:
        turn.set_host(host, state="suspect", why=f"{kind} check after a fault, with {partners[host]}")
        ask(turn, host, kind, (partners[host],))
    turn.set(awaited=dict.fromkeys(hosts))
    turn.decided(f"first round: {_names(pairs)}", "each host is tested with its neighbour")


def _keep_peer_tests(turn: Turn, event: CheckPassed | CheckFailed) -> bool:
    """Keep what a host has found of its peer; False: there are no rounds, or it was not asked in them."""
    recovery, name = turn.state.recovery, event.host
    if recovery is None or recovery.rounds is None or name not in turn.state.awaited:
        return False
    turn.owned("peer_tests")[name] = PeerTests(event.bad_peers, event.peer_rates)
    return True


def go_on(turn: Turn) -> bool:
    """All that were asked have answered, or are gone: ask others, or conclude; whether others were asked."""
    recovery = turn.state.recovery
    rounds = recovery.rounds if recovery is not None else None
    if rounds is None:
        return False
    second = rounds if rounds.doubts else _plan_second(turn, rounds)
    if second is None or not second.turns:
        if second is not None:
            _conclude_rounds(turn, second)
        turn.learn(rounds=None)
        return False
    hosts = turn.state.hosts
    pairs = [pair for pair in second.turns[0] if all(hosts[host].state not in _AWAY for host in pair)]
    for host, partner in pairs:
        turn.set_host(host, state="suspect", why=f"{second.kind} check, with {partner}")
        ask(turn, host, second.kind, (partner,))
    turn.set(awaited={host: None for host, _ in pairs})
    turn.learn(rounds=replace(second, second=(*second.second, *pairs), turns=second.turns[1:]))
    return True


# The second round


def _plan_second(turn: Turn, rounds: Rounds) -> Rounds | None:
    """Judge the first round; None: a second one is not needed, or not possible."""
    state, found = turn.state, _found(turn.state, rounds.first)
    turn.note("first round between hosts", _summary(rounds.first, found))
    hosts = dict.fromkeys(host for pair in rounds.first for host in pair)
    there = [host for host in hosts if state.hosts[host].state in _THERE]
    suspects, good = doubtful(there, [*found.rates, *found.bad], found.bad)
    if not suspects:
        return None
    # A suspect tested with another suspect proves nothing, so a good partner is needed.
    spares = [host for host in ready_hosts(state) if not state.has_place(host)]
    if len(found.bad) > state.most_to_blame or not (good or spares):
        _blame_nobody(turn, f"{len(found.bad)} of {len(rounds.first)} pairs of hosts are bad")
        return None
    turns = plan_suspects(suspects, _near(state, suspects, good or spares))
    why = "each is tested with a host of a good pair" if good else "no pair is good, so each is tested with a spare"
    turn.decided(f"second round: {_names(pair for one_turn in turns for pair in one_turn)}", why)
    doubts: dict[str, list[str]] = defaultdict(list)
    for (one, other), what in found.bad.items():
        doubts[one].append(f"with {other}: {what}")
        doubts[other].append(f"with {one}: {what}")
    return replace(
        rounds,
        doubts={host: "; ".join(doubts[host]) for host in suspects},
        turns=tuple(map(tuple, turns)),
        by_spares=not good,
    )


def _near(state: State, suspects: Sequence[str], good: Sequence[str]) -> list[str]:
    """The good hosts in such an order that as many suspects as possible have one of their own rack in their place."""
    by_rack: dict[str, list[str]] = defaultdict(list)
    for host in reversed(good):
        by_rack[state.hosts[host].rack].append(host)
    racks = [by_rack[state.hosts[host].rack] for host in suspects[: len(good)]]
    chosen = [rack.pop() if rack else "" for rack in racks]
    taken = set(chosen)
    left = iter([host for host in good if host not in taken])
    return [*(host or next(left) for host in chosen), *left]


def _conclude_rounds(turn: Turn, rounds: Rounds) -> None:
    """A host that was bad in both rounds has to go; one that was good in the second is cleared."""
    state = turn.state
    asked = [pair for pair in rounds.second if state.hosts[pair[0]].state in _THERE]
    # A partner that has gone meanwhile, or is not heard of, could not be reached for that reason.
    measured = [pair for pair in asked if state.hosts[pair[1]].state in (*_THERE, "spare")]
    found = _found(state, measured, known=_found(state, rounds.first).rates)
    turn.note("second round between hosts", _summary(asked, found))
    if found.rates:
        turn.decided(f"{listed(host for host, _ in found.rates)} cleared", "good with a good host")
    elif found.bad and rounds.by_spares:
        _blame_nobody(turn, "no host is good with another, nor with a spare")
        return
    # A host with a broken network must go in any case; one that is only slow is better than to wait for another.
    may_go = can_spare(state, {host for host, _ in found.bad})
    for (host, partner), what in found.bad.items():
        why = f"its network is bad in both rounds: {rounds.doubts[host]}; with {partner}: {what}"
        if may_go or (host, partner) not in found.slow:
            _fail_in_recovery(turn, host, why, f"bad with {partner} too, which is good")
        else:
            turn.decided(f"{host} stays", "it is only slow, and nothing can replace it")
            turn.alert("warning", f"{why}; it stays, since nothing can replace it", host)


def _blame_nobody(turn: Turn, what: str) -> None:
    turn.decided("nobody is evicted", f"{what}: a common cause")
    turn.alert("error", f"{what}, so it is something that all share: nobody is evicted")


def _found(state: State, pairs: Iterable[Pair], known: Mapping[Pair, float] | None = None) -> _Pairs:
    """What was found of pairs; those that were not measured are left out.

    Args:
        known: rates of good pairs to compare with, where only the first host of each pair was asked; None: both were.
    """
    rates: dict[Pair, float] = {}
    bad: dict[Pair, str] = {}
    for pair in pairs:
        measured: list[float] = []
        for one, other in (pair, pair[::-1]) if known is None else (pair,):
            tests = state.peer_tests.get(one, _NOTHING)
            if why := tests.bad.get(other):
                bad.setdefault(pair, why)
            if other in tests.rates:
                measured.append(tests.rates[other])
        if measured and pair not in bad:
            rates[pair] = min(measured)
    slow = bad_pairs({pair: rate for pair, rate in {**(known or {}), **rates}.items() if rate > 0}, None, SLOW_SHARE)
    slow = {pair: why for pair, why in slow.items() if pair in rates}
    good = {pair: rate for pair, rate in rates.items() if pair not in slow}
    return _Pairs(good, {**bad, **slow}, set(slow))


def _summary(pairs: Sequence[Pair], found: _Pairs) -> str:
    bad = [f"{one} with {other}: {why}" for (one, other), why in found.bad.items()]
    missed = [pair for pair in pairs if pair not in found.bad and pair not in found.rates]
    parts = [f"bad: {listed(bad)}"] if bad else []
    parts += [f"good: {_names(found.rates)}"] if found.rates else []
    parts += [f"not measured: {_names(missed)}"] if missed else []
    return "; ".join(parts)


def _names(pairs: Iterable[Pair]) -> str:
    return listed(f"{one} with {other}" for one, other in pairs)
