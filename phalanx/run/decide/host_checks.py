"""Checks that hosts are asked for, and what follows when one does not pass.

Hosts of an attempt are tested with each other, in two rounds, so that a bad link is named.

In the first round each is tested with its neighbour in the placement, beside its other tests. A pair that is bad makes
both of its hosts doubtful, and no more than that: who reports a failure need not be at fault. In the second round each
doubtful host is tested with a host of a good pair (see `phalanx.checks.pairwise_tests`). One that is bad there too is
bad. Where no pair is good, or more are bad than can be by chance, there is a common cause, and nobody is blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from phalanx.checks.pairwise_tests import Pair, bad_pairs, doubtful, plan_neighbours, plan_suspects
from phalanx.run.decide import escalation, transition
from phalanx.run.decide.actions import Check
from phalanx.run.decide.events import CheckFailed, CheckPassed
from phalanx.run.decide.policy import CheckKind
from phalanx.run.decide.state import Ending, HostState, PendingCheck, Rounds, State, Ways, can_spare, ready_hosts
from phalanx.run.decide.transition import Turn


def ask(turn: Turn, host: str, kind: CheckKind, peers: tuple[str, ...] = ()) -> None:
    """Have a host checked, and wait for its answer."""
    state = turn.state
    number = state.check_count + 1
    pending = PendingCheck(number, kind, turn.now_s + state.policy.check_s(kind), peers)
    turn.set(check_count=number)
    turn.await_check(host, pending)
    turn.act(Check(host, number, kind, peers))


def ask_suspects(turn: Turn, kinds: dict[str, CheckKind]) -> None:
    """Have hosts checked before the next attempt, the network with hosts that are believed good."""
    good = [host for host in ready_hosts(turn.state) if host not in kinds]
    for host, kind in kinds.items():
        if turn.state.hosts[host].state in ("gone", "evicted"):
            continue
        turn.set_host(host, state="suspect", why=f"{kind} check after a fault")
        ask(turn, host, kind, peers_of(turn.state, host, good) if kind != "passive" else ())
    turn.set(awaited={host: None for host in kinds if host in turn.state.checks})


def peers_of(state: State, host: str, good: list[str]) -> tuple[str, ...]:
    """Up to two hosts believed good, of the same rack if possible."""
    rack = state.hosts[host].rack
    near = [other for other in good if state.hosts[other].rack == rack]
    return tuple((near + [other for other in good if other not in near])[:2]) if near else tuple(good[:2])


def fails(turn: Turn, name: str, why: str, said: str, *, is_of_recovery: bool) -> None:
    """A host is bad: it is evicted, or only given back where so many are that it may be the check.

    Args:
        why: for people, and the reason that stays with the host.
        said: the same in a few words.
        is_of_recovery: it was checked after a fault, and not because it has joined.
    """
    if is_of_recovery and _are_many(turn, name, why):
        turn.decided(f"{name} is given back, not evicted", "many others have not passed their checks either")
        turn.alert("error", f"{why}; so have many others, so it is given back, not evicted", name)
        turn.release(name, why)
        return
    if not is_of_recovery and _are_unfit(turn):
        _blame_none(turn, name, why)
        return
    turn.decided(f"{name} is evicted", said)
    turn.alert("error", f"{why}; it is evicted", name)
    turn.evict(name, why)


def passes(turn: Turn) -> None:
    """A host that has come is good: so it is not all of them."""
    if turn.state.brakes.unfit:
        turn.set(brakes=replace(turn.state.brakes, unfit=0))


def _are_unfit(turn: Turn) -> bool:
    """Whether more hosts have come one after another and not passed than can be at fault by themselves."""
    state = turn.state
    turn.set(brakes=replace(state.brakes, unfit=state.brakes.unfit + 1))
    return turn.state.brakes.unfit > escalation.most_unfit(state)


def _blame_none(turn: Turn, name: str, why: str) -> None:
    """What all hosts lack is not theirs: without any of them the job ends, before it has used up all that there are."""
    count = turn.state.brakes.unfit
    text = f"{count} hosts that came one after another have not passed their checks: a common cause"
    turn.decided(f"{name} is given back, not evicted", text)
    turn.alert("error", f"{why}; {text}, so it is given back, not evicted", name)
    turn.release(name, why)
    if turn.state.phase == "waiting":
        transition.finish(turn, Ending(transition.NO_PROGRESS, f"{text}; of the last one: {why}"))


def _are_many(turn: Turn, name: str, why: str) -> bool:
    """Whether more hosts fail their checks in this recovery than can be at fault by themselves."""
    found = turn.state.recovery
    if found is None:
        return False
    turn.learn(evict={**found.evict, name: why})
    return len(found.evict) >= escalation.most_to_blame(turn.state)


SLOW_SHARE = 0.5
"""Of the median of the other pairs: in a recovery pairs are measured once, and beside tests of other hosts."""

_THERE: tuple[HostState, ...] = ("active", "draining")
_AWAY: tuple[HostState, ...] = ("gone", "evicted")
_NOTHING = Ways()


class _Found(NamedTuple):
    """What was found of pairs.

    Attributes:
        rates: bytes per second of those that are good; 0: how fast tells nothing.
        bad: those where something is bad, and what.
        slow: of these, those that are only slower than the others.
    """

    rates: dict[Pair, float]
    bad: dict[Pair, str]
    slow: set[Pair]


# The first round


def begin(turn: Turn, hosts: Sequence[str], kind: CheckKind) -> None:
    """Check all of them, the network with their neighbours."""
    pairs = [pair for one_turn in plan_neighbours(hosts) for pair in one_turn]
    partners: dict[str, str] = {}
    for one, other in pairs:
        partners.setdefault(one, other)
        partners.setdefault(other, one)
    turn.set(ways={})
    turn.learn(rounds=Rounds(kind, tuple(pairs)))
    for host in hosts:
        turn.set_host(host, state="suspect", why=f"{kind} check after a fault, with {partners[host]}")
        ask(turn, host, kind, (partners[host],))
    turn.set(awaited=dict.fromkeys(hosts))
    turn.decided(f"first round: {_names(pairs)}", "each host is tested with its neighbour")


def takes(turn: Turn, event: CheckPassed | CheckFailed) -> bool:
    """Keep what a host has found of its peer; False: there are no rounds, or it was not asked in them."""
    recovery, name = turn.state.recovery, event.host
    if recovery is None or recovery.rounds is None or name not in turn.state.awaited:
        return False
    turn.add_ways(name, Ways(event.bad_peers, event.peer_rates))
    return True


def go_on(turn: Turn) -> bool:
    """All that were asked have answered, or are gone: ask others, or conclude; whether others were asked."""
    recovery = turn.state.recovery
    rounds = recovery.rounds if recovery is not None else None
    if rounds is None:
        return False
    second = rounds if rounds.doubts else _plan_second(turn, rounds)
    if second is not None and second.turns:
        _ask(turn, second)
        return True
    if second is not None:
        _judge(turn, second)
    turn.learn(rounds=None)
    return False


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
    spares = [host for host in ready_hosts(state) if not state.has_place(host)]
    if len(found.bad) > escalation.most_to_blame(state) or not (good or spares):
        _blame_nobody(turn, f"{len(found.bad)} of {len(rounds.first)} pairs of hosts are bad")
        return None
    turns = plan_suspects(suspects, _near(state, suspects, good or spares))
    words = "each is tested with a host of a good pair" if good else "no pair is good, so each is tested with a spare"
    turn.decided(f"second round: {_names(pair for one_turn in turns for pair in one_turn)}", words)
    doubts = _by_host(found.bad)
    return replace(
        rounds, doubts={host: doubts[host] for host in suspects}, turns=tuple(map(tuple, turns)), by_spares=not good
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


def _ask(turn: Turn, rounds: Rounds) -> None:
    """Have the doubtful hosts of the next turn tested."""
    pairs = [pair for pair in rounds.turns[0] if all(turn.state.hosts[host].state not in _AWAY for host in pair)]
    for host, partner in pairs:
        turn.set_host(host, state="suspect", why=f"{rounds.kind} check, with {partner}")
        ask(turn, host, rounds.kind, (partner,))
    turn.set(awaited={host: None for host, _ in pairs})
    turn.learn(rounds=replace(rounds, second=(*rounds.second, *pairs), turns=rounds.turns[1:]))


def _judge(turn: Turn, rounds: Rounds) -> None:
    """Who was bad in both rounds has to go; who was good in the second is cleared."""
    state = turn.state
    asked = [pair for pair in rounds.second if state.hosts[pair[0]].state in _THERE]
    # A partner that has gone meanwhile, or is not heard of, could not be reached for that reason.
    measured = [pair for pair in asked if state.hosts[pair[1]].state in (*_THERE, "spare")]
    found = _found(state, measured, known=_found(state, rounds.first).rates)
    turn.note("second round between hosts", _summary(asked, found))
    if found.rates:
        turn.decided(f"{escalation.names(host for host, _ in found.rates)} cleared", "good with a good host")
    elif found.bad and rounds.by_spares:
        _blame_nobody(turn, "no host is good with another, nor with a spare")
        return
    may_go = can_spare(state, {host for host, _ in found.bad})
    for (host, partner), what in found.bad.items():
        why = f"its network is bad in both rounds: {rounds.doubts[host]}; with {partner}: {what}"
        if may_go or (host, partner) not in found.slow:
            fails(turn, host, why, f"bad with {partner} too, which is good", is_of_recovery=True)
        else:
            turn.decided(f"{host} stays", "it is only slow, and nothing can replace it")
            turn.alert("warning", f"{why}; it stays, since nothing can replace it", host)


def _blame_nobody(turn: Turn, what: str) -> None:
    turn.decided("nobody is evicted", f"{what}: a common cause")
    turn.alert("error", f"{what}, so it is something that all share: nobody is evicted")


# What was found


def _found(state: State, pairs: Iterable[Pair], known: Mapping[Pair, float] | None = None) -> _Found:
    """Of pairs; those that were not measured are left out.

    Args:
        known: rates of good pairs, to hold these against, of which only the first host was asked; None: both were.
    """
    rates: dict[Pair, float] = {}
    bad: dict[Pair, str] = {}
    for pair in pairs:
        said = [_of_way(state, pair)] + ([_of_way(state, pair[::-1])] if known is None else [])
        whys = [why for why, _ in said if why]
        measured = [rate for _, rate in said if rate is not None]
        if whys:
            bad[pair] = whys[0]
        elif measured:
            rates[pair] = min(measured)
    slow = bad_pairs({pair: rate for pair, rate in {**(known or {}), **rates}.items() if rate > 0}, None, SLOW_SHARE)
    slow = {pair: why for pair, why in slow.items() if pair in rates}
    good = {pair: rate for pair, rate in rates.items() if pair not in slow}
    return _Found(good, {**bad, **slow}, set(slow))


def _of_way(state: State, pair: Pair) -> tuple[str, float | None]:
    """What the first host has found of the second: what is bad, and bytes per second; None: it did not measure."""
    ways = state.ways.get(pair[0], _NOTHING)
    return ways.bad.get(pair[1], ""), ways.rates.get(pair[1])


def _by_host(bad: Mapping[Pair, str]) -> dict[str, str]:
    """What is bad, by each of the two hosts."""
    said: dict[str, list[str]] = defaultdict(list)
    for (one, other), why in bad.items():
        said[one].append(f"with {other}: {why}")
        said[other].append(f"with {one}: {why}")
    return {host: "; ".join(parts) for host, parts in said.items()}


# What people read


def _summary(pairs: Sequence[Pair], found: _Found) -> str:
    bad = [f"{one} with {other}: {why}" for (one, other), why in found.bad.items()]
    missed = [pair for pair in pairs if pair not in found.bad and pair not in found.rates]
    parts = [f"bad: {escalation.names(bad)}"] if bad else []
    parts += [f"good: {_names(found.rates)}"] if found.rates else []
    parts += [f"not measured: {_names(missed)}"] if missed else []
    return "; ".join(parts)


def _names(pairs: Iterable[Pair]) -> str:
    return escalation.names(f"{one} with {other}" for one, other in pairs)
