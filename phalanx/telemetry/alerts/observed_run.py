"""What is seen of a plain `phalanx train` from outside its ranks: their pages, their processes, its files and disks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.progress import Progress, ProgressReader
from phalanx.ipc.processes import read_process
from phalanx.telemetry.alerts.alert_rules import CheckpointSeen, DiskSeen, EndSeen, RankSeen, Seen
from phalanx.telemetry.alerts.metrics_history import MetricsHistory
from phalanx.telemetry.run_presence import presences

_STOPPED = ("T", "t")


@dataclass(frozen=True)
class WatchedRun:
    """A run that is watched, as plain values.

    Attributes:
        name: for people; folder: of the run.
        pid, started_ticks: the process of rank 0, whose end is the run's; see `phalanx.ipc.processes.Identity`.
        ranks: on this host, from 0 on; world_size: in all.
        total_steps: after which the run is done; 0: not known.
        every_steps, every_s: how often a checkpoint is asked for; 0: not by that.
        checkpoints: their folder on this host; empty: they go elsewhere.
        newest_step: in its figures before this start, -1: there was none; None: not known.
    """

    name: str
    folder: str
    pid: int
    started_ticks: int
    ranks: int = 1
    world_size: int = 1
    total_steps: int = 0
    every_steps: int = 0
    every_s: float = 0.0
    checkpoints: str = ""
    newest_step: int | None = None


class RunWatch:
    """Looks at a run; for one thread.

    Args:
        disk_usage: total and free bytes of the disk that holds a path.
        clock: seconds since 1970; monotonic_ns: as the pages have it.
    """

    def __init__(
        self,
        run: WatchedRun,
        disk_usage: Callable[[str], DiskSeen | None] = lambda path: disk_of(path),
        clock: Callable[[], float] = time.time,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.run = run
        self.history = MetricsHistory(Path(run.folder) / "metrics.jsonl", clock)
        self._disk_usage, self._clock, self._monotonic_ns = disk_usage, clock, monotonic_ns
        self._readers: dict[int, ProgressReader] = {}
        self._since_ns: dict[tuple[int, int, str], int] = {}
        self._began_s = clock()
        self._began_step: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process of rank 0 still runs."""
        found = read_process(self.run.pid)
        return found is not None and found.started_ticks == self.run.started_ticks and found.is_alive

    def look(self, end: EndSeen | None = None) -> Seen:
        """The run now; `end`: how it ended, where it did."""
        self._find_pages()
        pages = {rank: reader.read() for rank, reader in self._readers.items()}
        first = pages.get(0)
        # It says after which step it goes on; one that failed before anybody looked at its page says it no more.
        begin = first.step - first.steps_here if first is not None and first.is_absolute else None
        if self._began_step is None:
            self._began_step = begin
        begin = self.run.newest_step if begin is None else begin
        new = min(self.history.take(begin), len(self.history.steps))
        now_ns = self._monotonic_ns()
        return Seen(
            steps=tuple(self.history.steps),
            new=new,
            stretches=tuple(self.history.stretches),
            step=self._step(first),
            total_steps=self.run.total_steps or None,
            quiet_s=None if first is None else _quiet_s(first, now_ns),
            steps_here=max(first.steps_here if first is not None else 0, self.history.counts["steps"]),
            phase="" if first is None else first.phase,
            expects_s=0.0 if first is None else first.expects_ns * 1e-9,
            loss_broken_at=first.broken_step if first is not None and first.broken_step >= 0 else None,
            ranks=self._ranks(pages, now_ns),
            disks=self._disks(),
            checkpoint=self._checkpoint(),
            end=end,
        )

    def _find_pages(self) -> None:
        """Those of ranks of this host and of this start, as they come; those of ranks that end are kept."""
        if len(self._readers) == self.run.ranks:
            return
        found = presences(Path(self.run.folder), range(self.run.ranks))
        first = next((presence for presence in found if presence.rank == 0), None)
        if first is None or (first.pid, first.started_ticks) != (self.run.pid, self.run.started_ticks):
            return
        for presence in found:
            if presence.page and presence.rank not in self._readers and presence.life() != "elsewhere":
                self._readers[presence.rank] = ProgressReader(presence.page)

    def _step(self, page: Progress | None) -> int | None:
        written = self.history.steps[-1].step if self.history.steps else None
        if page is not None and page.is_absolute:
            return max(page.step, written or 0) if page.steps_here else page.step
        return written

    def _ranks(self, pages: Mapping[int, Progress | None], now_ns: int) -> list[RankSeen]:
        found = []
        since: dict[tuple[int, int, str], int] = {}
        for rank, page in sorted(pages.items()):
            if page is None:
                continue
            process = read_process(page.pid)
            state = process.state if process is not None and process.is_alive else ""
            # Of what runs it does not matter since when it does.
            key = rank, page.pid, state if state in _STOPPED else "runs" if state else ""
            since[key] = self._since_ns.get(key, now_ns)
            out_s = 0.0 if key[2] == "runs" else (now_ns - since[key]) * 1e-9
            found.append(RankSeen(rank, page.pid, state, out_s, page.step, page.phase))
        self._since_ns = since
        return found

    def _disks(self) -> list[DiskSeen]:
        paths = dict.fromkeys(filter(None, (self.run.folder, self.run.checkpoints)))
        return [found for path in paths if (found := self._disk_usage(path)) is not None]

    def _checkpoint(self) -> CheckpointSeen:
        history, run = self.history, self.run
        made = history.counts["checkpoints"] > 0
        step = history.saved_step if made and history.saved_step is not None else self._began_step
        return CheckpointSeen(
            step=step or 0,
            age_s=max(self._clock() - (history.saved_at_s if made else self._began_s), 0.0),
            num_bytes=history.saved_bytes * run.world_size,
            problem=history.problem,
            every_steps=run.every_steps,
            every_s=run.every_s,
        )


def _quiet_s(page: Progress, now_ns: int) -> float:
    """Since a step ended or another phase began."""
    return max(now_ns - max(page.step_ended_ns, page.phase_began_ns), 0) * 1e-9


def disk_of(path: str) -> DiskSeen | None:
    """The disk that holds `path`, as far as this user may fill it; None: it does not answer."""
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        found = os.statvfs(path)
        return DiskSeen(path, found.f_bavail * found.f_frsize, usage.total)
    return None


def newest_written_s(folder: str) -> float | None:
    """When the newest checkpoint in a folder was published, seconds since 1970; None: none lies there."""
    times: list[float] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith("step-"):
                times.append(entry.stat().st_mtime)
    return max(times, default=None)
