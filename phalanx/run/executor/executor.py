"""The executor: does on its host what the driver commands, and reports. It decides nothing.

It knows attempts by their numbers and refuses what belongs to a lower one than it has seen. Every answer can be given
again: a driver that was started again asks again. Commands that start or end processes are carried out one after the
other; looks at ranks and tests of the host go on beside them. An executor that has had neither a driver nor ranks for
long enough ends by itself.
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
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.detect.hangs.stack_traces import LOOK_S
from phalanx.ipc.codec import TooLargeError
from phalanx.launch.rendezvous_store import open_store_socket
from phalanx.launch.user_script import Script
from phalanx.launch.warm_cache import open_cache
from phalanx.launch.warm_template import LEARNT, AttemptReport, TemplateGoneError, WarmTemplate
from phalanx.run import messages
from phalanx.run.executor.host_monitor import CheckRunner, HostContext, HostMonitor
from phalanx.run.executor.host_sensors import InterfaceBytes
from phalanx.run.executor.reaper import Reaper
from phalanx.run.executor.workers import Workers, sendable
from phalanx.run.file_limit import allow_files
from phalanx.run.logs.log_lines import Tails
from phalanx.run.logs.log_pump import Pump
from phalanx.run.messages import heartbeat
from phalanx.run.wire.driver_link import DriverLink

_log = logging.getLogger(__name__)

_FIRST_STEP_S = 0.05  # how often ranks that have made no step yet are looked at
KILL_S = 10.0  # how long the end of killed processes is waited for; one that takes longer is stuck in the kernel
LAST_S = 8.0  # how long a rank that has failed may take to end by itself, once the attempt is being ended


@dataclass
class _AttemptStore:
    """The rendezvous store of an attempt; the socket is handed to `Workers`."""

    attempt: int
    port: int
    listener: socket.socket | None


@dataclass
class Executor:
    """One per host and job, on the main thread's event loop.

    Attributes:
        ended: set when this executor shall leave, with the status to leave with in `status`.
    """

    context: HostContext
    link: DriverLink
    reaper: Reaper
    monitor: HostMonitor
    unix_s: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    attempt: int = 0
    workers: Workers | None = None
    _template: WarmTemplate | None = None
    _former_templates: list[WarmTemplate] = field(default_factory=list)
    _prepared: messages.Prepare | None = None
    _store: _AttemptStore | None = None
    _started: messages.Started | None = None
    _pump: Pump | None = None
    _tails: Tails = field(default_factory=Tails)
    _carried: InterfaceBytes = field(default_factory=InterfaceBytes)
    _heartbeat_s: float = 1.0
    _sequence: int = 0
    _rdma_carried: InterfaceBytes = field(default_factory=InterfaceBytes)
    _rdma_bytes: int = 0
    _is_looking: bool = False
    _looked_s: float = -math.inf

    def __post_init__(self) -> None:
        self._commands: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._beside: set[asyncio.Task[None]] = set()
        self._halted = asyncio.Event()
        self._checks = CheckRunner(self.monitor.check, self.link.send)
        self._needed_s = self.clock()
        self._host: messages.HostState | None = None
        self._tails.on_full = self._send_lines

    # What the driver says

    def hello(self) -> messages.Hello:
        """How it introduces itself now."""
        workers = self.workers
        running = workers.running if workers is not None and workers.attempt == self.attempt else []
        return msgspec.structs.replace(self.monitor.hello(), attempt=self.attempt, running=running)

    def hear(self, message: messages.FromDriver) -> None:
        """Take a command; it is carried out later."""
        match message:
            case messages.Welcome():
                self._heartbeat_s = message.heartbeat_s
                self._tails.heartbeat_bytes = message.output_bytes
                # The driver is at this attempt: what is left of lower ones ends, the attempt itself goes on.
                self.attempt = max(self.attempt, message.attempt)
                if self.workers is not None and self.workers.attempt < message.attempt:
                    self.workers.note_stop()
                self._commands.put_nowait(lambda: self._end_lower(message.attempt))
            case messages.Prepare():
                self._commands.put_nowait(lambda: self._prepare(message))
            case messages.OpenStore():
                self._queue(message.attempt, "open-store", lambda: self._open_store(message))
            case messages.Start():
                self._halted.clear()
                self._queue(message.attempt, "start", lambda: self._start(message))
            case messages.Stop():
                if self.workers is not None and self.workers.attempt <= message.attempt:
                    self.workers.note_stop()  # from now on, the end of a rank is not a failure
                    self.workers.hurry(message.grace_s)  # also where an earlier stop is still waiting for them
                if message.attempt >= self.attempt:
                    self._halted.set()
                self._queue(message.attempt, "stop", lambda: self._stop(message))
            case messages.Gather():
                self._do_beside(self._gather(message))
            case messages.Check():
                own_pids = [os.getpid(), *([] if self.workers is None else [s.pid for s in self.workers.subjects()])]
                self._do_beside(self._checks.answer(message, own_pids))
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
        await asyncio.to_thread(self.reaper.end_all, KILL_S)
        self._close_store()

    # Commands

    def _queue(self, attempt: int, what: str, command: Callable[[], Awaitable[None]]) -> None:
        # A command of a lower attempt comes late, of a driver that has not heard yet of the newer one or is replaced.
        if attempt < self.attempt:
            self.link.send(messages.Refused(attempt, what, f"attempt {self.attempt} has begun"))
            return
        self.attempt = attempt
        self._commands.put_nowait(command)

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
        # What is imported beforehand can be added to a template; whatever else differs needs another one.
        same = before is not None and msgspec.structs.replace(prepare, preload=before.preload) == before
        if template is not None and same:
            template.learn(prepare.preload)
        else:
            if template is not None and self.workers is not None:
                self._former_templates.append(template)  # it ends with the workers that it has forked
            elif template is not None:
                await template.close()
            self._template = None
            template = self._template = self._make_template(prepare)
            template.start()
        self._do_beside(self._report_prepared(template))

    def _make_template(self, prepare: messages.Prepare) -> WarmTemplate:
        name, *arguments = prepare.script
        script = Script(name, tuple(arguments), prepare.is_module, prepare.folder)
        environ = {**self.context.environ, **prepare.environment, "PHALANX_HOST": self.context.host}
        return WarmTemplate(
            script,
            environ,
            self._hear_template,
            learnt=(*LEARNT, *(name for name in prepare.preload if name not in LEARNT)) if prepare.is_warm else (),
            forks=prepare.is_warm,
            has_learnt=lambda learnt: self._report_learnt(messages.Prepared(0.0, "", list(learnt))),
            started=self.reaper.contain,
            cache=open_cache(script, environ),
        )

    async def _report_prepared(self, template: WarmTemplate) -> None:
        began_s = time.monotonic()
        problem = ""
        try:
            allow_files(0)
            await template.ready()
        except Exception as error:  # whatever it is, the driver has to hear it
            problem = sendable(str(error) or type(error).__name__)
        self._report_learnt(messages.Prepared(time.monotonic() - began_s, problem, list(template.learnt)))

    def _report_learnt(self, prepared: messages.Prepared) -> None:
        try:
            self.link.send(prepared)
        except TooLargeError:  # only a help for other hosts
            self.link.send(msgspec.structs.replace(prepared, learnt=[]))

    async def _open_store(self, order: messages.OpenStore) -> None:
        store = self._store
        if store is None or store.attempt != order.attempt:
            self._close_store()
            # The ranks of a single host meet where no other host can reach their store, which admits anybody.
            address = "127.0.0.1" if self.context.hosts == 1 else self.context.address
            try:
                listener = open_store_socket(address)
            except (OSError, ValueError) as error:
                problem = f"the store cannot listen at {address}: {error}"
                self.link.send(messages.StoreOpened(order.attempt, 0, problem))
                return
            store = self._store = _AttemptStore(order.attempt, listener.getsockname()[1], listener)
        self.link.send(messages.StoreOpened(order.attempt, store.port))

    async def _start(self, start: messages.Start) -> None:
        if self._started is not None and self._started.attempt == start.attempt:
            self.link.send(self._started)  # the driver was started again, and does not know that it has asked before
            return
        await self._end_workers(0.0)
        if self._template is None or self._prepared is None:
            self._started = messages.Started(start.attempt, {}, 0.0, "no script has been prepared here")
            self.link.send(self._started)
            return
        # Imports may take minutes, and an attempt that is stopped by then must not wait for them.
        ready = asyncio.ensure_future(self._template.ready())
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # what is wrong, the start reports
        halted = asyncio.ensure_future(self._halted.wait())
        await asyncio.wait([ready, halted], return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        if not ready.done():
            return
        try:
            self.workers = self._make_workers(start, self._template)
            started = await self.workers.begin()
        except Exception as error:  # whatever it is, the driver has to hear it, and need not wait for its limit
            _log.exception("attempt %d could not be started", start.attempt)
            started = messages.Started(start.attempt, {}, 0.0, sendable(f"{type(error).__name__}: {error}"))
        self._started = started
        self.link.send(started)
        if self.workers is not None and not started.problem:
            self._do_beside(self._report_first_step(self.workers))

    def _make_workers(self, start: messages.Start, template: WarmTemplate) -> Workers:
        self._tails.forget()
        self.monitor.begin_attempt()
        self._pump = Pump(self._tails, self._on_lines, self.unix_s)
        listener = None
        if self._store is not None and self._store.attempt == start.attempt and start.group_rank == 0:
            listener, self._store.listener = self._store.listener, None
        return Workers(
            start,
            template.script,
            template,
            template.environ,
            self.context.pages,
            self.context.open_log,
            self._pump,
            self._report_end,
            listener,
            self.monitor.stillness(),
        )

    async def _stop(self, stop: messages.Stop) -> None:
        began_s = time.monotonic()
        stuck = await self._end_workers(stop.grace_s)
        self.link.send(messages.Stopped(stop.attempt, time.monotonic() - began_s, stuck))

    async def _end(self, end: messages.End) -> None:
        _log.info("this executor ends: %s", end.reason)
        self.status = end.status
        self.ended.set()

    # Processes

    async def _end_workers(self, grace_s: float) -> list[int]:
        """End the present attempt here; returns the processes that the kernel does not let go of."""
        workers = self.workers
        if workers is not None:
            workers.note_stop()
            if grace_s > 0:
                workers.hurry(grace_s)
                workers.is_asked = True
                with suppress(TemplateGoneError):
                    workers.template.signal(workers.attempt, workers.running, signal.SIGTERM)
                while workers.running and time.monotonic() < workers.kill_at_s:  # another stop may bring that nearer
                    await asyncio.sleep(0.02)
            if failing := workers.failing:  # threads that save, and files, come to their end, as under Python
                with suppress(TimeoutError, TemplateGoneError):
                    await asyncio.wait_for(workers.template.kill(workers.attempt, failing), LAST_S)
            try:
                await asyncio.wait_for(workers.template.kill(workers.attempt), KILL_S)
            except TimeoutError:
                _log.warning("processes of attempt %d do not end", workers.attempt)
            except TemplateGoneError:
                pass  # it died since it was last heard of, and its ranks with it: whoever waits for their end has it
        # Also without workers: what an attempt has left may outlive its ranks.
        killed = await asyncio.to_thread(self.reaper.end_attempt, KILL_S)
        if self._pump is not None:
            await self._pump.close()  # their streams are at their end
            self._pump = None
        self._send_lines()
        if workers is not None:
            workers.close()
            self.workers = None
        await asyncio.gather(*(template.close() for template in self._former_templates))
        self._former_templates.clear()
        return killed.stuck

    def _hear_template(self, attempt: int, word: AttemptReport) -> None:
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
                self._host = self.monitor.state()
                self._send_beat(self._host)
                self.reaper.reap()
                self._look_at_quiet_ranks()
                self._end_if_not_needed()
            except Exception:
                _log.exception("a heartbeat could not be sent")
            await asyncio.sleep(self._heartbeat_s)

    def _look_at_quiet_ranks(self) -> None:
        workers, now_s = self.workers, self.clock()
        if workers is None or workers.is_stopping or self._is_looking or now_s - self._looked_s < LOOK_S:
            return
        quiet = workers.quiet()
        if not quiet:
            return
        self._is_looking, self._looked_s = True, now_s

        async def look() -> None:
            try:
                await asyncio.to_thread(workers.stillness.look, quiet, self._rdma_bytes)
            finally:
                self._is_looking = False

        self._do_beside(look())  # it takes a while where many ranks make no step

    async def _report_first_step(self, workers: Workers) -> None:
        """A start, and so a recovery, is over when every rank has made a step: that is reported before its turn."""
        while self.workers is workers and not workers.is_stopping and not workers.has_stepped:
            await asyncio.sleep(_FIRST_STEP_S)
        if self.workers is workers and not workers.is_stopping:
            self._send_beat(self.monitor.state())

    def _end_if_not_needed(self) -> None:
        # Without workers only a driver needs this executor; nothing is left on a host for ever.
        now_s = self.clock()
        if self.link.connected or (self.workers is not None and self.workers.running):
            self._needed_s = now_s
        limit_s = self.context.driver_lost_s
        if now_s - self._needed_s >= limit_s and not self.ended.is_set():
            self.hear(messages.End(f"no driver has come for {limit_s:g} s, and nothing runs here", 1))

    def _send_beat(self, host: messages.HostState) -> None:
        self._sequence += 1
        workers = self.workers
        states = [] if workers is None else workers.states()
        attempt = self.attempt if workers is None else workers.attempt
        carried_bytes = self._carried.add(host.interfaces)
        self._rdma_bytes = self._rdma_carried.add([one for one in host.interfaces if one.is_rdma])
        lines = self._tails.newest()
        beat = heartbeat(self._sequence, self.unix_s(), attempt, states, host, lines, carried_bytes)
        if self.link.send(beat):
            self._tails.sent()

    def _send_lines(self) -> None:
        """Send what ranks have written, before its turn, with the last known state of the host."""
        if self._host is not None and not self._tails.is_empty:
            self._send_beat(self._host)

    def _report_end(self, ended: messages.WorkerEnded) -> None:
        self._send_lines()  # what it has written comes before its end
        self.link.send(ended)

    def _on_lines(self, rank: int, lines: Sequence[str]) -> None:
        found = self.monitor.findings(rank, lines)
        if found and self.workers is not None:
            self.link.send(messages.Found(self.workers.attempt, found))

    async def _gather(self, order: messages.Gather) -> None:
        subjects = [] if self.workers is None else self.workers.subjects(order.ranks)
        evidence = await asyncio.to_thread(self.monitor.gather, subjects, order.attempt, order.within_s)
        self.link.send(evidence)

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._beside.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("what went on beside the commands failed", exc_info=error)

        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(done)
