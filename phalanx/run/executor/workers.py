"""The ranks of one attempt on this host: started from the template, watched, and reported when they end."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import psutil

from phalanx.core.errors import UserError
from phalanx.core.progress import Progress, ProgressReader, create_page
from phalanx.detect.hangs.socket_activity import QuietRank, StillnessWatch, quiet_after_s
from phalanx.ipc.processes import dump_beside
from phalanx.launch.cores import local_shares
from phalanx.launch.launch_messages import Exited, Over, Returned
from phalanx.launch.rank_failures import NO_CONSEQUENCE, Failure, failure_of_exit
from phalanx.launch.rendezvous_store import STORE_RANK, store_spec
from phalanx.launch.user_script import Group, Places, Script, rank_specs
from phalanx.launch.warm_template import AttemptReport, Gone, TemplateGoneError, WarmTemplate
from phalanx.run import messages
from phalanx.run.decide.events import LAST_LINE, USAGE
from phalanx.run.executor.flight_recorder import FlightSource, Subject, recorder_variables, source_of
from phalanx.run.logs.log_files import RankLog
from phalanx.run.logs.log_pump import Pump

TEXT_CHARS = 100_000  # of what a rank says at its end; a message holds 1 MiB
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


@dataclass
class _WorkerRank:
    """One rank.

    Attributes:
        outcome: what it reported of its end, before it was gone.
        is_reported: the driver has its end.
        steps_reported: how many of its steps were done at the last heartbeat.
        stopped_since_s: it has been stopped, or dead; None: it runs.
    """

    rank: int
    page: Path
    reader: ProgressReader
    pid: int = 0
    outcome: Failure | Returned | None = None
    is_reported: bool = False
    is_gone: bool = False
    steps_reported: int = 0
    stopped_since_s: float | None = None
    flight: FlightSource | None = None

    @property
    def is_running(self) -> bool:
        return bool(self.pid) and not self.is_gone

    def progress(self, attempt: int) -> Progress | None:
        found = self.reader.read()
        return found if found is not None and found.attempt == attempt else None  # the page outlives attempts

    def busy_s(self, progress: Progress) -> float:
        """Own time of a step: the median since the last call, or that of the last step; -1: not known."""
        times = self.reader.busy_since(progress, self.steps_reported)
        self.steps_reported = progress.steps_here
        return statistics.median_low(times or [progress.busy_ns]) * _NS if progress.busy_ns >= 0 else -1.0


@dataclass
class Workers:
    """Lives as long as its attempt is the present one.

    Args:
        environ: of the ranks, without what `start` adds.
        pages: folder for their progress pages, on a file system in memory where there is one.
        open_log: gives the log of a rank in an attempt.
        report: sends the end of a rank to the driver.
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
    report: Callable[[messages.WorkerEnded], object]
    store: socket.socket | None = None
    stillness: StillnessWatch = field(default_factory=StillnessWatch)
    is_asked: bool = False
    kill_at_s: float = math.inf
    _stopping_since_ns: float = math.inf
    _ranks: dict[int, _WorkerRank] = field(default_factory=dict)
    _cpu: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.start.attempt

    @property
    def is_stopping(self) -> bool:
        """Whether its ranks are being ended."""
        return self._stopping_since_ns < math.inf

    def note_stop(self) -> None:
        """Its ranks are being ended: what comes of that is no failure."""
        self._stopping_since_ns = min(self._stopping_since_ns, time.monotonic_ns())

    @property
    def running(self) -> list[int]:
        """Ranks whose processes are there."""
        return [rank.rank for rank in self._ranks.values() if rank.is_running]

    @property
    def failing(self) -> list[int]:
        """Of those, ranks that have failed, by their own word: they may still write what they have."""
        return [rank.rank for rank in self._ranks.values() if rank.is_running and rank.outcome and rank.outcome.status]

    async def begin(self) -> messages.Started:
        """Start the processes; says how that went."""
        began_s = time.monotonic()
        try:
            pids = await self._spawn()
        except (UserError, TemplateGoneError, OSError) as error:
            for rank in self._ranks.values():
                rank.is_reported = rank.is_gone = True
            problem = sendable(str(error) or type(error).__name__)
            return messages.Started(self.attempt, {}, time.monotonic() - began_s, problem)
        for number, rank in self._ranks.items():
            rank.pid = pids[number]
        ranks = {number: pid for number, pid in pids.items() if number != STORE_RANK}
        return messages.Started(self.attempt, ranks, time.monotonic() - began_s)

    def hear(self, message: AttemptReport) -> None:
        """Take what the template reports of this attempt."""
        if isinstance(message, Over):
            return
        if isinstance(message, Gone):
            for one in self._ranks.values():
                one.is_gone = True
                words = f"ended with the template process, which {message.how}"
                self._report_end(one, -9, Failure(one.rank, time.monotonic_ns(), "signal", 137, words))
            return
        rank = self._ranks.get(message.rank)
        if rank is None:  # the store: where it is gone, ranks say so
            return
        self.pump.take_now(rank.rank)  # its last lines say why
        if isinstance(message, Exited):
            rank.is_gone = True
            lines = self.pump.last_lines(rank.rank)
            if message.code == 0:  # also where it left without a word, or after an exception
                outcome: Failure | Returned = Returned(rank.rank, 0, time_ns=message.time_ns)
            else:
                outcome = rank.outcome or failure_of_exit(rank.rank, message.time_ns, message.code, lines)
            is_own = not message.is_killed and not self.is_asked and -message.code in NO_CONSEQUENCE
            self._report_end(rank, message.code, outcome, is_own)
            return
        rank.outcome = rank.outcome or message
        if message.status != 0 and not self.is_stopping:
            # What it does at its exit takes its time, or for ever where that waits for its peers.
            self._report_end(rank, message.status, rank.outcome)

    @property
    def has_stepped(self) -> bool:
        """Whether each rank here has made a step in this attempt, or is gone."""
        found = (rank.progress(self.attempt) for rank in self._ranks.values() if not rank.is_gone)
        return all(progress is not None and progress.steps_here > 0 for progress in found)

    def states(self) -> list[messages.WorkerState]:
        """What a heartbeat says of them."""
        return [self._state(rank) for rank in self._ranks.values()]

    def subjects(self, ranks: Sequence[int] = ()) -> list[Subject]:
        """Those of `ranks` (none: all) whose processes are there, to be looked at."""
        found = []
        for rank in self._ranks.values():
            if rank.is_running and (not ranks or rank.rank in ranks):
                threads = rank.outcome.threads if isinstance(rank.outcome, Returned) else ()
                kept_by = tuple(sendable(name, _NAME_CHARS) for name in threads[:_MOST_THREADS])
                where = partial(self._where, rank)
                found.append(Subject(rank.rank, rank.pid, dump_beside(rank.page), where, rank.flight, kept_by))
        return found

    def quiet(self) -> list[QuietRank]:
        """Those that have made no step, nor begun another phase, for a while."""
        # Whatever a rank reports of itself costs nothing to look at; only those without news are worth a look in /proc.
        now_ns = time.monotonic_ns()
        found = []
        for rank in self._ranks.values():
            if rank.is_running:
                progress = rank.progress(self.attempt)
                since = _since(progress)
                took_s = 0.0 if progress is None else progress.step_took_ns * _NS
                if not since or (now_ns - max(since)) * _NS > quiet_after_s(took_s):
                    written = self.pump.taken_bytes(rank.rank)
                    found.append(QuietRank(rank.rank, rank.pid, since, written, dump_beside(rank.page)))
        return found

    def hurry(self, grace_s: float) -> None:
        """They are killed after so long (monotonic `kill_at_s`), if not before; never later than was said once."""
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
        start = self.start
        group = Group(
            attempt=start.attempt,
            ranks=start.ranks,
            world_size=start.world_size,
            group_rank=start.group_rank,
            hosts=start.hosts,
            # The host of the store reaches it where it listens: at loopback, if no other host takes part.
            host=start.store_host if self.store is None else self.store.getsockname()[0],
            port=start.store_port,
            restarts=start.restarts,
        )
        environ = {**recorder_variables(self.pages, self.attempt), **self.environ, **start.environment}
        pipes: list[int] = []
        try:
            for number in group.ranks:
                page = self.pages / f"rank-{number}.{self.attempt}"
                create_page(page)
                flight = source_of(environ, number, page.stat().st_mtime)  # dumps have the same clock
                self._ranks[number] = _WorkerRank(number, page, ProgressReader(page), flight=flight)
                ours, theirs = os.pipe()
                pipes.append(theirs)
                self.pump.add(number, ours, self.open_log(number, self.attempt))
            pages = [str(self._ranks[number].page) for number in group.ranks]
            specs = rank_specs(self.script, group, Places(local_shares(len(group.ranks)), pipes, pages), environ)
            if self.store is not None:
                specs.insert(0, store_spec(self.store, group.world_size, environ))
            return await self.template.spawn(self.attempt, specs)
        finally:
            for descriptor in pipes:  # the ranks have them; ours would keep the streams from ending
                os.close(descriptor)
            self._close_store()

    def _report_end(self, rank: _WorkerRank, code: int, outcome: Failure | Returned, is_own: bool = False) -> None:
        """Report a rank's end, once; `is_own`: certainly not because this attempt is being stopped."""
        if rank.is_reported:
            return
        rank.is_reported = True
        # Else a crash during a stop would pass for its consequence, and the cause of a stop too: a rank that raises may
        # first close its groups; peers say that they lost it, and all are stopped before its own word is here.
        by_us = self.is_stopping and not is_own and not self._came_before(outcome)
        step = self._where(rank)[1]
        if isinstance(outcome, Returned):
            code = outcome.status if code == 0 else code
            summary = text = ""
            if code != 0:  # the reason is in its last lines
                lines = [line for line in self.pump.last_lines(rank.rank)[-_LAST_LINES:] if line.strip()]
                about = f"{': ' if code == USAGE else LAST_LINE}{lines[-1].strip()}" if lines else ""
                summary = sendable(f"returned exit status {code}{about}", SUMMARY_CHARS)
                text = sendable("\n".join(lines))
            ended = messages.WorkerEnded(
                self.attempt, rank.rank, code, "returned", summary, text, by_us=by_us, step=step
            )
        else:
            summary, text = sendable(outcome.summary, SUMMARY_CHARS), sendable(outcome.text)
            ended = messages.WorkerEnded(
                self.attempt, rank.rank, code, outcome.kind, summary, text, outcome.follows, by_us, step
            )
        self.report(ended)

    def _came_before(self, outcome: Failure | Returned) -> bool:
        """Whether a rank had failed, by its own word, before the ranks were being ended."""
        if isinstance(outcome, Failure) and (outcome.follows or outcome.kind in ("signal", "status")):
            return False
        return outcome.status != 0 and outcome.time_ns < self._stopping_since_ns

    def _where(self, rank: _WorkerRank) -> tuple[str, int]:
        progress = rank.progress(self.attempt)
        return ("", -1) if progress is None else (progress.phase, progress.step)

    def _state(self, rank: _WorkerRank) -> messages.WorkerState:
        cpu_s, rss_bytes, stopped_s = self._usage(rank)
        progress = rank.progress(self.attempt)
        phase: messages.WorkerPhase = "running" if progress is not None else "starting"
        state = messages.WorkerState(
            rank=rank.rank,
            pid=rank.pid,
            state="ended" if rank.is_gone else "stopping" if self.is_stopping else phase,
            cpu_s=cpu_s,
            rss_bytes=rss_bytes,
            still_s=self.stillness.still_s(rank.rank, _since(progress)),
            stopped_s=stopped_s,
        )
        if progress is None:
            return state
        now_ns = time.monotonic_ns()
        has_stepped = progress.steps_here > 0
        return msgspec.structs.replace(
            state,
            step=progress.step,
            step_age_s=(now_ns - progress.step_ended_ns) * _NS if has_stepped else 0.0,
            last_step_s=max(progress.step_took_ns, 0) * _NS,
            phase=progress.phase,
            phase_age_s=(now_ns - progress.phase_began_ns) * _NS,
            expects_s=progress.expects_ns * _NS,
            busy_s=rank.busy_s(progress),
            loss=0.0 if progress.loss is None else progress.loss,
            broken_step=progress.broken_step,
            steps_here=progress.steps_here,
            is_absolute=progress.is_absolute,
            restored=progress.restored,
            imported_s=progress.imported_ns * _NS if progress.imported_ns >= 0 else -1.0,
            checkpoints=progress.checkpoints,
        )

    def _usage(self, rank: _WorkerRank) -> tuple[float, int, float]:
        """CPU seconds and resident memory of a rank's process, and for how many seconds it has been stopped or dead."""
        with contextlib.suppress(psutil.Error):
            if rank.is_running:
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
    """When a rank's last step ended and its phase began, which differ from pause to pause; empty: not reported yet."""
    return () if progress is None else (progress.step_ended_ns, progress.phase_began_ns)
