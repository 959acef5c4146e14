"""Whether the user's own code is at fault, so that neither another attempt nor another host helps.

Who is at fault for what ended ranks: the machine, or the program that ran on it.

- The **machine** says so itself: its kernel, its sensors, a check, an error of network or storage, a rank that is
  stopped or does not answer. Its host is at fault.
- What the **program** raises, or the status with which it leaves, is its own on whichever host it happens. No host is
  evicted for it; one on which it happens again is checked.
- A rank that **dies** of a signal may do so for either. It is the program's if the same rank has died at the same step
  before, or in the same place on another host. It is the host's if it comes there again and again, at different
  steps, while all others have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from phalanx.run.decide.state import Ending, Failure, LastWord, Recovery, State

_OWN_WORD = ("user", "syntax", "raised", "status", "usage", "start", "loss", "left")
_NOT_BY_ITSELF = ("host", "network", "storage")
_ERRORS = ("SIGSEGV", "SIGFPE", "SIGSYS")
"""What a program does to itself: other signals come from outside, or from a machine that differs."""

_DIFFERENT_WORDS = 64
_DIFFERS_BY_RANK = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def words_of(failure: Failure) -> str:
    """What a failure says, without what differs from rank to rank: numbers, addresses, a last line."""
    if failure.kind == "usage":
        return failure.kind
    return f"{failure.kind}: {_DIFFERS_BY_RANK.sub('#', failure.summary)}"[:300]


def speaks_of_itself(failure: Failure) -> bool:
    """Whether a rank speaks of itself, of something that no host can be blamed for."""
    is_of_a_host = failure.fault in _NOT_BY_ITSELF and failure.kind != "loss"  # which would come at another step
    return failure.kind in _OWN_WORD and not failure.follows and not is_of_a_host


def counted(words: dict[str, int], failure: Failure, ranks: int) -> dict[str, int]:
    """Counts of what ranks say of themselves with this failure, which speaks for so many of them."""
    if failure.kind == "loss" or not speaks_of_itself(failure):
        return words
    said = words_of(failure)
    if said not in words and len(words) >= _DIFFERENT_WORDS:
        return words
    return {**words, said: words.get(said, 0) + ranks}


def most_say_the_same(state: State) -> Failure | None:
    """A failure that more than half of all ranks have with the same words."""
    counts = state.recovery.words if state.recovery is not None else {}
    words = max(counts, key=lambda said: counts[said], default="")
    if 2 * counts.get(words, 0) <= state.world_size:
        return None
    return next((failure for failure in _own(state) if words_of(failure) == words), None)


def verdict(state: State) -> Ending | None:
    """How the job has to end because of its own code; None: it is not that, as far as can be seen."""
    common = most_say_the_same(state)
    if common is not None and common.kind == "syntax":
        return of_one(state, common) or Ending(1, f"the source is wrong on most ranks: {common.summary}")
    if common is not None and common.kind in ("user", "start", "usage"):
        return Ending(2, f"bad input: {common.summary}")
    if common is not None:
        return Ending(1, f"most ranks ended alike, which no other host would change: {common.summary}")
    return next((ending for failure in failures_of(state) if (ending := of_one(state, failure)) is not None), None)


def of_one(state: State, failure: Failure) -> Ending | None:
    """What follows from one failure, whatever the other ranks say."""
    if failure.kind == "syntax" and has_never_run(state):
        return Ending(1, f"the source is wrong, whichever host runs it: {failure.summary}")
    if failure.kind == "signal" and failure.fault == "process" and any(name in failure.summary for name in _ERRORS):
        is_again = state.progress.done >= 0 and came_before(state, failure)
        return _again(failure) if is_again else None
    if not speaks_of_itself(failure):
        return None
    if failure.kind == "user" and has_never_run(state):
        return Ending(2, f"bad input: rank {failure.rank} said so before the first step: {failure.summary}")
    if not _is_again(state.last_word, failure):
        return None
    if failure.kind == "usage" and has_never_run(state):
        return Ending(2, f"bad input: it came back in the next attempt, before any step: {failure.summary}")
    return _again(failure)


def _again(failure: Failure) -> Ending:
    where = f"step {failure.step}" if failure.step >= 0 else "the beginning"
    return Ending(1, f"it came back in the next attempt at the same place, {where}: {failure.summary}")


def step_mark(failure: Failure) -> str:
    """Key of the history for where a rank has died."""
    return f"rank {failure.rank} at step {failure.step}"


def came_before(state: State, failure: Failure) -> bool:
    """Whether a rank has died where it has died before.

    That of two attempts none came beyond its first step says nothing: on a bad host it is so too.
    """
    return failure.step > max(state.progress.base, 0) + 1 and state.count(step_mark(failure)) > 0


def last_word(state: State) -> LastWord | None:
    """What to compare the next recovery with."""
    own = [failure for failure in _own(state) if failure.kind != "start"]
    first = min(own, key=lambda failure: failure.rank, default=None)
    return None if first is None else LastWord(words_of(first), first.step, first.kind)


def first_own(state: State) -> Failure | None:
    """The first rank that says something of itself for which no host can be blamed, other than a broken loss."""
    own = (failure for failure in _own(state) if failure.kind not in ("start", "loss") and failure.rank >= 0)
    return next(own, None)


def has_never_run(state: State) -> bool:
    """No attempt has ever made a step."""
    return not state.progress.has_run


def _is_again(last: LastWord | None, failure: Failure) -> bool:
    return last is not None and last.step == failure.step and last.words == words_of(failure)


def failures_of(state: State) -> Iterator[Failure]:
    """All that are known of the recovery."""
    recovery = state.recovery
    for failures in recovery.failures.values() if recovery is not None else ():
        yield from failures


def _own(state: State) -> Iterator[Failure]:
    return filter(speaks_of_itself, failures_of(state))


OF_THE_HOST = ("host", "network", "storage")

_OWN_END = ("raised", "user", "syntax", "status")
_HOSTS_PER_DEATH = 16
"""Of so many other hosts one may have had a death too, for other reasons."""

Nature = Literal["machine", "program", "death"]


class Blame(msgspec.Struct, frozen=True):
    """Of one host.

    Attributes:
        level: the rung of the ladder: how often it has been at fault, and one more if the first time is serious.
        why: for people; empty: the ladder's own words for that level tell it.
        marks: keys of the history to which this is added.
    """

    level: int
    why: str = ""
    marks: tuple[str, ...] = ()


def culprits(state: State, recovery: Recovery) -> dict[str, Blame]:
    """Hosts on which something was at fault and that are still there."""
    going = {*recovery.lost, *recovery.stuck, *recovery.evict}
    found = {host: _of_machine(state, recovery, host, 1) for host in recovery.suspects if host not in going}
    for host, failures in recovery.failures.items():
        own = [f for f in failures if not f.follows and not _is_everybodys(f)]
        if own and host not in found and host not in going:
            found[host] = _of_failures(state, recovery, host, own)
    return found


def _is_everybodys(failure: Failure) -> bool:
    """A loss that is the same on all ranks tells of none of them, and a rank that ends well tells of no host."""
    return failure.kind == "left" or (failure.kind == "loss" and failure.fault == "process")


def _of_failures(state: State, recovery: Recovery, host: str, failures: list[Failure]) -> Blame:
    natures = {nature_of(failure) for failure in failures}
    is_new = not state.hosts[host].is_proven  # it has never run anything well
    if "machine" in natures:
        return _of_machine(state, recovery, host, int(is_new or any(f.fault in OF_THE_HOST for f in failures)))
    if "death" in natures:
        return _of_death(state, host, [f for f in failures if nature_of(f) == "death"], int(is_new))
    return _of_program(state, host, int(is_new))


def nature_of(failure: Failure) -> Nature:
    """What a failure of a rank tells of."""
    if failure.fault in OF_THE_HOST or failure.rank < 0 or failure.kind in ("start", "silent", "loss"):
        return "machine"
    # What NCCL or CUDA raise has the class of a process, by the rules for logs: it may be of the GPU.
    is_own = failure.kind in _OWN_END and (failure.kind != "raised" or failure.fault == "user")
    return "program" if is_own else "death"


def _of_machine(state: State, recovery: Recovery, host: str, base: int) -> Blame:
    marks = _marks(state, host)
    if recovery.group and host in recovery.group_hosts:
        marks = (*marks, f"group {recovery.group}")
    return Blame(base + max(map(state.count, marks)), marks=marks)


def _of_program(state: State, host: str, base: int) -> Blame:
    mark = f"program on {host}"
    why = f"{host}: it was raised by its program, for which no host is evicted"
    return Blame(min(base + state.count(mark), 1), why, (mark,))


def _of_death(state: State, host: str, failures: list[Failure], base: int) -> Blame:
    own = state.count(f"host {host}")
    steps = tuple(dict.fromkeys(step_mark(failure) for failure in failures))
    if any(came_before(state, failure) for failure in failures):
        return Blame(0, f"{host}: a rank has died at the same step before, which is the program's", steps)
    marks = (*_marks(state, host), f"death on {host}", *steps)
    place = state.count(f"place {state.place_of(host)}") if state.has_place(host) else 0
    if place > own:  # whatever becomes of this host, the next one will have it too
        why = f"{host}: it has come to the same place on another host too"
        return Blame(base + place if base + place >= 3 else min(base + place, 1), why, marks)
    others = sum(state.count(f"death on {name}") for name in _still_there(state) if name != host)
    if base + own >= 2 and others > len(state.placement) // _HOSTS_PER_DEATH:
        return Blame(1, f"{host}: ranks die there and on other hosts too, so it is none of them", marks)
    return Blame(base + own, marks=marks)


def _still_there(state: State) -> list[str]:
    return [name for name, host in state.hosts.items() if host.state not in ("evicted", "gone")]


def _marks(state: State, host: str) -> tuple[str, ...]:
    """Keys of the history for a host and its place."""
    return (f"host {host}", f"place {state.place_of(host)}") if state.has_place(host) else (f"host {host}",)
