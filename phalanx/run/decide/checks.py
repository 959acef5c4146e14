"""Checks that hosts are asked for, and what follows when one does not pass. Torch-free."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide import brakes, endings, ladder
from phalanx.run.decide.actions import Check
from phalanx.run.decide.placement import ready_hosts
from phalanx.run.decide.policy import CheckKind
from phalanx.run.decide.state import Ending, PendingCheck, State
from phalanx.run.decide.turn import Turn


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
    return turn.state.brakes.unfit > brakes.most_unfit(state)


def _blame_none(turn: Turn, name: str, why: str) -> None:
    """What all hosts lack is not theirs: without any of them the job ends, before it has used up all that there are."""
    count = turn.state.brakes.unfit
    text = f"{count} hosts that came one after another have not passed their checks: a common cause"
    turn.decided(f"{name} is given back, not evicted", text)
    turn.alert("error", f"{why}; {text}, so it is given back, not evicted", name)
    turn.release(name, why)
    if turn.state.phase == "waiting":
        endings.finish(turn, Ending(endings.NO_PROGRESS, f"{text}; of the last one: {why}"))


def _are_many(turn: Turn, name: str, why: str) -> bool:
    """Whether more hosts fail their checks in this recovery than can be at fault by themselves."""
    found = turn.state.recovery
    if found is None:
        return False
    turn.learn(evict={**found.evict, name: why})
    return len(found.evict) >= ladder.most_to_blame(turn.state)
