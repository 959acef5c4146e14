"""Who is at fault for what ended ranks: the machine, or the program that ran on it. Pure; torch-free.

- The **machine** says so itself: its kernel, its sensors, a check, an error of network or storage, a rank that is
  stopped or does not answer. Its host is at fault.
- What the **program** raises, or the status with which it leaves, is its own on whichever host it happens. No host is
  evicted for it; one on which it happens again is checked.
- A rank that **dies** of a signal may do so for either. It is the program's if the same rank has died at the same step
  before, or in the same place on another host. It is the host's if it comes there again and again, at different
  steps, while all others have none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.run.decide import user_code
from phalanx.run.decide.state import Failure, Recovery, State

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
    steps = tuple(dict.fromkeys(user_code.step_mark(failure) for failure in failures))
    if any(user_code.came_before(state, failure) for failure in failures):
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
