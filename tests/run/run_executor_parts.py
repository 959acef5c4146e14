"""An executor whose driver, reaper and monitor of the host are a test's; its template and ranks are real."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from phalanx.detect.hangs.socket_activity import StillnessWatch
from phalanx.launch.warm_template import WarmTemplate
from phalanx.run import messages
from phalanx.run.executor.executor import Executor
from phalanx.run.executor.flight_recorder import Subject
from phalanx.run.executor.host_monitor import HostContext
from phalanx.run.executor.reaper import Killed
from phalanx.run.messages import report_of

GUARD_S = 240.0
M = TypeVar("M")


class Reaper:
    """Holds nothing; counts."""

    def __init__(self) -> None:
        self.contained: list[int] = []
        self.ended = 0

    def contain(self, pid: int) -> None:
        self.contained.append(pid)

    def end_attempt(self, within_s: float) -> Killed:
        self.ended += 1
        return Killed([], [], [], [], 0.0)

    def end_all(self, within_s: float) -> Killed:
        return self.end_attempt(within_s)

    def reap(self) -> None: ...


class Driver:
    """The other end."""

    connected = True

    def __init__(self) -> None:
        self.heard: list[messages.FromExecutor] = []
        self.changed = asyncio.Event()

    def send(self, message: messages.FromExecutor) -> bool:
        self.heard.append(message)
        self.changed.set()
        return True

    async def until(self, kind: type[M], wanted: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind that has not been asked for yet."""
        async with asyncio.timeout(GUARD_S):
            while True:
                for place, message in enumerate(self.heard):
                    if isinstance(message, kind) and wanted(message):
                        del self.heard[place]
                        return message
                self.changed.clear()
                await self.changed.wait()


def gather(subjects: Sequence[Subject], attempt: int, within_s: float) -> messages.Evidence:
    return messages.Evidence(attempt, [messages.RankEvidence(subject.rank, "here") for subject in subjects])


def check(kind: str, peers: Sequence[str], own: Sequence[int]) -> list[messages.CheckOutcome]:
    return [messages.CheckOutcome(kind, "pass", reason=f"{len(peers)} peers, {len(own)} own")]


def findings(rank: int, lines: Sequence[str]) -> list[messages.Finding]:
    return [messages.Finding(rank, "greeting", "unknown", line) for line in lines if "host" in line]


@dataclass(frozen=True)
class Monitor:
    """Plays `phalanx.run.executor.host_monitor.HostMonitor`."""

    state: Callable[[], messages.HostState] = lambda: messages.HostState(0.5, 2, 1, 3)
    gather: Callable[[Sequence[Subject], int, float], messages.Evidence] = gather
    check: Callable[[str, Sequence[str], Sequence[int]], list[messages.CheckOutcome]] = check
    findings: Callable[[int, Sequence[str]], list[messages.Finding]] = findings
    begin_attempt: Callable[[], None] = lambda: None
    stillness: Callable[[], StillnessWatch] = StillnessWatch

    def hello(self) -> messages.Hello:
        return messages.Hello(1, "h", "127.0.0.1", 2, 2, [], "left", "boot", os.getpid(), 0, [])


class WithoutTorch(Executor):
    """Its template imports nothing, for scripts that need nothing: torch takes three seconds."""

    def _make_template(self, prepare: messages.Prepare) -> WarmTemplate:
        return replace(super()._make_template(prepare), preload=(), learnt=prepare.preload)


def make_executor(
    folder: Path,
    script: str,
    monitor: Monitor | None = None,
    clock: Callable[[], float] = time.monotonic,
    address: str = "127.0.0.1",
    hosts: int = 1,
    kind: type[Executor] = Executor,
) -> tuple[Executor, Driver]:
    (folder / "script.py").write_text(script)
    (folder / "own_part.py").write_text("")
    (folder / "pages").mkdir()
    driver = Driver()
    pages, logs = folder / "pages", folder / "logs"
    context = HostContext("h", address, "left", dict(os.environ), pages, logs, driver_lost_s=10.0, hosts=hosts)
    return kind(context, driver, Reaper(), monitor or Monitor(), clock=clock), driver


def workers_of(beat: messages.Heartbeat) -> list[messages.WorkerState]:
    """What a heartbeat says of ranks."""
    return report_of(beat).workers
