"""What the driver and its executors say to each other: one message per WebSocket frame, in MessagePack.

Every message that is about an attempt carries its number. An executor refuses what belongs to a lower attempt than the
highest that it has seen, and the driver ignores it, so that a leftover of an earlier attempt changes nothing.

Times of one host (``_ns``) are of its monotonic clock and are never compared with those of another; ``unix_s`` is for
people.

A heartbeat, with what it says on the whole: a host sums up its few ranks, so that the driver need not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

VERSION = 3
"""Both sides have to speak the same."""

MAX_FRAME_BYTES = 1 << 20

WorkerPhase = Literal["starting", "running", "stopping", "ended"]
Severity = Literal["note", "alarm", "fatal"]
EndKind = Literal["returned", "user", "syntax", "raised", "interrupted", "signal", "status"]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Any of them."""


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
    """One rank, as its executor sees it.

    Attributes:
        step: optimizer steps done, as the run counts them; -1: it has not said so yet.
        step_age_s: since the last of them ended.
        last_step_s: what the last one took.
        phase: what the rank says it is in (``step``, ``evaluate``, ``checkpoint`` …); empty: it says nothing.
        expects_s: for how long from the beginning of the phase the rank has said that no step need be expected.
        busy_s: own time of a step, without waiting in collectives: the median over the steps since the heartbeat
            before, or that of the last step where there are none; negative: not known.
        cpu_s: CPU time of the process so far.
        loss: of the last step; 0 where it is not known, and it may be no number.
        broken_step: the first step of those in a row until now whose loss is not a finite number; -1: that of the
            last one is, or it is not known.
        steps_here: how many steps this process has done.
        is_absolute: `step` counts from the beginning of the training, not of this process.
        restored: step of the state with which this process began; 0: there was none; -1: not known.
        still_s: for how long nothing of it has moved, as `phalanx.run.judge.stack_traces` has it; -1: it makes steps,
        or has
            not been looked at.
        stopped_s: for how long its process has been stopped, or dead and not yet reaped; 0: it runs.
        checkpoints: what storage can keep up with, where it cannot keep up with what is asked for; of rank 0.
    """

    rank: int
    pid: int
    state: WorkerPhase
    step: int = -1
    step_age_s: float = 0.0
    last_step_s: float = 0.0
    phase: str = ""
    phase_age_s: float = 0.0
    expects_s: float = 0.0
    busy_s: float = -1.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    loss: float = 0.0
    broken_step: int = -1
    steps_here: int = 0
    is_absolute: bool = False
    restored: int = -1
    still_s: float = -1.0
    stopped_s: float = 0.0
    checkpoints: str = ""


class Interface(Message, frozen=True):
    """A network interface that training uses: counters of the kernel.

    Attributes:
        errors: of sending and receiving, since the executor began.
        is_up: link state.
        flaps: how often the link has gone down since then.
    """

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
    """A rule has matched a line of a rank's output or of the kernel log (rank -1).

    Attributes:
        fault, severity: of the rule; see `phalanx.run.judge.log_rules`.
    """

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
    """What could be learnt of a rank before it was killed.

    Attributes:
        stacks: of its Python threads; empty: it did not answer, which is evidence too.
        is_silent: it did not answer.
        state: of the process, as in /proc (``R``, ``S``, ``D``, ``T``, ``Z``).
        flight_record: of NCCL, where there is one, as JSON text.
        note: for people: what it waits in, whether it used CPU time, and why something could not be learnt.
        waits_in: function of the kernel; empty: none, or it is not known.
        kept_by: names of the threads that keep its process alive, where its script has ended.
    """

    rank: int
    stacks: str = ""
    is_silent: bool = False
    state: str = ""
    phase: str = ""
    step: int = -1
    cpu_s: float = 0.0
    flight_record: str = ""
    note: str = ""
    waits_in: str = ""
    kept_by: list[str] = []


# From an executor


class Hello(Message, frozen=True, tag="hello"):
    """The first message, after the handshake.

    Attributes:
        address: where workers of other hosts reach this one.
        rack: what it may fail together with; empty: not known.
        attempt: the highest that it has seen; 0: none.
        running: ranks of that attempt that still run here.
        peer_port: where it serves `phalanx.checks.peer_bandwidth`, at that address; 0: nowhere.
    """

    version: int
    host: str
    address: str
    cores: int
    memory_bytes: int
    accelerators: list[Accelerator]
    rack: str
    boot_id: str
    pid: int
    attempt: int
    running: list[int]
    peer_port: int = 0


class Report(Message, frozen=True):
    """What a host has to say, at length; read only by who needs it (`phalanx.run.messages.report_of`)."""

    workers: list[WorkerState]
    host: HostState
    lines: list[LogLine] = []


class Pace(Message, frozen=True):
    """Where all ranks of a host are that make steps, successive ranks with finite losses: one speaks for all.

    Attributes:
        count: of the ranks.
        step, last_step_s: of each; see `WorkerState`.
        step_age_s: the least of them.
        still_s: the least of them; -1: of one it is not known.
    """

    count: int
    step: int
    step_age_s: float
    last_step_s: float
    still_s: float = -1.0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Once a second: a few words that sum up the rest, so that whoever hears ten thousand hosts need not read it.

    Attributes:
        report: a `Report`, not decoded.
        pace: None: the ranks are not alike, or do something else than steps, and have to be looked at one by one.
        rank: the first of the workers; -1: there is none.
        steps_here: the most of any worker.
        busy_s: the longest of the workers; negative: none is known.
        carried_bytes: by the interfaces that training uses, since the executor began; -1: there are none.
        line_count: of the report.
    """

    sequence: int
    unix_s: float
    attempt: int
    report: msgspec.Raw
    pace: Pace | None = None
    rank: int = -1
    steps_here: int = 0
    busy_s: float = -1.0
    carried_bytes: int = -1
    line_count: int = 0


class Prepared(Message, frozen=True, tag="prepared"):
    """The template process is ready to fork; or why not. Sent again when it has learnt something.

    Attributes:
        seconds: from the command to the first of these messages; 0 in later ones.
        learnt: modules that a template may import, for `Prepare.preload` of hosts that have not learnt them.
    """

    seconds: float
    problem: str = ""
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
    """A process of a rank is gone.

    Attributes:
        code: as subprocess has it, negative for a signal.
        kind, summary, text: as `phalanx.launch.rank_failures.Failure` has them; ``returned`` with status 0 is a good
        end.
        follows: it only says that a peer is gone.
        by_us: the executor had killed it.
    """

    attempt: int
    rank: int
    code: int
    kind: EndKind
    summary: str = ""
    text: str = ""
    follows: bool = False
    by_us: bool = False
    step: int = -1


class Stopped(Message, frozen=True, tag="stopped"):
    """No process of the attempt, nor of an earlier one, is left here, but for those that the kernel does not let go.

    Attributes:
        stuck: their process ids.
    """

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
    """What was commanded belongs to a lower attempt, or cannot be done."""

    attempt: int
    what: str
    problem: str


# From the driver


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `Hello`.

    Attributes:
        job: its name.
        attempt: the present one; the executor ends what it has of lower ones.
        heartbeat_s: how often it shall report.
        output_bytes: of lines of ranks that a report may carry.
    """

    version: int
    job: str
    attempt: int
    heartbeat_s: float
    output_bytes: int = 4096


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


class OpenStore(Message, frozen=True, tag="open-store"):
    """Open a listening socket for the rendezvous store of this attempt; rank 0 will serve it."""

    attempt: int


class Start(Message, frozen=True, tag="start"):
    """Start these ranks.

    Attributes:
        ranks: of this host, in order of their local rank.
        group_rank: place of this host among the hosts of the attempt.
        restarts: attempts before this one.
        environment: added to that of `Prepare`.
    """

    attempt: int
    ranks: list[int]
    world_size: int
    group_rank: int
    hosts: int
    store_host: str
    store_port: int
    restarts: int = 0
    environment: dict[str, str] = {}


class Stop(Message, frozen=True, tag="stop"):
    """End all workers of this attempt and of lower ones.

    Attributes:
        grace_s: between SIGTERM and SIGKILL; 0: SIGKILL at once. Said again, the earlier end counts.
    """

    attempt: int
    grace_s: float = 0.0


class Gather(Message, frozen=True, tag="gather"):
    """Gather evidence of these ranks (empty: all) before they are killed."""

    attempt: int
    ranks: list[int] = []
    within_s: float = 2.0


class Check(Message, frozen=True, tag="check"):
    """Test this host.

    Attributes:
        peers: ``host:port`` of hosts to test the network with.
    """

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
    """The report of a heartbeat is none."""


def heartbeat(
    sequence: int,
    unix_s: float,
    attempt: int,
    workers: list[WorkerState],
    host: HostState,
    lines: list[LogLine],
    carried_bytes: int = -1,
) -> Heartbeat:
    """The heartbeat with these parts; see `phalanx.run.messages.Heartbeat`."""
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
    """What it says at length.

    Raises:
        BadReportError: this cannot be read.
    """
    try:
        return _decoder.decode(beat.report)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReportError(str(error)) from error


def pace_of(workers: Sequence[WorkerState]) -> Pace | None:
    """Where they all are; None: nobody can speak for all."""
    if not workers or not _makes_steps(workers[0]):
        return None
    first = workers[0]
    for place, worker in enumerate(workers):
        if worker.rank != first.rank + place or not math.isfinite(worker.loss) or worker.stopped_s > 0:
            return None
        if (worker.step, worker.steps_here, worker.phase) != (first.step, first.steps_here, first.phase):
            return None
        if (worker.state, worker.expects_s, worker.is_absolute) != (first.state, first.expects_s, first.is_absolute):
            return None
    least_s, still_s = (min(ages) for ages in zip(*((w.step_age_s, w.still_s) for w in workers), strict=True))
    return Pace(len(workers), first.step, least_s, first.last_step_s, still_s)


def _makes_steps(worker: WorkerState) -> bool:
    return worker.step >= 0 and worker.state != "ended" and worker.phase in ORDINARY_PHASES and worker.expects_s <= 0
