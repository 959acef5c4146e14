"""What an executor is made of: its line to the driver, its hold on processes, its host. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.run import messages
from phalanx.run.executor.evidence import Subject
from phalanx.run.executor.reaper import Killed
from phalanx.run.executor.stillness import StillnessWatch
from phalanx.run.logs.files import KEPT_BYTES, SEGMENT_BYTES, RankLog
from phalanx.run.wire.codec import KeptMessage


class Line(Protocol):
    """What it needs of `phalanx.run.wire.link.DriverLink`."""

    @property
    def connected(self) -> bool:
        """Whether the driver hears."""
        ...

    def send(self, message: messages.Heartbeat | KeptMessage) -> bool:
        """Send, or keep until it can be sent."""
        ...


class Holder(Protocol):
    """What it needs of `phalanx.run.executor.reaper.Reaper`."""

    def contain(self, pid: int) -> None:
        """Hold a template process."""
        ...

    def end_attempt(self, within_s: float) -> Killed:
        """Kill all but templates and keepers."""
        ...

    def end_all(self, within_s: float) -> Killed:
        """Kill all but keepers."""
        ...

    def reap(self) -> None:
        """Let ended orphans go."""
        ...


@dataclass(frozen=True)
class Here:
    """What an executor knows of its host and job from its start.

    Attributes:
        host: its name.
        address: where workers of other hosts reach it.
        rack: what it may fail together with; empty: not known.
        environ: of workers; without secrets.
        pages: folder for progress pages.
        logs: folder for logs of ranks.
        segment_bytes, kept_bytes: of the log files of a rank: of one, and of all.
        driver_lost_s: how long it stays when nothing of the job runs here and no driver comes.
        hosts: that take part in the job; 0: not known.
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

    @property
    def store_address(self) -> str:
        """Where a rendezvous store listens: where no other host reaches it, unless ranks are on others."""
        return "127.0.0.1" if self.hosts == 1 else self.address

    def open_log(self, rank: int, attempt: int) -> RankLog:
        """The log of a rank."""
        return RankLog(self.logs, rank, attempt, segment_bytes=self.segment_bytes, kept_bytes=self.kept_bytes)


@dataclass(frozen=True)
class Senses:
    """How it looks at its host; each may block, and is called in a thread but for `state`.

    Attributes:
        state: of the host; quick.
        look: evidence of ranks, within so many seconds.
        check: tests the host: the kind, addresses of peers, and process ids that are the job's own.
        findings: what rules say of lines of a rank.
        hello: what the host has.
        forget: a new attempt begins: what was said before is no evidence of it, and may be said again.
        stillness: to look at the ranks of one attempt that make no step.
    """

    state: Callable[[], messages.HostState]
    look: Callable[[Sequence[Subject], int, float], messages.Evidence]
    check: Callable[[str, Sequence[str], Sequence[int]], list[messages.CheckOutcome]]
    findings: Callable[[int, Sequence[str]], list[messages.Finding]]
    hello: Callable[[], messages.Hello]
    forget: Callable[[], None] = lambda: None
    stillness: Callable[[], StillnessWatch] = StillnessWatch


TEXT_CHARS = 100_000
"""Of what a rank says at its end; a message holds 1 MiB."""

SUMMARY_CHARS = 2_000


def sendable(text: str, most: int = TEXT_CHARS) -> str:
    """Text as a message can hold it: cut in the middle, and without halves of characters (as of names of files)."""
    whole = text.encode(errors="replace").decode()
    if len(whole) <= most:
        return whole
    half = most // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half:,} characters are left out …\n{whole[-half:]}"
