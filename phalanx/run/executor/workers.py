"""The ranks of one attempt on this host: started from the template, watched, and reported when they end.

What an executor is made of: its line to the driver, its hold on processes, its host.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from phalanx.core.errors import UserError
from phalanx.core.progress import Progress, ProgressReader, create_page
from phalanx.ipc.processes import dump_beside
from phalanx.launch.cores import local_shares
from phalanx.launch.launch_messages import Exited, Over, Returned
from phalanx.launch.rank_failures import Failure, failure_of_exit
from phalanx.launch.rendezvous_store import STORE_RANK, store_spec
from phalanx.launch.template_process import TemplateGoneError
from phalanx.launch.user_script import Group, Places, Script, rank_specs
from phalanx.launch.warm_template import Gone, WarmTemplate, Word
from phalanx.run import messages
from phalanx.run.decide.events import USAGE
from phalanx.run.executor.flight_recorder import FlightSource, Subject, recorder_variables, source_of
from phalanx.run.executor.reaper import Killed
from phalanx.run.executor.socket_activity import QuietRank, StillnessWatch, quiet_after_s
from phalanx.run.logs.log_files import KEPT_BYTES, SEGMENT_BYTES, RankLog
from phalanx.run.logs.log_pump import Pump
from phalanx.run.wire.codec import KeptMessage


class Line(Protocol):
    """What it needs of `phalanx.run.wire.client.DriverLink`."""

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


_NS = 1e-9
_MOST_THREADS, _NAME_CHARS = 4, 60
_LAST_LINES = 20

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""A debugger that halts a process is none of these: somebody looks at it."""

_NO_CONSEQUENCE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""By these no rank dies just because its peers are being stopped."""


@dataclass
class _Rank:
    """One rank.

    Attributes:
        said: what it said of its end, before it was gone.
        is_told: its end has been told.
        is_over: its process is gone.
        reported: how many of its steps were done at the last heartbeat.
        stopped_since_s: it has been stopped, or dead; None: it runs.
        flight: where its flight recorder's dumps are.
    """

    rank: int
    page: Path
    reader: ProgressReader
    pid: int = 0
    said: Failure | Returned | None = None
    is_told: bool = False
    is_over: bool = False
    reported: int = 0
    stopped_since_s: float | None = None
    flight: FlightSource | None = None

    @property
    def kept_by(self) -> tuple[str, ...]:
        """Names of the threads that keep it alive, where its script has ended."""
        threads = self.said.threads if isinstance(self.said, Returned) else ()
        return tuple(sendable(name, _NAME_CHARS) for name in threads[:_MOST_THREADS])

    def progress(self, attempt: int) -> Progress | None:
        """What it last said of this attempt."""
        found = self.reader.read()
        return found if found is not None and found.attempt == attempt else None

    def busy_s(self, progress: Progress) -> float:
        """Own time of a step: the median since the last call, or that of the last step; -1: not known."""
        times = self.reader.busy_since(progress, self.reported)
        self.reported = progress.steps_here
        return statistics.median_low(times or [progress.busy_ns]) * _NS if progress.busy_ns >= 0 else -1.0


@dataclass
class Workers:
    """Lives as long as its attempt is the present one.

    Args:
        start: what the driver has commanded.
        script: what the ranks run.
        template: that forks them.
        environ: of the ranks, without what `start` adds.
        pages: folder for their progress pages, on a file system in memory where there is one.
        open_log: gives the log of a rank in an attempt.
        pump: takes their output.
        tell: is given what the driver has to know.
        store: the listening socket, where the store of the attempt is on this host; it is closed here.
        stillness: looks at ranks that make no step.
    """

    start: messages.Start
    script: Script
    template: WarmTemplate
    environ: Mapping[str, str]
    pages: Path
    open_log: Callable[[int, int], RankLog]
    pump: Pump
    tell: Callable[[messages.WorkerEnded], object]
    store: socket.socket | None = None
    stillness: StillnessWatch = field(default_factory=StillnessWatch)
    is_stopping: bool = False
    is_asked: bool = False
    kill_at_s: float = math.inf
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _cpu: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.start.attempt

    @property
    def running(self) -> list[int]:
        """Ranks whose processes are there."""
        return [rank.rank for rank in self._ranks.values() if rank.pid and not rank.is_over]

    async def begin(self) -> messages.Started:
        """Start the processes; says how that went."""
        began_s = time.monotonic()
        try:
            pids = await self._spawn()
        except (UserError, TemplateGoneError, OSError) as error:
            for rank in self._ranks.values():
                rank.is_told = rank.is_over = True
            problem = sendable(str(error) or type(error).__name__)
            return messages.Started(self.attempt, {}, time.monotonic() - began_s, problem)
        for number, rank in self._ranks.items():
            rank.pid = pids[number]
        told = {number: pid for number, pid in pids.items() if number != STORE_RANK}
        return messages.Started(self.attempt, told, time.monotonic() - began_s)

    def hear(self, word: Word) -> None:
        """What the template says of this attempt."""
        if isinstance(word, Over):
            return
        if isinstance(word, Gone):
            for one in self._ranks.values():
                self._end(one, -9, _template_gone(one.rank))
            return
        rank = self._ranks.get(word.rank)
        if rank is None:  # the store: where it is gone, ranks say so
            return
        self.pump.take_now(rank.rank)
        if isinstance(word, Exited):
            lines = self.pump.last_lines(rank.rank)
            own = not word.is_killed and not self.is_asked and -word.code in _NO_CONSEQUENCE
            self._end(rank, word.code, rank.said or failure_of_exit(rank.rank, word.time_ns, word.code, lines), own)
            return
        rank.said = rank.said or word
        if word.status != 0 and not self.is_stopping:
            # What it does at its exit takes its time, or for ever where that waits for its peers.
            self._tell_end(rank, word.status, rank.said)

    @property
    def has_stepped(self) -> bool:
        """Whether each rank here has made a step in this attempt, or is gone."""
        found = (rank.progress(self.attempt) for rank in self._ranks.values() if not rank.is_over)
        return all(progress is not None and progress.steps_here > 0 for progress in found)

    def states(self) -> list[messages.WorkerState]:
        """What a heartbeat says of them."""
        return [self._state(rank) for rank in self._ranks.values()]

    def subjects(self, ranks: Sequence[int] = ()) -> list[Subject]:
        """Those of `ranks` (none: all) whose processes are there, to be looked at."""
        wanted = [r for r in self._ranks.values() if r.pid and not r.is_over and (not ranks or r.rank in ranks)]
        return [
            Subject(rank.rank, rank.pid, dump_beside(rank.page), partial(self._where, rank), rank.flight, rank.kept_by)
            for rank in wanted
        ]

    def quiet(self) -> list[QuietRank]:
        """Those that have made no step, nor begun another phase, for a while."""
        now_ns = time.monotonic_ns()
        found = []
        for rank in self._ranks.values():
            if rank.pid and not rank.is_over:
                progress = rank.progress(self.attempt)
                since = _since(progress)
                took_s = 0.0 if progress is None else progress.step_took_ns * _NS
                if not since or (now_ns - max(since)) * _NS > quiet_after_s(took_s):
                    written = self.pump.taken_bytes(rank.rank)
                    found.append(QuietRank(rank.rank, rank.pid, since, written, dump_beside(rank.page)))
        return found

    def hurry(self, grace_s: float) -> None:
        """They are killed after so long (monotonic `kill_at_s`), if not before: nobody is given more time again."""
        self.kill_at_s = min(self.kill_at_s, time.monotonic() + grace_s)

    def close(self) -> None:
        """Let go of pages and store; the processes are gone."""
        for rank in self._ranks.values():
            rank.reader.close()
            rank.page.unlink(missing_ok=True)
            dump_beside(rank.page).unlink(missing_ok=True)
            for left in (rank.flight.file, rank.flight.pipe) if rank.flight is not None else ():
                if left is not None and left.parent == self.pages:  # elsewhere it is the user's
                    left.unlink(missing_ok=True)
        self._close_store()

    async def _spawn(self) -> dict[int, int]:
        group = self._group()
        pipes: dict[int, int] = {}
        try:
            for number in group.ranks:
                self._prepare(number, pipes)
            pages = [str(self._ranks[number].page) for number in group.ranks]
            shares = local_shares(len(group.ranks))
            places = Places(shares, [pipes[number] for number in group.ranks], pages)
            environ = {
                **recorder_variables(self.pages, self.attempt),
                **self.environ,
                **self.start.environment,
            }
            for number in group.ranks:
                rank = self._ranks[number]
                rank.flight = source_of(environ, number, rank.page.stat().st_mtime)  # dumps have the same clock
            specs = rank_specs(self.script, group, places, environ)
            if self.store is not None:
                specs.insert(0, store_spec(self.store, group.world_size, environ))
            return await self.template.spawn(self.attempt, specs)
        finally:
            for descriptor in pipes.values():
                os.close(descriptor)
            self._close_store()

    def _prepare(self, number: int, pipes: dict[int, int]) -> None:
        """A page and a pipe for a rank."""
        page = self.pages / f"rank-{number}.{self.attempt}"
        create_page(page)
        self._ranks[number] = _Rank(number, page, ProgressReader(page))
        ours, pipes[number] = os.pipe()
        self.pump.add(number, ours, self.open_log(number, self.attempt))

    def _group(self) -> Group:
        start = self.start
        host = start.store_host if self.store is None else self.store.getsockname()[0]
        return Group(
            attempt=start.attempt,
            ranks=start.ranks,
            world_size=start.world_size,
            group_rank=start.group_rank,
            hosts=start.hosts,
            host=host,
            port=start.store_port,
            restarts=start.restarts,
        )

    def _end(self, rank: _Rank, code: int, said: Failure | Returned, is_own: bool = False) -> None:
        """The process of a rank is gone; `is_own`: certainly not because this attempt is being stopped."""
        rank.is_over = True
        self._tell_end(rank, code, said, is_own)

    def _tell_end(self, rank: _Rank, code: int, said: Failure | Returned, is_own: bool = False) -> None:
        """Tell of a rank's end, once."""
        if rank.is_told:
            return
        rank.is_told = True
        by_us = self.is_stopping and not is_own
        step = self._where(rank)[1]
        if isinstance(said, Returned):
            code = said.status if code == 0 else code
            words, text = ("", "") if code == 0 else self._of_returned(rank.rank, code)
            ended = messages.WorkerEnded(self.attempt, rank.rank, code, "returned", words, text, by_us=by_us, step=step)
        else:
            summary, text = sendable(said.summary, SUMMARY_CHARS), sendable(said.text)
            ended = messages.WorkerEnded(
                self.attempt, rank.rank, code, said.kind, summary, text, said.follows, by_us, step
            )
        self.tell(ended)

    def _of_returned(self, rank: int, code: int) -> tuple[str, str]:
        """In a line, and at length, why a rank has returned this status: it has said so itself, in its last lines."""
        lines = [line for line in self.pump.last_lines(rank)[-_LAST_LINES:] if line.strip()]
        about = f": {lines[-1].strip()}" if lines and code == USAGE else ""
        return sendable(f"returned exit status {code}{about}", SUMMARY_CHARS), sendable("\n".join(lines))

    def _where(self, rank: _Rank) -> tuple[str, int]:
        progress = rank.progress(self.attempt)
        return ("", -1) if progress is None else (progress.phase, progress.step)

    def _state(self, rank: _Rank) -> messages.WorkerState:
        phase: messages.WorkerPhase = "ended" if rank.is_over else "stopping" if self.is_stopping else "running"
        cpu_s, rss_bytes, stopped_s = self._usage(rank)
        progress = rank.progress(self.attempt)
        still_s = self.stillness.still_s(rank.rank, _since(progress))
        if progress is None:
            return messages.WorkerState(
                rank=rank.rank,
                pid=rank.pid,
                state=phase if rank.is_over or self.is_stopping else "starting",
                cpu_s=cpu_s,
                rss_bytes=rss_bytes,
                still_s=still_s,
                stopped_s=stopped_s,
            )
        now_ns = time.monotonic_ns()
        has_stepped = progress.steps_here > 0
        return messages.WorkerState(
            rank=rank.rank,
            pid=rank.pid,
            state=phase,
            step=progress.step,
            step_age_s=(now_ns - progress.step_ended_ns) * _NS if has_stepped else 0.0,
            last_step_s=max(progress.step_took_ns, 0) * _NS,
            phase=progress.phase,
            phase_age_s=(now_ns - progress.phase_began_ns) * _NS,
            expects_s=progress.expects_ns * _NS,
            busy_s=rank.busy_s(progress),
            cpu_s=cpu_s,
            rss_bytes=rss_bytes,
            loss=0.0 if progress.loss is None else progress.loss,
            broken_step=progress.broken_step,
            steps_here=progress.steps_here,
            is_absolute=progress.is_absolute,
            restored=progress.restored,
            still_s=still_s,
            stopped_s=stopped_s,
            checkpoints=progress.checkpoints,
        )

    def _usage(self, rank: _Rank) -> tuple[float, int, float]:
        """CPU seconds and resident memory of a rank's process, and for how many seconds it has been stopped or dead."""
        if rank.is_over or not rank.pid:
            return 0.0, 0, 0.0
        with contextlib.suppress(psutil.Error):
            process = self._cpu.setdefault(rank.pid, psutil.Process(rank.pid))
            with process.oneshot():
                now_s, is_stopped = time.monotonic(), process.status() in _STOPPED
                rank.stopped_since_s = (rank.stopped_since_s or now_s) if is_stopped else None
                stopped_s = now_s - rank.stopped_since_s if rank.stopped_since_s is not None else 0.0
                times = process.cpu_times()
                return times.user + times.system, process.memory_info().rss, stopped_s
        return 0.0, 0, 0.0

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


def _since(progress: Progress | None) -> tuple[int, ...]:
    """When a rank's last step ended and its phase began: what tells one pause from another; empty: it has not said."""
    return () if progress is None else (progress.step_ended_ns, progress.phase_began_ns)


def _template_gone(rank: int) -> Failure:
    words = "ended with the template process, which was killed"
    return Failure(rank, time.monotonic_ns(), "signal", 137, words)
