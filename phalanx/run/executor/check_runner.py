"""How an executor looks at its host: checks that the driver asks for, sensors, evidence, and the kernel's log.

Tests of the host that the driver asks for, by number.

How an executor looks at its host: sensors, evidence, checks, and rules for what is written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from phalanx.checks.check_host import cache_folder, this_host
from phalanx.checks.runner import CHECKS, choose, run_checks
from phalanx.core.host import boot_id
from phalanx.run import messages
from phalanx.run.clock import unix_s
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.executor.flight_recorder import Subject, gather, shortened
from phalanx.run.executor.host_sensors import Sensors, choose_interfaces, find_interfaces, interface_of, wanted_by
from phalanx.run.executor.kernel_log import KernelLog
from phalanx.run.executor.reaper import Reaper
from phalanx.run.executor.socket_activity import StillnessWatch
from phalanx.run.executor.workers import Here, Senses
from phalanx.run.judge.log_rules import KERNEL_RANK, Matcher, Watcher, load_rules

_log = logging.getLogger(__name__)

Check = Callable[[str, Sequence[str], Sequence[int]], list[messages.CheckOutcome]]
"""Tests the host: the kind, addresses of peers, and process ids that are the job's own. May block."""


class Checking:
    """Tests once for each number, and answers as often as it is asked.

    Args:
        check: see `Check`.
        tell: is given the answers.
    """

    def __init__(self, check: Check, tell: Callable[[messages.Checked], object]) -> None:
        self._check, self._tell = check, tell
        self._answers: dict[int, messages.Checked] = {}
        self._under_way: set[int] = set()

    async def answer(self, order: messages.Check, own: Sequence[int]) -> None:
        """Test and answer; what is under way already will be answered by that."""
        if order.number in self._under_way:
            return
        if order.number not in self._answers:
            self._under_way.add(order.number)
            try:
                self._answers[order.number] = await self._test(order, own)
            finally:
                self._under_way.discard(order.number)
        self._tell(self._answers[order.number])

    async def _test(self, order: messages.Check, own: Sequence[int]) -> messages.Checked:
        began_s = time.monotonic()
        try:
            outcomes = await asyncio.to_thread(self._check, order.kind, order.peers, own)
        except Exception as error:  # the driver has to hear it, and need not wait for its limit
            _log.exception("the tests of this host have failed")
            reason = f"the tests could not be run: {type(error).__name__}: {error}"[:1000]
            outcomes = [messages.CheckOutcome("executor", "fail", reason)]
        return messages.Checked(order.number, outcomes, time.monotonic() - began_s)


_KERNEL_S = 600.0
"""Of the kernel's log no older lines are evidence."""

_EVIDENCE_BYTES = 900_000
"""Of stacks and flight records together; a message holds 1 MiB."""


@dataclass(frozen=True)
class Means:
    """What senses are made of.

    Attributes:
        reaper: starts the executor's own children.
        kernel: log.
        rules: files of users.
        folder: where the job writes.
        checkpoints: where its checkpoints go, for the checks of storage, disk and space; empty: not known.
        is_only_host: traffic of the loopback interface is that of training.
        skip: names of checks that are left out.
        token: file with what hosts prove to each other, when they measure the network between them.
        peer_port: where this one serves such measurements; 0: nowhere.
    """

    here: Here
    reaper: Reaper
    kernel: KernelLog
    accelerators: Accelerators
    rules: Sequence[Path]
    folder: Path
    checkpoints: str
    is_only_host: bool
    skip: frozenset[str] = frozenset()
    token: Path | None = None
    peer_port: int = 0


def make_senses(means: Means) -> Senses:
    """All of them.

    Raises:
        UserError: a rule file is wrong.
    """
    found = find_interfaces()
    wanted = wanted_by(means.here.environ, [one.name for one in found])
    heartbeats = interface_of(means.here.address)
    chosen = choose_interfaces(found, heartbeats=heartbeats, wanted=wanted, single_host=means.is_only_host)
    _log.info("traffic of training is that of %s: %s", ", ".join(chosen.names) or "no interface", chosen.reason)
    for missing in filter(None, (means.kernel.problem, means.accelerators.absent)):
        _log.info("%s", missing)
    sensors = Sensors(means.folder, chosen.names, means.accelerators)
    reader = Reader(Matcher(load_rules(list(means.rules))))
    return Senses(
        state=sensors.read,
        look=lambda subjects, attempt, within_s: look(means, subjects, attempt, within_s, reader.since_s()),
        check=lambda kind, peers, own: check(means, kind, peers, own),
        findings=reader.findings,
        hello=lambda: hello(means),
        forget=reader.forget,
        stillness=lambda: StillnessWatch(means.accelerators.read, means.reaper.helper),
    )


class Reader:
    """Turns lines into findings; what is only noted stays in the log."""

    def __init__(self, matcher: Matcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._matcher, self._watcher, self._clock = matcher, Watcher(matcher), clock
        self._began_s = -math.inf

    def findings(self, rank: int, lines: Sequence[str]) -> list[messages.Finding]:
        """What rules say of lines of a rank, or of the kernel."""
        now_s = self._clock()
        found = [self._watcher.look(rank, line, now_s) for line in lines]
        return [one for one in found if one is not None and self._counts(one)]

    def forget(self) -> None:
        """A new attempt begins."""
        self._watcher.forget()
        self._began_s = self._clock()

    def since_s(self) -> float:
        """Since when lines of the kernel may be evidence of the attempt."""
        return max(self._began_s, self._clock() - _KERNEL_S)

    def _counts(self, finding: messages.Finding) -> bool:
        return self._matcher.by_name[finding.rule].severity != "note"


def look(means: Means, subjects: Sequence[Subject], attempt: int, within_s: float, since_s: float) -> messages.Evidence:
    """Evidence of ranks, and what the kernel has said since; cut to what a message holds."""
    evidence = gather(
        subjects,
        attempt=attempt,
        within_s=within_s,
        kernel_lines=lambda: means.kernel.since(since_s),
        accelerators=means.accelerators.read,
        start=means.reaper.helper,
    )
    return within(evidence, _EVIDENCE_BYTES)


def within(evidence: messages.Evidence, most_bytes: int) -> messages.Evidence:
    """The same with texts so short that all fit; every rank keeps as much."""
    share = most_bytes // max(2 * len(evidence.ranks), 1)
    replace = msgspec.structs.replace
    ranks = [
        replace(
            one,
            stacks=_head(one.stacks, share),
            flight_record=shortened(one.flight_record, share),
        )
        for one in evidence.ranks
    ]
    return replace(evidence, ranks=ranks, kernel_lines=[_head(line, 400) for line in evidence.kernel_lines[-100:]])


def check(means: Means, kind: str, peers: Sequence[str], own: Sequence[int]) -> list[messages.CheckOutcome]:
    """Test the host with the checks of a set."""
    environ = means.here.environ
    host = this_host(
        environ,
        cache=cache_folder(environ) / means.here.host,
        folder=means.checkpoints,
        makes_folder=True,  # as the script would, with its first checkpoint
        peers=tuple(peers),
        peer_key=means.token,
        is_suspect=True,  # several peers are believed good; with one alone the driver decides which end is bad
        own_pids=frozenset(own),
        unix_s=unix_s,
    )
    chosen = [one for one in choose(CHECKS, kind) if one.name not in means.skip]  # type: ignore[arg-type]
    results = run_checks(chosen, host)
    return [messages.CheckOutcome(**asdict(result)) for result in results]


def hello(means: Means) -> messages.Hello:
    """What the host has."""
    here = means.here
    return messages.Hello(
        version=messages.VERSION,
        host=here.host,
        address=here.address,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        accelerators=means.accelerators.read(),
        rack=here.rack,
        boot_id=boot_id(),
        pid=os.getpid(),
        attempt=0,
        running=[],
        peer_port=means.peer_port,
    )


def follow_kernel(
    kernel: KernelLog, findings: Callable[[int, Sequence[str]], list[messages.Finding]]
) -> list[messages.Finding]:
    """What rules say of what the kernel has written since the last call."""
    return findings(KERNEL_RANK, [record.text for record in kernel.read().records])


def _head(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
