"""What happens to a job: made by the driver from messages, from reports of the back end and from people's orders.

They serialise to JSON, so that a journal holds them. `at_s` is of the job's clock (`phalanx.run.clock.JobClock`), which
goes on across restarts of the driver; where it goes back it counts as standing still. What is about an attempt that is
not the present one changes nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.detect.detection import Detection

Fault = Literal["user", "process", "host", "network", "storage"]
"""Class of a fault, as in the rules for logs."""

OF_THE_HOST: tuple[Fault, ...] = ("host", "network", "storage")
"""Faults that are not the program's."""

FailureKind = Literal["user", "syntax", "raised", "interrupted", "signal", "status", "usage"]
"""As `phalanx.launch.rank_failures.Kind`, and ``usage``: a program refuses its input (exit status `USAGE`)."""

USAGE = 2

LAST_LINE = ", last line: "
"""What follows this in the summary of a failure is what the rank has written last, which others may not have."""

CheckKind = Literal["passive", "quick", "full"]
"""Passive: reads counters and logs, under 0.1 s. Quick: measures, under 5 s. Full: minutes."""


class EventBase(msgspec.Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    """Common to all events."""

    at_s: float


class JobBegun(EventBase, frozen=True, tag="job-begun"):
    """The first event of a job."""


class DriverRestarted(EventBase, frozen=True, tag="driver-restarted"):
    """The driver has read its journal again; what it did last may not have been performed."""


class Tick(EventBase, frozen=True, tag="tick"):
    """Time has passed; wanted when `next_deadline` says so."""


# Hosts


class HostJoined(EventBase, frozen=True, tag="host-joined"):
    """An executor has connected, for the first time or again; or is heard of again after it was unknown."""

    host: str
    rack: str = ""  # what the host may fail together with; empty: not known
    attempt: int = 0  # the highest that its executor has seen
    running: tuple[int, ...] = ()  # ranks of that attempt that still run there


class HostUnknown(EventBase, frozen=True, tag="host-unknown"):
    """Nothing has been heard of a host for a while: neither good nor bad is known of it."""

    host: str


class HostGone(EventBase, frozen=True, tag="host-gone"):
    """The back end says that a host, or its executor, is gone."""

    host: str
    why: str = ""


class CheckPassed(EventBase, frozen=True, tag="check-passed"):
    """A host has passed the check of this number."""

    host: str
    number: int
    # Other hosts, by name -> what is bad between them and this one; either may be at fault.
    bad_peers: dict[str, str] = {}
    # Other hosts that were measured -> bytes per second, of the slower direction; 0: it answers, and the rate means
    # nothing.
    peer_rates: dict[str, float] = {}


class CheckFailed(EventBase, frozen=True, tag="check-failed"):
    """A host has not passed the check of this number."""

    host: str
    number: int
    why: str = ""
    bad_peers: dict[str, str] = {}  # as in `CheckPassed`
    peer_rates: dict[str, float] = {}
    is_between: bool = False  # only what is in `bad_peers` is bad: all tests of this host alone are passed


class Unprepared(EventBase, frozen=True, tag="unprepared"):
    """A host cannot get ready to run the script; `is_common`: most cannot and none is ready, so it is the script."""

    host: str
    problem: str = ""
    is_common: bool = False


class Noticed(EventBase, frozen=True, tag="noticed"):
    """A log rule has matched a line of a rank or (rank -1) of the kernel log; now and then for what repeats."""

    host: str
    rule: str = ""
    text: str = ""
    rank: int = -1
    fault: Fault | None = None  # class of fault that the rule stands for; None: not known
    is_fatal: bool = False  # training cannot go on with it


class SlowHost(EventBase, frozen=True, tag="slow-host"):
    """A host's own time per step is `factor` times that of the others."""

    attempt: int
    host: str
    factor: float
    why: str = ""
    since_step: int = -1  # of this attempt; -1: not known


class Detected(EventBase, frozen=True, tag="detected"):
    """A judge has found something; the driver's own judges and those of `phalanx detect` say it in one shape."""

    judge: str
    found: Detection
    incident: int = 0  # number of the report that it belongs to, which may be over; 0: none
    is_told: bool = False  # another event of the same moment tells people, and is what may be acted upon


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
    """A host has started its ranks."""

    attempt: int
    host: str


class StartFailed(EventBase, frozen=True, tag="start-failed"):
    """A host could not, or refused to."""

    attempt: int
    host: str
    problem: str = ""


class Restored(EventBase, frozen=True, tag="restored"):
    """The attempt goes on from a state that was taken after this step of the training; 0: there was none."""

    attempt: int
    step: int


class Running(EventBase, frozen=True, tag="running"):
    """Every rank has made its first step in this attempt; `step`, `is_absolute` as in `Advanced`.

    `imported_s`: after so long the last of them had imported torch, where they are new Pythons; -1: not known.
    """

    attempt: int
    step: int = -1
    is_absolute: bool = False
    imported_s: float = -1.0


class Advanced(EventBase, frozen=True, tag="advanced"):
    """So many steps are done; now and then."""

    attempt: int
    step: int
    # Counted from the beginning of the training, not of this process: so it shows whether an attempt of a script that
    # resumes got further than those before.
    is_absolute: bool = False
    age_s: float = 0.0  # since the newest of them was made; 0: lately


class WorkerFailed(EventBase, frozen=True, tag="worker-failed"):
    """A rank has ended as it should not; not one that was killed by order."""

    attempt: int
    rank: int
    kind: FailureKind
    fault: Fault = "process"  # class, by the rules for logs and `phalanx.launch.rank_failures`
    summary: str = ""
    follows: bool = False  # it only reports that a peer is gone
    step: int = -1  # in which it was, counted as in `Advanced`; -1: before the first, or not known


class LeftEarly(EventBase, frozen=True, tag="left-early"):
    """These ranks, half of all at most, have ended with status 0 at these steps (-1: not known), and others fail."""

    attempt: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...] = ()


class WorkersReturned(EventBase, frozen=True, tag="workers-returned"):
    """Every rank has ended with status 0."""

    attempt: int


class NoProgress(EventBase, frozen=True, tag="no-progress"):
    """No step for longer than the limit; see `phalanx.run.judge.step_limits.Standing`."""

    attempt: int
    age_s: float
    limit_s: float
    # ``stopped``: `ranks` are stopped, dead or silent; ``hang``: nothing of the job moves, which alone blames nobody;
    # ``long``: ranks move, so there is an alert, and nothing is done.
    kind: Literal["moving", "stopped", "hang", "long"] = "hang"
    why: str = ""
    ranks: tuple[int, ...] = ()


class TrafficSilent(EventBase, frozen=True, tag="traffic-silent"):
    """The training interfaces of some hosts carry less than they did, or nothing."""

    attempt: int
    hosts: tuple[str, ...]
    silent_s: float
    is_total: bool = True  # nothing at all
    without_progress: bool = True  # and no step has been made all the time, for longer than such a silence may last


class LossBroken(EventBase, frozen=True, tag="loss-broken"):
    """The loss is not finite any more, and stays so."""

    attempt: int
    step: int
    ranks: tuple[int, ...] = ()  # those with the first broken loss; empty: all have the same
    is_from_start: bool = False  # it is so since the first step of this attempt


class SuspectsNamed(EventBase, frozen=True, tag="suspects-named"):
    """The evidence has been judged."""

    attempt: int
    ranks: tuple[int, ...] = ()  # the suspects; empty: nobody stands out
    why: str = ""
    group: str = ""  # name of the smallest group of ranks that shares the fault, such as ``pipeline 1``; empty: none
    group_ranks: tuple[int, ...] = ()  # its members
    # There is more evidence than that they stand still: they are stopped, dead, silent, or have not begun a collective
    # that the others are in. Only then a host may be blamed.
    is_proven: bool = True
    place: str = ""  # where the ranks are in their code that do not wait for others, to recognise the place
    waits: tuple[str, ...] = ()  # what ranks do, in a few words each, those first that hold up others
    line: str = ""  # what `phalanx detect hang` says of the flight records alone
    by_spans: Detection | None = None  # what it says of the run's own spans; None: nothing, or there are none
    spans_say: str = ""  # the same in a line, and whether that is so by the other evidence


class Stopped(EventBase, frozen=True, tag="stopped"):
    """A host has no process of the attempt left but for `stuck`, which the kernel does not let go."""

    attempt: int
    host: str
    stuck: tuple[int, ...] = ()


# Orders


class StopAsked(EventBase, frozen=True, tag="stop-asked"):
    """A person ends the job."""

    who: str = ""
    # Between SIGTERM and SIGKILL; None: as the policy has it, and asked a second time none.
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
    | Detected
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
