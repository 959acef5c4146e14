"""Messages between the driver and its executors: one per WebSocket frame, in MessagePack.

Every message that is about an attempt carries its number. An executor refuses what belongs to a lower attempt than the
highest that it has seen, and the driver ignores it, so that a leftover of an earlier attempt changes nothing.

Ages (``_s``) are used instead of times: clocks of hosts differ; ``unix_s`` is for people.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

VERSION = 4
"""Both sides have to speak the same."""

MAX_FRAME_BYTES = 1 << 20

WorkerPhase = Literal["starting", "running", "stopping", "ended"]
Severity = Literal["note", "alarm", "fatal"]
EndKind = Literal["returned", "user", "syntax", "raised", "interrupted", "signal", "status"]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Common to all messages."""


# Parts


class Accelerator(Message, frozen=True):
    """One device of a host, as far as it can be asked."""

    name: str
    memory_bytes: int
    memory_used_bytes: int = 0
    utilisation: float = -1.0
    temperature_c: float = -1.0
    ecc_uncorrected: int = 0
    throttled: bool = False
    memory_activity: float = -1.0


class WorkerState(Message, frozen=True):
    """One rank, as its executor sees it."""

    rank: int
    pid: int
    state: WorkerPhase
    step: int = -1  # optimizer steps done, as the run counts them; -1: not reported yet
    step_age_s: float = 0.0  # since the last of them ended
    last_step_s: float = 0.0
    phase: str = ""  # as the rank reports it (``step``, ``evaluate``, ``checkpoint`` …); empty: it does not
    phase_age_s: float = 0.0
    expects_s: float = 0.0  # for how long from the beginning of the phase no step need be expected, by the rank
    # Own time of a step, without waiting in collectives: the median over the steps since the heartbeat before, or that
    # of the last step where there are none; negative: not known.
    busy_s: float = -1.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    loss: float = 0.0  # of the last step; 0: not known; it may not be finite
    # The first step of those in a row until now with a loss that is not finite; -1: the last one's is, or it is not
    # known.
    broken_step: int = -1
    steps_here: int = 0  # how many steps this process has done
    is_absolute: bool = False  # `step` counts from the beginning of the training, not of this process
    restored: int = -1  # step of the state with which this process began; 0: there was none; -1: not known
    # For how long nothing of it has moved, by `phalanx.detect.hangs.stack_traces`; -1: it makes steps, or has not been
    # looked at.
    still_s: float = -1.0
    stopped_s: float = 0.0  # for how long its process has been stopped, or dead and not yet reaped; 0: it runs
    imported_s: float = -1.0  # from its start, of a new Python, until it had imported torch; -1: not known
    checkpoints: str = ""  # of rank 0, how often storage keeps up with them, where that is less than asked for


class Interface(Message, frozen=True):
    """A network interface that training uses: counters of the kernel; errors and `flaps` since the executor began."""

    name: str
    sent_bytes: int
    received_bytes: int
    errors: int = 0
    is_up: bool = True
    flaps: int = 0

    @property
    def is_rdma(self) -> bool:
        """It is a port of an RDMA device, whose traffic no socket shows."""
        return "/" in self.name


class HostState(Message, frozen=True):
    """A host, as its executor sees it."""

    cpu_load: float
    memory_bytes: int
    memory_free_bytes: int
    disk_free_bytes: int
    interfaces: list[Interface] = []
    accelerators: list[Accelerator] = []


class LogLine(Message, frozen=True):
    """A line that a rank wrote."""

    rank: int
    text: str


class Finding(Message, frozen=True):
    """A rule (`phalanx.detect.logs.log_rules`) has matched a line of a rank's output or of the kernel log (rank -1)."""

    rank: int
    rule: str
    fault: str
    line: str
    severity: Severity = "alarm"


class CheckOutcome(Message, frozen=True):
    """What one check of a host found; see `phalanx.checks`."""

    name: str
    outcome: Literal["pass", "fail", "skip"]
    reason: str = ""
    value: float | None = None
    unit: str = ""
    threshold: float | None = None
    threshold_source: str = ""
    action: str = ""
    bad_peers: dict[str, str] = {}
    peer_rates: dict[str, float] = {}


class RankEvidence(Message, frozen=True):
    """What could be learnt of a rank before it was killed."""

    rank: int
    stacks: str = ""  # of its Python threads; empty where it `is_silent`, which is evidence too
    is_silent: bool = False
    state: str = ""  # of the process, as in /proc (``R``, ``S``, ``D``, ``T``, ``Z``)
    phase: str = ""
    step: int = -1
    cpu_s: float = 0.0
    flight_record: str = ""  # of NCCL, where there is one, as JSON text
    note: str = ""  # for people: what it waits in, whether it used CPU time, and why something could not be learnt
    waits_in: str = ""  # function of the kernel; empty: none, or not known
    kept_by: list[str] = []  # names of the threads that keep its process alive, where its script has ended


# From an executor


class Hello(Message, frozen=True, tag="hello"):
    """The first message, after the handshake."""

    version: int
    host: str
    address: str  # where workers of other hosts reach this one
    cores: int
    memory_bytes: int
    accelerators: list[Accelerator]
    rack: str  # what it may fail together with; empty: not known
    boot_id: str
    pid: int
    attempt: int  # the highest that it has seen; 0: none
    running: list[int]  # ranks of that attempt that still run here
    peer_port: int = 0  # where it serves `phalanx.checks.peer_bandwidth`, at that address; 0: nowhere


class Report(Message, frozen=True):
    """The state of a host and its ranks, at length; decoded only when it is needed (`report_of`)."""

    workers: list[WorkerState]
    host: HostState
    lines: list[LogLine] = []


class Pace(Message, frozen=True):
    """Where all ranks of a host are that make steps, successive ranks with finite losses: one speaks for all."""

    count: int
    step: int  # `step`, `last_step_s`: of each; see `WorkerState`
    step_age_s: float  # `step_age_s`, `still_s`: the least of them
    last_step_s: float
    still_s: float = -1.0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Once a second: a few fields that sum up the rest, so that a driver of ten thousand hosts need not decode it."""

    sequence: int
    unix_s: float
    attempt: int
    report: msgspec.Raw  # a `Report`, not decoded
    # None: the ranks are not alike, or do something else than steps, and have to be looked at one by one.
    pace: Pace | None = None
    rank: int = -1  # the first of the workers; -1: none
    steps_here: int = 0  # `steps_here`, `busy_s`: the most of any worker; -1: not known
    busy_s: float = -1.0
    carried_bytes: int = -1  # by the interfaces that training uses, since the executor began; -1: there are none
    line_count: int = 0


class Prepared(Message, frozen=True, tag="prepared"):
    """The template process is ready to fork; or why not. Sent again when it has learnt something."""

    seconds: float  # from the command to the first of these messages; 0 in later ones
    problem: str = ""
    # Modules that a template may import, for `Prepare.preload` of hosts that have not learnt them.
    learnt: list[str] = []


class StoreOpened(Message, frozen=True, tag="store-opened"):
    """A rendezvous store listens for this attempt."""

    attempt: int
    port: int
    problem: str = ""


class Started(Message, frozen=True, tag="started"):
    """The workers of an attempt have been started; or why not."""

    attempt: int
    pids: dict[int, int]
    seconds: float = 0.0
    problem: str = ""


class WorkerEnded(Message, frozen=True, tag="worker-ended"):
    """A process of a rank is gone."""

    attempt: int
    rank: int
    code: int  # as in subprocess, negative for a signal
    # `kind`, `summary`, `text`: as in `phalanx.launch.rank_failures.Failure`; ``returned`` with status 0 is a good end.
    kind: EndKind
    summary: str = ""
    text: str = ""
    follows: bool = False  # it only reports that a peer is gone
    by_us: bool = False  # the executor had killed it
    step: int = -1


class Stopped(Message, frozen=True, tag="stopped"):
    """No process of the attempt, nor of an earlier one, is left here, but for `stuck`: the kernel does not let go."""

    attempt: int
    seconds: float
    stuck: list[int] = []


class Evidence(Message, frozen=True, tag="evidence"):
    """The answer to `Gather`."""

    attempt: int
    ranks: list[RankEvidence]
    kernel_lines: list[str] = []
    accelerators: list[Accelerator] = []
    seconds: float = 0.0


class Found(Message, frozen=True, tag="found"):
    """Log rules have matched."""

    attempt: int
    findings: list[Finding]


class Checked(Message, frozen=True, tag="checked"):
    """The answer to `Check`."""

    number: int
    outcomes: list[CheckOutcome]
    seconds: float = 0.0


class Refused(Message, frozen=True, tag="refused"):
    """A command belongs to a lower attempt, or cannot be carried out."""

    attempt: int
    what: str
    problem: str


# From the driver


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `Hello`."""

    version: int
    job: str
    attempt: int  # the present one; the executor ends what it has of lower ones
    heartbeat_s: float
    output_bytes: int = 4096  # of lines of ranks that a report may carry


class Acknowledged(Message, frozen=True, tag="acknowledged"):
    """A heartbeat was heard."""

    sequence: int


class Prepare(Message, frozen=True, tag="prepare"):
    """Start a template process for this script, and have it import what the script will need."""

    script: list[str]
    is_module: bool
    folder: str
    environment: dict[str, str]
    preload: list[str] = []
    is_warm: bool = True  # ranks are forked from it; else each is a fresh interpreter


class OpenStore(Message, frozen=True, tag="open-store"):
    """Open a listening socket for the rendezvous store of this attempt; rank 0 will serve it."""

    attempt: int


class Start(Message, frozen=True, tag="start"):
    """Start these ranks."""

    attempt: int
    ranks: list[int]  # of this host, in order of their local rank
    world_size: int
    group_rank: int  # place of this host among the hosts of the attempt
    hosts: int
    store_host: str
    store_port: int
    restarts: int = 0  # attempts before this one
    environment: dict[str, str] = {}  # added to that of `Prepare`


class Stop(Message, frozen=True, tag="stop"):
    """End all workers of this attempt and of lower ones."""

    attempt: int
    # Between SIGTERM and SIGKILL; 0: SIGKILL at once. Of two such messages the earlier end counts.
    grace_s: float = 0.0


class Gather(Message, frozen=True, tag="gather"):
    """Gather evidence of these ranks (empty: all) before they are killed."""

    attempt: int
    ranks: list[int] = []
    within_s: float = 2.0


class Check(Message, frozen=True, tag="check"):
    """Test this host, and its network with `peers` (``host:port``)."""

    number: int
    kind: Literal["passive", "quick", "full"]
    peers: list[str] = []


class End(Message, frozen=True, tag="end"):
    """The job is over, or this host is no longer part of it: end all, and leave with this status."""

    reason: str
    status: int = 0


FromExecutor = (
    Hello | Heartbeat | Prepared | StoreOpened | Started | WorkerEnded | Stopped | Evidence | Found | Checked | Refused
)
FromDriver = Welcome | Acknowledged | Prepare | OpenStore | Start | Stop | Gather | Check | End


ORDINARY_PHASES = frozenset({"", "step", "train"})
"""In these a rank makes steps."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Report)


class BadReportError(ValueError):
    """The report of a heartbeat cannot be read."""


def heartbeat(
    sequence: int,
    unix_s: float,
    attempt: int,
    workers: list[WorkerState],
    host: HostState,
    lines: list[LogLine],
    carried_bytes: int = -1,
) -> Heartbeat:
    """The heartbeat with these parts."""
    return Heartbeat(
        sequence,
        unix_s,
        attempt,
        msgspec.Raw(_encode(Report(workers, host, lines))),
        pace_of(workers),
        workers[0].rank if workers else -1,
        max((worker.steps_here for worker in workers), default=0),
        max((worker.busy_s for worker in workers), default=-1.0),
        carried_bytes,
        len(lines),
    )


def report_of(beat: Heartbeat) -> Report:
    """The report within a heartbeat; raises BadReportError."""
    try:
        return _decoder.decode(beat.report)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReportError(str(error)) from error


def pace_of(workers: Sequence[WorkerState]) -> Pace | None:
    """Where they all are; None: they are not alike."""
    if not workers:
        return None
    first = workers[0]
    if first.step < 0 or first.state == "ended" or first.phase not in ORDINARY_PHASES or first.expects_s > 0:
        return None
    for place, worker in enumerate(workers):
        if worker.rank != first.rank + place or not math.isfinite(worker.loss) or worker.stopped_s > 0:
            return None
        if (worker.step, worker.steps_here, worker.phase) != (first.step, first.steps_here, first.phase):
            return None
        if (worker.state, worker.expects_s, worker.is_absolute) != (first.state, first.expects_s, first.is_absolute):
            return None
    least_s, still_s = (min(ages) for ages in zip(*((w.step_age_s, w.still_s) for w in workers), strict=True))
    return Pace(len(workers), first.step, least_s, first.last_step_s, still_s)
