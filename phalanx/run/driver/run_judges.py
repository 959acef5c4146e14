"""Judges of `phalanx detect` beside a job that goes on: asked at times in another process, and what they find is kept.

- Every few minutes, what the run has recorded (spans, figures, digests, counters of hosts).
- While nothing of the job moves, who waits for whom by its spans, to be held against the driver's own evidence.
- After a failure, the logs of the attempt: which line came first, what class of failure it is, whose it is.
- When a host joins, whether it is a repeat offender by the history of earlier jobs.
- All the time, where a Prometheus server is named, what the metrics of the job's hosts say of them.

Nothing waits for them, and what goes wrong with them is a line in the driver's log. What they advise is told; the
driver acts upon it only where its policy asks for acts of that kind (`phalanx.run.decide.decide`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile

import msgspec

from phalanx.detect.detection import Detection, named
from phalanx.run.clock import read_clocks
from phalanx.run.config import RunConfig
from phalanx.run.decide.actions import NO_HOSTS, NO_PROGRESS, USER_CODE, Action, Finish, OpenIncident
from phalanx.run.decide.events import SuspectsNamed
from phalanx.run.driver import judge_process
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.hosts_at_work import HostsAtWork, beside_work
from phalanx.run.driver.job_hosts import Placement, with_hosts
from phalanx.run.driver.judge_process import Question, Said
from phalanx.run.driver.judgements import beside_spans
from phalanx.run.driver.machine_watch import source_of
from phalanx.run.secrets import scrub_text, without_tokens

_log = logging.getLogger(__name__)

OF_A_RUN = ("corruption", "loss", "stragglers", "drift", "machines")
"""Judges that are asked while a run trains. Whether it hangs the driver finds itself, and logs say why one failed."""

_OF_A_PAUSE = ("hang",)
_QUIET_S = 5.5
_USUAL_STEPS = 3.5
"""Nothing moves for longer than the judge of hangs wants to see, by itself and in usual steps."""

_POLL_S = 1.0
_AGAIN_S = 60.0
_END_S = 10.0
"""At most, for the ranks of an attempt to end: ones that save for longer say nothing more of why it failed."""

_END_POLL_S = 0.05
_LAST_WORD_S = {USER_CODE: 2.0, NO_HOSTS: 6.0, NO_PROGRESS: 6.0}
"""For the logs of a job that has just ended so; of what its own code raised people see the traceback."""

_SURE = 0.5  # below, a verdict on logs says less than the rules of the driver
_MOST_BYTES = 16 << 20
_OF_HISTORY = "offenders"
_WHOSE_HOSTS_ARE_ONE = "local"


@dataclass(frozen=True)
class _Failed:
    """An incident whose logs are to be read, and which host had which rank then."""

    number: int
    attempt: int
    placement: Placement


class RunJudges:
    """Those of one job; to be used on the driver's loop.

    Args:
        run: where the job's training records what it does; may not be there.
        logs: where the ranks' logs are, as far as they can be read here.
    """

    def __init__(self, config: RunConfig, driver: Driver, run: Path, logs: Path) -> None:
        self._config, self._driver, self._run, self._logs = config, driver, run, logs
        self._failed: asyncio.Queue[_Failed] = asyncio.Queue()
        self._offenders: dict[str, Detection] = {}
        self._is_on = config.judges.every_s > 0
        self._by_spans: tuple[int, Detection] | None = None
        self._at_work = HostsAtWork()

    def heard(self, action: Action) -> None:
        """What the driver does: where it opens a report about a failure, its logs are read."""
        state = self._driver.state
        if not (self._is_on and isinstance(action, OpenIncident)):
            return
        if state.recovery is not None and state.recovery.cause == "planned":
            return
        self._failed.put_nowait(_Failed(action.number, action.attempt, self._placement))

    def weighed(self, event: SuspectsNamed) -> SuspectsNamed:
        """The ranks that are named by the evidence that was gathered, with what spans say of the same pause."""
        attempt, found = self._by_spans or (0, None)
        return beside_spans(event, found if attempt == event.attempt else None)

    async def watch(self) -> None:
        """Ask judges again and again, until cancelled."""
        if self._is_on:
            watched = (self._watch_run(), self._watch_pauses(), self._watch_logs(), self._watch_hosts())
            await asyncio.gather(*watched, self._watch_machines())

    async def last_word(self, finish: Finish) -> None:
        """Of a job that has failed, let the logs of the last failure be read, for some seconds at most."""
        if not (self._is_on and finish.status in _LAST_WORD_S):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S[finish.status]):
                await self._failed.join()

    @property
    def _placement(self) -> Placement:
        state = self._driver.state
        return Placement(state.placement, state.job.workers_per_host, state.phase_since_s)

    async def _watch_run(self) -> None:
        while True:
            await asyncio.sleep(self._config.judges.every_s)
            if self._driver.state.phase == "running":
                for judge, found in await self._ask_of_run(OF_A_RUN):
                    self._keep(judge, self._weighed_machines(found) if judge == "machines" else found)

    async def _watch_pauses(self) -> None:
        """Before it is known whether a pause is a hang: once it is, the ranks are ended, and show nothing any more."""
        asked_s = 0.0
        while True:
            await asyncio.sleep(_POLL_S)
            watched = self._driver.attempt
            if self._driver.state.phase != "running" or watched is None:
                continue
            self._at_work.look(self._driver.hosts, self._driver.state.placement, read_clocks().unix_s)
            standing = watched.standing(read_clocks())
            if standing.quiet_s < max(_QUIET_S, _USUAL_STEPS * (standing.usual_s or 0.0)):
                self._by_spans, asked_s = None, 0.0
            elif standing.quiet_s >= 2 * asked_s:
                asked_s = standing.quiet_s
                found = await self._ask_of_run(_OF_A_PAUSE)
                self._by_spans = (watched.attempt, found[0][1]) if found else None

    async def _ask_of_run(self, names: tuple[str, ...]) -> list[tuple[str, Detection]]:
        if not (self._run / "telemetry").is_dir():
            return []
        attempt = self._driver.state.attempt
        question = Question(kind="run", folder=str(self._run), names=names, placement=self._placement)
        found = await self._ask(question)
        return found if attempt == self._driver.state.attempt else []  # else ranks may be elsewhere by now

    async def _watch_logs(self) -> None:
        while True:
            failed = await self._failed.get()
            try:
                await self._until_ended(failed.attempt)
                await self._read_logs(failed)
            finally:
                self._failed.task_done()

    async def _until_ended(self, attempt: int) -> None:
        """Executors say so when the last lines of ranks are in the files: the culprit may write them late."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while (state := self._driver.state).attempt == attempt and state.phase in ("diagnosing", "stopping"):
                    await asyncio.sleep(_END_POLL_S)

    async def _read_logs(self, failed: _Failed) -> None:
        rules = tuple(str(Path(rule).absolute()) for rule in self._config.rules)
        question = Question(kind="logs", folder=str(self._logs), attempt=failed.attempt, rules=rules)
        for judge, found in await self._ask(question):
            if found.confidence >= _SURE:
                self._keep(judge, with_hosts(found, failed.placement.host_of), failed.number)

    async def _watch_hosts(self) -> None:
        judges, job = self._config.judges, self._driver.state.job
        places = tuple(str(Path(place).absolute()) for place in judges.history)
        if not places and self._config.backend != _WHOSE_HOSTS_ARE_ONE:
            places = (str(self._config.run_folder.absolute().parent),)
        if not places:
            return
        hosts, now_unix_s = job.hosts + job.spares, time.time()
        question = Question(kind="offenders", places=places, hosts=hosts, now_unix_s=now_unix_s)
        for _, found in await self._ask(question):
            self._offenders |= {host: found for who in found.who for host in who.hosts}
        while self._offenders:
            for host in self._offenders.keys() & self._driver.state.hosts.keys():
                self._keep(_OF_HISTORY, self._offenders.pop(host))
            await asyncio.sleep(_POLL_S)

    async def _watch_machines(self) -> None:
        """Have them followed while an attempt runs, anew in each: its ranks may be on other hosts."""
        while self._config.judges.prometheus.url:
            await asyncio.sleep(_POLL_S)
            attempt = self._driver.state.attempt
            if self._driver.state.phase == "running":
                following = asyncio.create_task(self._follow_machines())
                try:
                    while (self._driver.state.attempt, self._driver.state.phase) == (attempt, "running"):
                        await asyncio.sleep(_POLL_S)
                finally:
                    following.cancel()
                    await asyncio.wait([following])

    async def _follow_machines(self) -> None:
        """As long as anything can be said; a process that fails is started again."""
        placement, known = self._placement, self._driver.hosts.hosts
        addresses = {host: known[host].hello.address if host in known else "" for host in placement.hosts}
        source = source_of(self._config.judges.prometheus, addresses)

        def heard(said: Said) -> None:
            for found in said.detections:
                self._keep(said.judge, self._weighed_machines(found))
            for why in said.abstains:
                _log.warning("judge of %s: %s", said.judge, scrub_text(why))

        while True:
            try:
                if await _hear(Question(kind="machines", placement=placement, source=source), heard) == 0:
                    return
            except Exception as error:  # as in `_ask`
                _log.warning("judges (machines) could not be asked: %s: %s", type(error).__name__, error)
            await asyncio.sleep(_AGAIN_S)

    def _weighed_machines(self, found: Detection) -> Detection:
        """What metrics say of hosts, given what the driver itself hears of them."""
        watched, clocks = self._driver.attempt, read_clocks()
        if watched is None:
            return found
        return beside_work(
            found,
            self._at_work.of_hosts(
                self._driver.hosts,
                named(found, "hosts"),
                clocks,
                watched.standing(clocks).usual_s,
                found.since.unix_s,
                is_paused=watched.is_paused(clocks),
            ),
        )

    def _keep(self, judge: str, found: Detection, incident: int = 0) -> None:
        try:
            self._driver.keep(judge, found, incident)
        except Exception as error:  # a journal that cannot be written ends the driver by itself
            _log.warning("what the judge of %s found could not be kept: %s", judge, error)

    async def _ask(self, question: Question) -> list[tuple[str, Detection]]:
        """What judges find, up to when they take too long; nothing where they cannot be asked."""
        found: list[tuple[str, Detection]] = []
        limit_s = self._config.judges.limit_s
        try:
            async with asyncio.timeout(limit_s):
                await _hear(question, lambda said: found.extend((said.judge, one) for one in said.detections))
        except TimeoutError:
            _log.warning("judges (%s) took longer than %.0f s and were ended", question.kind, limit_s)
        except Exception as error:  # they are a help, and no part of the job
            _log.warning("judges (%s) could not be asked: %s: %s", question.kind, type(error).__name__, error)
        return found


async def _hear(question: Question, heard: Callable[[Said], None]) -> int:
    """Have what judges find `heard`, as it comes, and how their process ended; it is when nobody waits for it."""
    with TemporaryFile() as asked, TemporaryFile() as complaints:
        asked.write(msgspec.json.encode(question))
        asked.seek(0)
        process = Popen(
            [sys.executable, "-m", judge_process.__name__, str(os.getpid())],
            stdin=asked,
            stdout=PIPE,
            stderr=complaints,
            env=without_tokens({**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}),
            start_new_session=True,  # a Ctrl-C is for the driver to understand
        )
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # No thread of the pool, for which the driver would wait: a process may hang in a file system that is gone.
        threading.Thread(target=_read, args=(process, heard, loop, ended), name="judges", daemon=True).start()
        try:
            await ended.wait()
        finally:
            process.kill()
        if status := process.returncode:
            complaints.seek(0)
            last = complaints.read(_MOST_BYTES).decode(errors="replace").strip().rpartition("\n")[2]
            _log.warning("judges (%s) ended with status %d: %s", question.kind, status, scrub_text(last))
        return status


def _read(
    process: Popen[bytes], heard: Callable[[Said], None], loop: asyncio.AbstractEventLoop, ended: asyncio.Event
) -> None:
    """All that the process says, in a thread."""
    assert process.stdout is not None
    with suppress(RuntimeError):  # the loop is closed, and nobody waits for it
        with process.stdout as lines, suppress(msgspec.DecodeError):  # what is no verdict is its last word
            while line := lines.readline(_MOST_BYTES):
                loop.call_soon_threadsafe(heard, msgspec.json.decode(line, type=Said))
        process.wait()
        loop.call_soon_threadsafe(ended.set)
