"""How an executor looks at its host: sensors, evidence of ranks, tests that the driver asks for, log rules."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from phalanx.checks.check_host import cache_folder, this_host
from phalanx.checks.runner import CHECKS, choose, run_checks
from phalanx.core.host import boot_id
from phalanx.detect.hangs.socket_activity import StillnessWatch
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.run import messages
from phalanx.run.clock import unix_s
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.executor.flight_recorder import Subject, gather, shortened
from phalanx.run.executor.host_sensors import Sensors, choose_interfaces, find_interfaces, interface_of, wanted_by
from phalanx.run.executor.kernel_log import KernelLog
from phalanx.run.executor.reaper import Reaper
from phalanx.run.judge.line_watch import KERNEL_RANK, Watcher
from phalanx.run.logs.log_files import KEPT_BYTES, SEGMENT_BYTES, RankLog

_log = logging.getLogger(__name__)

_KERNEL_S = 600.0  # of the kernel's log no older lines are evidence
_EVIDENCE_BYTES = 900_000  # of stacks and flight records together; a message holds 1 MiB


@dataclass(frozen=True)
class HostContext:
    """What an executor knows of its host and job from its start.

    Attributes:
        environ: of workers; without secrets.
        pages: folder for progress pages, in memory where there is such a file system.

    For the others see `phalanx.run.executor.main.ExecutorSettings`.
    """

    host: str
    address: str
    rack: str
    environ: Mapping[str, str]
    pages: Path
    logs: Path
    segment_bytes: int = SEGMENT_BYTES
    kept_bytes: int = KEPT_BYTES
    driver_lost_s: float = 3600.0
    hosts: int = 0

    def open_log(self, rank: int, attempt: int) -> RankLog:
        """The log of a rank."""
        return RankLog(self.logs, rank, attempt, segment_bytes=self.segment_bytes, kept_bytes=self.kept_bytes)


class HostMonitor:
    """Looks at this host; what may block is called in a thread, which `state`, `findings` and `hello` do not.

    Args:
        reaper: starts the executor's own children.
        folder: where the job writes.
        is_only_host: traffic of the loopback interface is that of training.
        checkpoints: where its checkpoints go, for the checks of storage, disk and space; empty: not known.
        token: file with what hosts prove to each other, when they measure the network between them.
        peer_port: where this one serves such measurements; 0: nowhere.

    Raises:
        UserError: a rule file is wrong.
    """

    def __init__(
        self,
        context: HostContext,
        reaper: Reaper,
        kernel: KernelLog,
        accelerators: Accelerators,
        *,
        rules: Sequence[Path],
        folder: Path,
        is_only_host: bool,
        checkpoints: str,
        skip: frozenset[str],
        token: Path,
        peer_port: int,
    ) -> None:
        self._context, self._reaper, self._kernel, self._accelerators = context, reaper, kernel, accelerators
        self._checkpoints, self._skip, self._token, self._peer_port = checkpoints, skip, token, peer_port
        found = find_interfaces()
        chosen = choose_interfaces(
            found,
            heartbeats=interface_of(context.address),
            wanted=wanted_by(context.environ, [one.name for one in found]),
            single_host=is_only_host,
        )
        _log.info("traffic of training is that of %s: %s", ", ".join(chosen.names) or "no interface", chosen.reason)
        for missing in filter(None, (kernel.problem, accelerators.absent)):
            _log.info("%s", missing)
        self._sensors = Sensors(folder, chosen.names, accelerators)
        self._reader = FindingReader(Matcher(load_rules(rules)))

    def state(self) -> messages.HostState:
        """Of the host; quick."""
        return self._sensors.read()

    def hello(self) -> messages.Hello:
        """What the host has."""
        context = self._context
        return messages.Hello(
            version=messages.VERSION,
            host=context.host,
            address=context.address,
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=psutil.virtual_memory().total,
            accelerators=self._accelerators.read(),
            rack=context.rack,
            boot_id=boot_id(),
            pid=os.getpid(),
            attempt=0,
            running=[],
            peer_port=self._peer_port,
        )

    def gather(self, subjects: Sequence[Subject], attempt: int, within_s: float) -> messages.Evidence:
        """Evidence of ranks, and what the kernel has written since the attempt began; cut to what a message holds."""
        since_s = self._reader.since_s()
        evidence = gather(
            subjects,
            attempt=attempt,
            within_s=within_s,
            kernel_lines=lambda: self._kernel.since(since_s),
            accelerators=self._accelerators.read,
            start=self._reaper.helper,
        )
        return within(evidence, _EVIDENCE_BYTES)

    def check(self, kind: str, peers: Sequence[str], own: Sequence[int]) -> list[messages.CheckOutcome]:
        """Test the host; see `check_host`."""
        return check_host(
            self._context, kind, peers, own, checkpoints=self._checkpoints, skip=self._skip, token=self._token
        )

    def findings(self, rank: int, lines: Sequence[str]) -> list[messages.Finding]:
        """What rules say of lines of a rank."""
        return self._reader.findings(rank, lines)

    def kernel_findings(self) -> list[messages.Finding]:
        """What rules say of what the kernel has written since the last call."""
        return self._reader.findings(KERNEL_RANK, [record.text for record in self._kernel.read().records])

    def begin_attempt(self) -> None:
        """What was found before is not evidence of the new attempt, and may be found again."""
        self._reader.begin_attempt()

    def stillness(self) -> StillnessWatch:
        """To look at the ranks of one attempt that make no step."""
        return StillnessWatch(self._accelerators.read, self._reaper.helper)


class FindingReader:
    """Turns lines into findings; what a rule only notes stays in the log."""

    def __init__(self, matcher: Matcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._matcher, self._watcher, self._clock = matcher, Watcher(matcher), clock
        self._began_s = -math.inf

    def findings(self, rank: int, lines: Sequence[str]) -> list[messages.Finding]:
        """What rules say of lines of a rank, or of the kernel."""
        now_s = self._clock()
        found = [self._watcher.look(rank, line, now_s) for line in lines]
        return [one for one in found if one is not None and self._matcher.by_name[one.rule].severity != "note"]

    def begin_attempt(self) -> None:
        """See `HostMonitor.begin_attempt`."""
        self._watcher.forget()
        self._began_s = self._clock()

    def since_s(self) -> float:
        """Since when lines of the kernel may be evidence of the attempt."""
        return max(self._began_s, self._clock() - _KERNEL_S)


class CheckRunner:
    """Tests once for each number, and answers as often as the driver asks.

    Args:
        check: tests the host: the kind, addresses of peers, and process ids that are the job's own. May block.
        send: sends an answer to the driver.
    """

    def __init__(
        self,
        check: Callable[[str, Sequence[str], Sequence[int]], list[messages.CheckOutcome]],
        send: Callable[[messages.Checked], object],
    ) -> None:
        self._check, self._send = check, send
        self._answers: dict[int, messages.Checked] = {}
        self._under_way: set[int] = set()

    async def answer(self, order: messages.Check, own: Sequence[int]) -> None:
        """Test and answer; a test that is under way already will answer for this order too."""
        if order.number in self._under_way:
            return
        if order.number not in self._answers:
            self._under_way.add(order.number)
            began_s = time.monotonic()
            try:
                outcomes = await asyncio.to_thread(self._check, order.kind, order.peers, own)
            except Exception as error:  # the driver has to hear it, and need not wait for its limit
                _log.exception("the tests of this host have failed")
                reason = f"the tests could not be run: {type(error).__name__}: {error}"[:1000]
                outcomes = [messages.CheckOutcome("executor", "fail", reason)]
            finally:
                self._under_way.discard(order.number)
            self._answers[order.number] = messages.Checked(order.number, outcomes, time.monotonic() - began_s)
        self._send(self._answers[order.number])


def check_host(
    context: HostContext,
    kind: str,
    peers: Sequence[str],
    own: Sequence[int],
    *,
    checkpoints: str = "",
    skip: frozenset[str] = frozenset(),
    token: Path | None = None,
) -> list[messages.CheckOutcome]:
    """Test a host with the checks of a set; see `HostMonitor`."""
    host = this_host(
        context.environ,
        cache=cache_folder(context.environ) / context.host,
        folder=checkpoints,
        makes_folder=True,  # as the script would, with its first checkpoint
        peers=tuple(peers),
        peer_key=token,
        is_suspect=True,  # several peers are believed good; with one alone the driver decides which end is bad
        own_pids=frozenset(own),
        unix_s=unix_s,
    )
    chosen = [one for one in choose(CHECKS, kind) if one.name not in skip]  # type: ignore[arg-type]
    return [messages.CheckOutcome(**asdict(result)) for result in run_checks(chosen, host)]


def within(evidence: messages.Evidence, most_bytes: int) -> messages.Evidence:
    """The same with texts so short that all fit; every rank keeps as much."""

    def head(text: str, most: int) -> str:
        return text if len(text) <= most else f"{text[:most]} …"

    share = most_bytes // max(2 * len(evidence.ranks), 1)
    replace = msgspec.structs.replace
    ranks = [
        replace(one, stacks=head(one.stacks, share), flight_record=shortened(one.flight_record, share))
        for one in evidence.ranks
    ]
    return replace(evidence, ranks=ranks, kernel_lines=[head(line, 400) for line in evidence.kernel_lines[-100:]])
