"""The executor: does on its host what the driver commands, and reports. It decides nothing.

An executor that nobody wants any more: no driver comes, and nothing of the job runs on its host.

It knows attempts by their numbers and refuses what belongs to a lower one than it has seen. Every answer can be given
again: a driver that was started again asks again. Commands that start or end processes are carried out one after the
other; looks at ranks and tests of the host go on beside them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.ipc.codec import TooLargeError
from phalanx.launch.rendezvous_store import open_store_socket
from phalanx.launch.user_script import Script
from phalanx.launch.warm_template import LEARNT, WarmTemplate, Word, open_cache
from phalanx.run import messages
from phalanx.run.executor.check_runner import Checking
from phalanx.run.executor.host_sensors import Carried
from phalanx.run.executor.socket_activity import QuietRank, StillnessWatch
from phalanx.run.executor.workers import Here, Holder, Line, Senses, Workers, sendable
from phalanx.run.judge.stack_traces import LOOK_S
from phalanx.run.logs.log_lines import Tails
from phalanx.run.logs.log_pump import Pump
from phalanx.run.messages import heartbeat


class Alone:
    """For how long an executor has had neither a driver nor workers.

    Args:
        limit_s: how long it waits for a driver.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since_s = clock()

    def is_over(self, *, has_driver: bool, has_workers: bool) -> bool:
        """Whether it has waited long enough; to be asked now and then."""
        now_s = self._clock()
        if has_driver or has_workers:
            self._since_s = now_s
        return now_s - self._since_s >= self._limit_s


_log = logging.getLogger(__name__)

_FIRST_STEP_S = 0.05
"""How often ranks that have made no step yet are looked at."""

KILL_S = 10.0
"""How long the end of killed processes is waited for; one that takes longer is stuck in the kernel."""


@dataclass
class _Store:
    """The rendezvous store of an attempt; the socket is handed to `Workers`."""

    attempt: int
    port: int
    listener: socket.socket | None


@dataclass
class Executor:
    """One per host and job, on the main thread's event loop.

    Args:
        here: host and job.
        line: to the driver.
        holder: of processes.
        senses: for the host.
        unix_s: time for people.
        clock: seconds, monotonic; by which a lost driver is waited for.

    Attributes:
        ended: set when this executor shall leave, with the status to leave with in `status`.
    """

    here: Here
    line: Line
    holder: Holder
    senses: Senses
    unix_s: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    attempt: int = 0
    workers: Workers | None = None
    _template: WarmTemplate | None = None
    _former: list[WarmTemplate] = field(default_factory=list)
    _prepared: messages.Prepare | None = None
    _store: _Store | None = None
    _started: messages.Started | None = None
    _pump: Pump | None = None
    _tails: Tails = field(default_factory=Tails)
    _carried: Carried = field(default_factory=Carried)
    _heartbeat_s: float = 1.0
    _sequence: int = 0
    _rdma_carried: Carried = field(default_factory=Carried)
    _rdma_bytes: int = 0
    _is_looking: bool = False
    _looked_s: float = -math.inf

    def __post_init__(self) -> None:
        self._commands: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._beside: set[asyncio.Task[None]] = set()
        self._halted = asyncio.Event()
        self._checking = Checking(self.senses.check, self.line.send)
        self._alone = Alone(self.here.driver_lost_s, self.clock)
        self._host: messages.HostState | None = None
        self._tails.on_full = self._send_lines

    # What the driver says

    def hello(self) -> messages.Hello:
        """How it introduces itself now."""
        workers = self.workers
        running = workers.running if workers is not None and workers.attempt == self.attempt else []
        return msgspec.structs.replace(self.senses.hello(), attempt=self.attempt, running=running)

    def hear(self, message: messages.FromDriver) -> None:
        """Take a command; it is carried out later."""
        match message:
            case messages.Welcome():
                self._heartbeat_s = message.heartbeat_s
                self._tails.heartbeat_bytes = message.output_bytes
                self._leave_behind(message.attempt)
            case messages.Prepare():
                self._commands.put_nowait(lambda: self._prepare(message))
            case messages.OpenStore():
                self._queue(message.attempt, "open-store", lambda: self._open_store(message))
            case messages.Start():
                self._halted.clear()
                self._queue(message.attempt, "start", lambda: self._start(message))
            case messages.Stop():
                if self.workers is not None and self.workers.attempt <= message.attempt:
                    self.workers.is_stopping = True  # from now on, whoever ends is no failure
                    self.workers.hurry(message.grace_s)  # also where an earlier stop is still waiting for them
                if message.attempt >= self.attempt:
                    self._halted.set()
                self._queue(message.attempt, "stop", lambda: self._stop(message))
            case messages.Gather():
                self._do_beside(self._gather(message))
            case messages.Check():
                self._do_beside(self._checking.answer(message, self._own_pids()))
            case messages.End():
                self._halted.set()
                self._commands.put_nowait(lambda: self._end(message))

    async def run(self) -> int:
        """Carry out commands and report until the driver ends it; its exit status."""
        beating = asyncio.create_task(self._beat_on())
        try:
            while not self.ended.is_set():
                command = await self._commands.get()
                try:
                    await command()
                except Exception:  # one command must not take the others down, nor leave the host alone
                    _log.exception("a command could not be carried out")
        finally:
            beating.cancel()
            for task in self._beside:
                task.cancel()
            await self.close()
        return self.status

    async def close(self) -> None:
        """End all processes of the job here, but for keepers."""
        await self._end_workers(0.0)
        if self._template is not None:
            await self._template.close()
            self._template = None
        await asyncio.to_thread(self.holder.end_all, KILL_S)
        self._close_store()

    # Commands

    def _queue(self, attempt: int, what: str, command: Callable[[], Awaitable[None]]) -> None:
        if attempt < self.attempt:
            problem = f"attempt {self.attempt} has begun"
            self.line.send(messages.Refused(attempt, what, problem))
            return
        self.attempt = attempt
        self._commands.put_nowait(command)

    def _leave_behind(self, attempt: int) -> None:
        """The driver is at this attempt: what is left of lower ones ends, the attempt itself goes on."""
        self.attempt = max(self.attempt, attempt)
        if self.workers is not None and self.workers.attempt < attempt:
            self.workers.is_stopping = True
        self._commands.put_nowait(lambda: self._end_lower(attempt))

    async def _end_lower(self, attempt: int) -> None:
        if self.workers is not None and self.workers.attempt < attempt:
            _log.info("attempt %d has begun: what is left of attempt %d ends", attempt, self.workers.attempt)
            await self._end_workers(0.0)
        if self._store is not None and self._store.attempt < attempt:
            self._close_store()

    async def _prepare(self, prepare: messages.Prepare) -> None:
        """Start a template for the script; what runs goes on, with the template that it has."""
        before, self._prepared = self._prepared, prepare
        template = self._template
        if template is not None and before is not None and _same_script(prepare, before):
            template.learn(prepare.preload)
        else:
            await self._let_template_go()
            template = self._template = self._make_template(prepare)
            template.start()
        self._do_beside(self._tell_prepared(template))

    def _make_template(self, prepare: messages.Prepare) -> WarmTemplate:
        name, *arguments = prepare.script
        script = Script(name, tuple(arguments), prepare.is_module, prepare.folder)
        environ = {**self.here.environ, **prepare.environment, "PHALANX_HOST": self.here.host}
        return WarmTemplate(
            script,
            environ,
            self._hear_template,
            learnt=(*LEARNT, *(name for name in prepare.preload if name not in LEARNT)),
            has_learnt=lambda learnt: self._tell_learnt(messages.Prepared(0.0, "", list(learnt))),
            started=self.holder.contain,
            cache=open_cache(script, environ),
        )

    async def _let_template_go(self) -> None:
        """It ends now, or with the workers that it has."""
        if self._template is not None and self.workers is not None:
            self._former.append(self._template)
        elif self._template is not None:
            await self._template.close()
        self._template = None

    async def _tell_prepared(self, template: WarmTemplate) -> None:
        began_s = time.monotonic()
        problem = ""
        try:
            await template.ready()
        except Exception as error:  # whatever it is, the driver has to hear it
            problem = sendable(str(error) or type(error).__name__)
        self._tell_learnt(messages.Prepared(time.monotonic() - began_s, problem, list(template.learnt)))

    def _tell_learnt(self, prepared: messages.Prepared) -> None:
        try:
            self.line.send(prepared)
        except TooLargeError:  # only a help for other hosts
            self.line.send(msgspec.structs.replace(prepared, learnt=[]))

    async def _open_store(self, order: messages.OpenStore) -> None:
        store = self._store
        if store is None or store.attempt != order.attempt:
            self._close_store()
            try:
                listener = open_store_socket(self.here.store_address)
            except (OSError, ValueError) as error:
                problem = f"the store cannot listen at {self.here.store_address}: {error}"
                self.line.send(messages.StoreOpened(order.attempt, 0, problem))
                return
            store = self._store = _Store(order.attempt, listener.getsockname()[1], listener)
        self.line.send(messages.StoreOpened(order.attempt, store.port))

    async def _start(self, start: messages.Start) -> None:
        if self._started is not None and self._started.attempt == start.attempt:
            self.line.send(self._started)
            return
        await self._end_workers(0.0)
        if self._template is None or self._prepared is None:
            self._tell_started(messages.Started(start.attempt, {}, 0.0, "no script has been prepared here"))
            return
        if not await self._is_ready(self._template):
            return
        try:
            self.workers = self._make_workers(start, self._template)
            started = await self.workers.begin()
        except Exception as error:  # whatever it is, the driver has to hear it, and need not wait for its limit
            _log.exception("attempt %d could not be started", start.attempt)
            started = messages.Started(start.attempt, {}, 0.0, sendable(f"{type(error).__name__}: {error}"))
        self._tell_started(started)
        if self.workers is not None and not started.problem:
            self._do_beside(self._tell_first_step(self.workers))

    async def _is_ready(self, template: WarmTemplate) -> bool:
        """Wait until an attempt can be started; False: it is to be stopped by then, which must not wait for that."""
        ready = asyncio.ensure_future(template.ready())
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # what is wrong is told at the start
        halted = asyncio.ensure_future(self._halted.wait())
        await asyncio.wait([ready, halted], return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        return ready.done()

    def _make_workers(self, start: messages.Start, template: WarmTemplate) -> Workers:
        self._tails.forget()
        self.senses.forget()
        self._pump = Pump(self._tails, self._on_lines, self.unix_s)
        listener = None
        if self._store is not None and self._store.attempt == start.attempt and start.group_rank == 0:
            listener, self._store.listener = self._store.listener, None
        here = self.here
        environ = template.environ
        return Workers(
            start,
            template.script,
            template,
            environ,
            here.pages,
            here.open_log,
            self._pump,
            self._tell_end,
            listener,
            self.senses.stillness(),
        )

    def _tell_started(self, started: messages.Started) -> None:
        self._started = started
        self.line.send(started)

    async def _stop(self, stop: messages.Stop) -> None:
        began_s = time.monotonic()
        stuck = await self._end_workers(stop.grace_s)
        self.line.send(messages.Stopped(stop.attempt, time.monotonic() - began_s, stuck))

    async def _end(self, end: messages.End) -> None:
        _log.info("this executor ends: %s", end.reason)
        self.status = end.status
        self.ended.set()

    # Processes

    async def _end_workers(self, grace_s: float) -> list[int]:
        """End the present attempt here; what the kernel does not let go of."""
        workers = self.workers
        if workers is not None:
            workers.is_stopping = True
            if grace_s > 0:
                workers.hurry(grace_s)
                await self._ask_to_end(workers)
            await self._kill(workers)
        killed = await asyncio.to_thread(self.holder.end_attempt, KILL_S)
        if self._pump is not None:
            await self._pump.close()  # their streams are at their end
            self._pump = None
        self._send_lines()
        if workers is not None:
            workers.close()
            self.workers = None
        await asyncio.gather(*(template.close() for template in self._former))
        self._former.clear()
        return killed.stuck

    async def _ask_to_end(self, workers: Workers) -> None:
        workers.is_asked = True
        workers.template.signal(workers.attempt, workers.running, signal.SIGTERM)
        while workers.running and time.monotonic() < workers.kill_at_s:
            await asyncio.sleep(0.02)

    async def _kill(self, workers: Workers) -> None:
        try:
            await asyncio.wait_for(workers.template.kill(workers.attempt), KILL_S)
        except TimeoutError:
            _log.warning("processes of attempt %d do not end", workers.attempt)

    def _hear_template(self, attempt: int, word: Word) -> None:
        if self.workers is not None and self.workers.attempt == attempt:
            self.workers.hear(word)

    def _close_store(self) -> None:
        if self._store is not None and self._store.listener is not None:
            self._store.listener.close()
        self._store = None

    # Reports

    async def _beat_on(self) -> None:
        while True:
            try:
                self._host = self.senses.state()
                self._send_beat(self._host)
                self.holder.reap()
                self._look_at_quiet_ranks()
                self._look_for_driver()
            except Exception:
                _log.exception("a heartbeat could not be sent")
            await asyncio.sleep(self._heartbeat_s)

    def _look_at_quiet_ranks(self) -> None:
        """Every few seconds, beside everything else: it takes a while where many ranks make no step."""
        workers, now_s = self.workers, self.clock()
        if workers is None or workers.is_stopping or self._is_looking or now_s - self._looked_s < LOOK_S:
            return
        quiet = workers.quiet()
        if quiet:
            self._is_looking, self._looked_s = True, now_s
            self._do_beside(self._look_at(workers.stillness, quiet))

    async def _look_at(self, stillness: StillnessWatch, quiet: Sequence[QuietRank]) -> None:
        try:
            await asyncio.to_thread(stillness.look, quiet, self._rdma_bytes)
        finally:
            self._is_looking = False

    async def _tell_first_step(self, workers: Workers) -> None:
        """A start, and so a recovery, is over when every rank has made a step: that is told before its turn."""
        while self.workers is workers and not workers.is_stopping and not workers.has_stepped:
            await asyncio.sleep(_FIRST_STEP_S)
        if self.workers is workers and not workers.is_stopping:
            self._send_beat(self.senses.state())

    def _look_for_driver(self) -> None:
        """Without workers nobody needs this executor but a driver; nothing is left for ever."""
        has_workers = self.workers is not None and bool(self.workers.running)
        if self._alone.is_over(has_driver=self.line.connected, has_workers=has_workers) and not self.ended.is_set():
            self.hear(messages.End(f"no driver has come for {self.here.driver_lost_s:g} s, and nothing runs here", 1))

    def _send_beat(self, host: messages.HostState) -> None:
        self._sequence += 1
        workers = self.workers
        states = [] if workers is None else workers.states()
        attempt = self.attempt if workers is None else workers.attempt
        carried_bytes = self._carried.add(host.interfaces)
        self._rdma_bytes = self._rdma_carried.add([one for one in host.interfaces if one.is_rdma])
        lines = self._tails.newest()
        beat = heartbeat(self._sequence, self.unix_s(), attempt, states, host, lines, carried_bytes)
        if self.line.send(beat):
            self._tails.sent()

    def _send_lines(self) -> None:
        """What ranks have written, before its turn; of the host nothing new is said."""
        if self._host is not None and not self._tails.is_empty:
            self._send_beat(self._host)

    def _tell_end(self, ended: messages.WorkerEnded) -> None:
        """That a rank has ended, after all that it has written."""
        self._send_lines()
        self.line.send(ended)

    def _on_lines(self, rank: int, lines: Sequence[str]) -> None:
        found = self.senses.findings(rank, lines)
        if found and self.workers is not None:
            self.line.send(messages.Found(self.workers.attempt, found))

    async def _gather(self, order: messages.Gather) -> None:
        subjects = [] if self.workers is None else self.workers.subjects(order.ranks)
        evidence = await asyncio.to_thread(self.senses.look, subjects, order.attempt, order.within_s)
        self.line.send(evidence)

    def _own_pids(self) -> list[int]:
        """Process ids that are the job's."""
        return [os.getpid(), *([] if self.workers is None else [s.pid for s in self.workers.subjects()])]

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done_beside)

    def _done_beside(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what went on beside the commands failed", exc_info=error)


def _same_script(one: messages.Prepare, other: messages.Prepare) -> bool:
    """Whether they differ in what is imported beforehand only."""
    return msgspec.structs.replace(one, preload=other.preload) == other
