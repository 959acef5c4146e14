"""What happens to a job: what the driver's shell makes of messages, of the back end's word and of people's orders.

They serialise to JSON, so that a journal holds them. `at_s` is of the driver's clock, which must go on across its
restarts (seconds since 1970 do); where it goes back it counts as standing still. What is about an attempt that is not
the present one changes nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Fault = Literal["user", "process", "host", "network", "storage"]
"""Class of a fault, as the rules for logs have it."""

FailureKind = Literal["user", "syntax", "raised", "interrupted", "signal", "status", "usage"]

USAGE = 2
"""Exit status of a program that refuses what it was given; a failure of kind ``usage``."""
"""As `phalanx.launch.rank_failures.Kind`."""


class EventBase(msgspec.Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    """Any of them.

    Attributes:
        at_s: when.
    """

    at_s: float


class JobBegun(EventBase, frozen=True, tag="job-begun"):
    """The first event of a job."""


class DriverRestarted(EventBase, frozen=True, tag="driver-restarted"):
    """The driver has read its journal again; what it did last may not have been performed."""


class Tick(EventBase, frozen=True, tag="tick"):
    """Time has passed; wanted when `next_deadline` says so."""


# Hosts


class HostJoined(EventBase, frozen=True, tag="host-joined"):
    """An executor has connected, for the first time or again; or is heard of again after it was unknown.

    Attributes:
        rack: what the host may fail together with; empty: not known.
        attempt: the highest that its executor has seen.
        running: ranks of that attempt that still run there.
    """

    host: str
    rack: str = ""
    attempt: int = 0
    running: tuple[int, ...] = ()


class HostUnknown(EventBase, frozen=True, tag="host-unknown"):
    """Nothing has been heard of a host for a while: neither good nor bad is known of it."""

    host: str


class HostGone(EventBase, frozen=True, tag="host-gone"):
    """The back end says that a host, or its executor, is gone."""

    host: str
    why: str = ""


class CheckPassed(EventBase, frozen=True, tag="check-passed"):
    """A host has passed the check of this number.

    Attributes:
        bad_peers: other hosts, by name -> what is bad between them and this one; either may be at fault.
        peer_rates: other hosts that were measured -> bytes per second, of the slower direction; 0: it answers, and how
            fast tells nothing.
    """

    host: str
    number: int
    bad_peers: dict[str, str] = {}
    peer_rates: dict[str, float] = {}


class CheckFailed(EventBase, frozen=True, tag="check-failed"):
    """A host has not passed the check of this number.

    Attributes:
        bad_peers, peer_rates: as in `CheckPassed`.
        is_between: nothing is bad but what `bad_peers` says: all tests of this host alone are passed.
    """

    host: str
    number: int
    why: str = ""
    bad_peers: dict[str, str] = {}
    peer_rates: dict[str, float] = {}
    is_between: bool = False


class Unprepared(EventBase, frozen=True, tag="unprepared"):
    """A host cannot get ready to run the script.

    Attributes:
        is_common: most hosts say the same and none has got ready, so it is the script; else others have.
    """

    host: str
    problem: str = ""
    is_common: bool = False


class Noticed(EventBase, frozen=True, tag="noticed"):
    """A log rule has matched a line of a rank or of a kernel log; said now and then of what repeats.

    Attributes:
        rule: its name.
        text: the line.
        rank: -1: it is of the kernel log.
        fault: class of fault that it stands for; None: not known.
        is_fatal: training cannot go on with it.
    """

    host: str
    rule: str = ""
    text: str = ""
    rank: int = -1
    fault: Fault | None = None
    is_fatal: bool = False


class SlowHost(EventBase, frozen=True, tag="slow-host"):
    """A host's own time per step is longer than that of the others.

    Attributes:
        factor: how many times the usual.
    """

    attempt: int
    host: str
    factor: float
    why: str = ""


# Attempts


class StoreOpened(EventBase, frozen=True, tag="store-opened"):
    """The rendezvous store of an attempt listens at this port of the host that was asked."""

    attempt: int
    port: int


class StoreFailed(EventBase, frozen=True, tag="store-failed"):
    """It could not be opened."""

    attempt: int
    problem: str = ""


class Started(EventBase, frozen=True, tag="started"):
    """A host has started its ranks of an attempt."""

    attempt: int
    host: str


class StartFailed(EventBase, frozen=True, tag="start-failed"):
    """A host could not, or refused to."""

    attempt: int
    host: str
    problem: str = ""


class Restored(EventBase, frozen=True, tag="restored"):
    """The attempt goes on from a state that a library of checkpoints has restored in it.

    Attributes:
        step: of the training, that the state was taken after; 0: there was none.
    """

    attempt: int
    step: int


class Running(EventBase, frozen=True, tag="running"):
    """Every rank has made its first step in this attempt.

    Attributes:
        step: as in `Advanced`.
        is_absolute: as in `Advanced`.
    """

    attempt: int
    step: int = -1
    is_absolute: bool = False


class Advanced(EventBase, frozen=True, tag="advanced"):
    """Steps advance; said now and then.

    Attributes:
        step: how many steps are done.
        is_absolute: counted from the beginning of the training, not of this process: with resuming scripts that
            report it, it tells whether an attempt got further than those before.
        age_s: since the newest of them was made; 0: lately.
    """

    attempt: int
    step: int
    is_absolute: bool = False
    age_s: float = 0.0


class WorkerFailed(EventBase, frozen=True, tag="worker-failed"):
    """A rank has ended as it should not; not one that was killed by order.

    Attributes:
        fault: class, by the rules for logs and `phalanx.launch.rank_failures`.
        summary: one line.
        follows: it only says that a peer is gone.
        step: in which it was, counted as in `Advanced`; -1: before the first, or not known.
    """

    attempt: int
    rank: int
    kind: FailureKind
    fault: Fault = "process"
    summary: str = ""
    follows: bool = False
    step: int = -1


class LeftEarly(EventBase, frozen=True, tag="left-early"):
    """These ranks, half of all at most, have ended with status 0, and others have failed since, or stand still.

    Attributes:
        steps: that each of them was at; -1: not known.
    """

    attempt: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...] = ()


class WorkersReturned(EventBase, frozen=True, tag="workers-returned"):
    """Every rank has ended with status 0."""

    attempt: int


class NoProgress(EventBase, frozen=True, tag="no-progress"):
    """No step for longer than the limit; see `phalanx.run.judge.step_limits.Standing`.

    Attributes:
        age_s: for how long.
        limit_s: of that.
        kind: ``stopped``: ranks are stopped, dead or silent; ``hang``: nothing of the job moves, which alone blames
            nobody; ``long``: ranks move, so that people are told, and nothing is done.
        why: one line.
        ranks: that are stopped, dead or silent.
    """

    attempt: int
    age_s: float
    limit_s: float
    kind: Literal["moving", "stopped", "hang", "long"] = "hang"
    why: str = ""
    ranks: tuple[int, ...] = ()


class TrafficSilent(EventBase, frozen=True, tag="traffic-silent"):
    """The training interfaces of some hosts carry less than they did, or nothing.

    Attributes:
        is_total: nothing at all.
        without_progress: and no step has been made all the time, for longer than such a silence may last.
    """

    attempt: int
    hosts: tuple[str, ...]
    silent_s: float
    is_total: bool = True
    without_progress: bool = True


class LossBroken(EventBase, frozen=True, tag="loss-broken"):
    """The loss is not a number any more, and stays so.

    Attributes:
        ranks: whose own loss broke first; empty: all have the same.
        is_from_start: it has been none since the first step of this attempt.
    """

    attempt: int
    step: int
    ranks: tuple[int, ...] = ()
    is_from_start: bool = False


class SuspectsNamed(EventBase, frozen=True, tag="suspects-named"):
    """The evidence has been judged.

    Attributes:
        ranks: the suspects; empty: nobody stands out.
        is_proven: more than their standing still tells against them: they are stopped, dead, silent, or have not begun
            a collective that the others are in. Only then a host may be blamed.
        place: where the ranks are in their code that do not wait for others, to know the place again.
        waits: what ranks do, in a few words each, those first that hold up others.
        group: name of the smallest group of ranks that shares the fault, such as ``pipeline 1``; empty: none.
        group_ranks: its members.
    """

    attempt: int
    ranks: tuple[int, ...] = ()
    why: str = ""
    group: str = ""
    group_ranks: tuple[int, ...] = ()
    is_proven: bool = True
    place: str = ""
    waits: tuple[str, ...] = ()


class Stopped(EventBase, frozen=True, tag="stopped"):
    """A host has no process of the attempt left.

    Attributes:
        stuck: those that the kernel does not let go.
    """

    attempt: int
    host: str
    stuck: tuple[int, ...] = ()


# Orders


class StopAsked(EventBase, frozen=True, tag="stop-asked"):
    """A person ends the job.

    Attributes:
        grace_s: between SIGTERM and SIGKILL; None: as the policy has it, and asked a second time none.
    """

    who: str = ""
    grace_s: float | None = None


class TimeShort(EventBase, frozen=True, tag="time-short"):
    """The back end will end the job in so many seconds."""

    left_s: float


class DrainAsked(EventBase, frozen=True, tag="drain-asked"):
    """A person wants a host to leave when another can take its place."""

    host: str
    who: str = ""


class EvictAsked(EventBase, frozen=True, tag="evict-asked"):
    """A person wants a host to leave at once and not to come back."""

    host: str
    who: str = ""


class ReturnAsked(EventBase, frozen=True, tag="return-asked"):
    """A person lets an evicted host come back, or one stay that was to be drained."""

    host: str
    who: str = ""


Event = (
    JobBegun
    | DriverRestarted
    | Tick
    | HostJoined
    | HostUnknown
    | HostGone
    | CheckPassed
    | CheckFailed
    | Unprepared
    | Noticed
    | SlowHost
    | StoreOpened
    | StoreFailed
    | Started
    | StartFailed
    | Restored
    | Running
    | Advanced
    | WorkerFailed
    | LeftEarly
    | WorkersReturned
    | NoProgress
    | TrafficSilent
    | LossBroken
    | SuspectsNamed
    | Stopped
    | StopAsked
    | TimeShort
    | DrainAsked
    | EvictAsked
    | ReturnAsked
)
