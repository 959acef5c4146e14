"""Warm starts: a template process that stays, and what it imports for a script.

    WarmTemplate ── starts ──► template process ── forks ──► store, rank 0 … rank N-1     attempt 1
      (executor)                     │            └─ forks ──► store, rank 0 … rank N-1     attempt 2 …
          ▲                          │
          └── Of, Over ──────────────┘

What a script imports is learnt from its first attempt. A second template process then imports it in the background and
takes over with the next attempt; the first ends with the ranks that it has. The same happens when a file has changed
from which a module was imported: no attempt runs code that is older than its start.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import phalanx
from phalanx.core.errors import UserError
from phalanx.launch import launch_messages as messages
from phalanx.launch.launch_messages import QUIET_IMPORTS, HungUpError, MessageSocket, Of, Over, RankSpec
from phalanx.launch.learnt_imports import changed
from phalanx.launch.rank_failures import Failure, signal_name
from phalanx.launch.rendezvous_store import STORE_MODULE
from phalanx.launch.user_script import Script
from phalanx.launch.warm_cache import WarmCache

_END_S = 5.0
_LAST_S = 1.0  # after it has hung up; nothing else happens on the loop meanwhile, once in a template's life


class TemplateGoneError(Exception):
    """A template process has ended, and all of its ranks with it."""


class TemplateProcess:
    """The launcher's end of one template process, on an asyncio loop.

    The loop's thread must be the one that starts processes for as long as these are to live: the kernel ends a child
    with the thread that made it.

    Args:
        hear: called with reports about attempts: `Of`, `Over`.
        gone: called once it has hung up, with the attempts that it had.
    """

    def __init__(
        self,
        prepare: messages.Prepare,
        environ: Mapping[str, str],
        folder: str,
        hear: Callable[[Of | Over], None],
        gone: Callable[[TemplateProcess, list[int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hear, self._gone = hear, gone
        self.tried = frozenset(prepare.learnt)
        self.ready: asyncio.Future[messages.Prepared] = self._loop.create_future()
        self._spawned: dict[int, asyncio.Future[messages.Spawned]] = {}
        self._over: dict[int, asyncio.Future[None]] = {}
        self._retired = False
        self.is_gone = False
        self.how = "was ended"
        self._socket, self._popen = _start(environ, folder)
        self.pid = self._popen.pid
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._send(prepare)

    def is_running(self) -> bool:
        """Whether there is still something to wait for."""
        return self._popen.poll() is None

    async def spawn(self, attempt: int, specs: Sequence[RankSpec], *, fork: bool) -> messages.Spawned:
        """Start the processes of an attempt; the descriptors in `specs` stay open here.

        Raises:
            TemplateGoneError: it has ended.
        """
        placed, descriptors = _placed(specs)
        self._spawned[attempt] = self._loop.create_future()
        self._over[attempt] = self._loop.create_future()
        self._send(messages.Spawn(attempt, placed, fork), descriptors)
        return await self._spawned[attempt]

    def signal(self, attempt: int, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks of an attempt; nothing where they are gone."""
        self._send(messages.SendTo(attempt, ranks, number))

    async def kill(self, attempt: int, spared: Sequence[int]) -> None:
        """Kill all processes of an attempt at once but `spared`; returns when the last has been reaped."""
        over = self._over.get(attempt)
        if over is not None:
            self._send(messages.Kill(attempt, spared))
            await asyncio.shield(over)

    def retire(self) -> None:
        """End it once the attempts that it has are over."""
        self._retired = True
        if not self._over:
            self._end()

    async def close(self) -> None:
        """End it now, and all ranks with it; returns when it is gone."""
        self._end()
        try:
            await asyncio.to_thread(self._popen.wait, _END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            await asyncio.to_thread(self._popen.wait)

    def _end(self) -> None:
        """Hang up: it kills its ranks and leaves; one that has none need not come so far."""
        if not self.is_gone:
            self.is_gone = True
            if not self._over:
                self._popen.kill()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._fail_waiting(TemplateGoneError("it was ended"))

    def _send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        if self.is_gone:
            raise TemplateGoneError("the template process has ended")
        try:
            self._socket.send(message, descriptors)
        except HungUpError as error:
            self._read()  # how ranks ended may have come before
            self._hung_up()
            raise TemplateGoneError(str(error)) from error

    def _read(self) -> None:
        try:
            while not self.is_gone:
                self._handle(self._socket.receive()[0])
        except BlockingIOError:
            return
        except HungUpError:
            self._hung_up()

    def _handle(self, message: Any) -> None:
        if isinstance(message, messages.Prepared):
            self.ready.set_result(message)
        elif isinstance(message, messages.Broken):
            failure = message.failure
            problem = f"the template process cannot import what ranks need: {failure.summary}\n{failure.text}".rstrip()
            self.ready.set_exception(UserError(problem, cure="install it, or leave it out of preload"))
        elif isinstance(message, messages.Spawned):
            self._spawned.pop(message.attempt).set_result(message)
        elif isinstance(message, Over):
            over = self._over.pop(message.attempt, None)
            if over is None:  # it was to be killed when it was over already, and that is told again
                return
            over.set_result(None)
            self._hear(message)
            if self._retired and not self._over:
                self._end()
        else:
            assert isinstance(message, Of)
            self._hear(message)

    def _hung_up(self) -> None:
        """It has ended by itself, or takes no more messages."""
        if self.is_gone:
            return
        attempts = list(self._over)
        self.is_gone = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            # One that fails closes its end before it is gone, and to kill it then would hide how it ended.
            code = self._popen.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        self.how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit status {code}"
        self._fail_waiting(TemplateGoneError(f"the template process {self.how}"))
        self._gone(self, attempts)

    def _fail_waiting(self, error: TemplateGoneError) -> None:
        unanswered: list[asyncio.Future[Any]] = [self.ready, *self._spawned.values()]
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # no task need be waiting for it
        for over in self._over.values():
            over.set_result(None)  # the kernel has killed all ranks with their template
        self._over.clear()


def _start(environ: Mapping[str, str], folder: str) -> tuple[MessageSocket, subprocess.Popen]:
    """A new Python, in a process group of its own so that Ctrl-C does not reach it.

    Its `sys.path` is what a script would have there behind its own folder; this package comes last.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    home = str(Path(phalanx.__file__).parent.parent)
    program = (
        "import sys\n"
        "sys.path[:1] = [] if sys.path[:1] == [''] else sys.path[:1]\n"
        f"sys.path += [] if {home!r} in sys.path else [{home!r}]\n"
        "from phalanx.launch.template import serve_staying\n"
        f"serve_staying({theirs.fileno()}, {os.getpid()})\n"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environ, **QUIET_IMPORTS},
            cwd=folder,
            pass_fds=[theirs.fileno()],
            process_group=0,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        ours.close()
        problem, cure = f"cannot be worked in ({error.strerror})", "name a folder that is there"
        raise UserError(problem, cure=cure, field="folder", value=folder) from error
    finally:
        theirs.close()
    ours.setblocking(False)
    return MessageSocket(ours), process


def _placed(specs: Sequence[RankSpec]) -> tuple[list[RankSpec], list[int]]:
    """The specs with descriptors named by their place in the list that travels beside them."""
    descriptors: list[int] = []

    def place(descriptor: int | None) -> int | None:
        if descriptor is None:
            return None
        descriptors.append(descriptor)
        return len(descriptors) - 1

    placed = []
    for spec in specs:
        output_fd = place(spec.output_fd)
        worker = replace(spec.worker, listen_fd=place(spec.worker.listen_fd))
        placed.append(replace(spec, output_fd=output_fd, worker=worker))
    return placed, descriptors


PRELOAD = ("torch", "torch.distributed", STORE_MODULE)
"""What nearly every script imports, and what the process of the store needs."""

LEARNT = ("torch._dynamo", "torch.profiler._cupti_monitor", "torch.utils.serialization.config")
"""What torch itself imports with the first optimizer that a script makes, with its first step, and with what it loads.

A module that is missing here costs a second template process in every job; one that a version of torch does not have
costs nothing.
"""

# How often templates are tried that leave out more and more, and how often one is renewed because files change.
_TRIES = 4


@dataclass(frozen=True)
class Gone:
    """Of an attempt: its template process has ended, which `how` says, and every process of the attempt with it."""

    how: str = "was killed"


AttemptReport = Failure | messages.Returned | messages.Exited | Over | Gone
"""About an attempt: of a rank, `Failure` or `Returned` and then `Exited`; at last `Over`, or `Gone`."""


@dataclass
class WarmTemplate:
    """Starts the attempts of one script on this host. For the thread of an asyncio loop, the main one.

    Args:
        script: its folder and arguments are the template's too.
        environ: of the template. What modules read of it at their import is the same for all attempts.
        hear: called with the number of an attempt and an `AttemptReport`.
        preload: modules that the template imports, and without which there is none.
        learnt: modules that it may import, if that does no harm, such as those that another host has learnt.
        learns: whether what scripts import is imported beforehand from the second attempt on.
        forks: False has each rank be a new Python.
        has_learnt: called with `learnt` when that has grown.
        cache: what earlier runs have learnt, and where this one's is kept; None: nothing.
        started: called with the process id of each template process, before it has started anything itself.
    """

    script: Script
    environ: Mapping[str, str]
    hear: Callable[[int, AttemptReport], None]
    preload: Sequence[str] = PRELOAD
    learnt: Sequence[str] = LEARNT
    learns: bool = True
    forks: bool = True
    has_learnt: Callable[[Sequence[str]], None] = lambda learnt: None
    cache: WarmCache | None = None
    started: Callable[[int], None] = lambda pid: None
    _current: TemplateProcess | None = None
    _building: asyncio.Task[TemplateProcess] | None = None
    _processes: list[TemplateProcess] = field(default_factory=list)
    _owners: dict[int, TemplateProcess] = field(default_factory=dict)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _imported: dict[int, list[str]] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    _recalled: frozenset[str] = frozenset()

    def start(self) -> None:
        """Begin to import; called once, from the loop."""
        if self.cache is not None and self.learns and self.forks:
            found = self.cache.recall()
            self._recalled = frozenset(found.learnt) - {*self.learnt}
            self._refused |= found.refused
            self.learnt = list(dict.fromkeys((*self.learnt, *found.learnt)))
        self._build()

    async def ready(self) -> str | None:
        """Wait until an attempt could be started at once; why ranks cannot be forked then, None where they can.

        Raises:
            UserError: something in `preload` cannot be imported, or there is no such folder.
            TemplateGoneError: the template process was killed.
        """
        process, _ = await self._fresh()
        return (await process.ready).fork_refused

    async def spawn(self, attempt: int, specs: Sequence[RankSpec]) -> dict[int, int]:
        """Start the processes of an attempt (`phalanx.launch.user_script.rank_specs`,
        `phalanx.launch.rendezvous_store.store_spec`).

        Descriptors in `specs` are handed over, and stay open here. Returns the process id of every rank; each leads a
        session, and so a process group, of its own. Raises as `ready`, and UserError where the host has no room for
        the processes; none is left then.
        """
        process, forks = await self._fresh()
        self._owners[attempt] = process
        spawned = await process.spawn(attempt, specs, fork=forks and self.forks)
        if spawned.problem:
            raise UserError(f"attempt {attempt} cannot be started: {spawned.problem}", cure="see what fills this host")
        return dict(spawned.pids)

    def learn(self, names: Sequence[str]) -> None:
        """Take what another host has learnt; attempts that run are not disturbed."""
        known = {*self.learnt, *self._refused}
        self.learnt = [*self.learnt, *(name for name in dict.fromkeys(names) if name not in known)]
        self._catch_up()

    def signal(self, attempt: int, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks of an attempt, those that still run."""
        process = self._owners.get(attempt)
        if process is not None and not process.is_gone:
            process.signal(attempt, ranks, number)

    async def kill(self, attempt: int, spared: Sequence[int] = ()) -> None:
        """SIGKILL all processes of an attempt at once, its store too; returns when the last has been reaped.

        A process that is stuck in the kernel keeps this waiting, and so do ranks that are spared; give it a time limit.
        """
        process = self._owners.get(attempt)
        if process is not None and not process.is_gone:
            await process.kill(attempt, spared)

    async def settle(self) -> None:
        """Wait until what has been learnt so far is imported, so that the next attempt has it."""
        while self._building is not None and not self._building.done():
            await asyncio.wait([self._building])

    async def close(self) -> None:
        """End all template processes."""
        if self._building is not None:
            self._building.cancel()
            await asyncio.gather(self._building, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in list(self._processes)))
        self._processes.clear()

    async def _fresh(self) -> tuple[TemplateProcess, bool]:
        """A process that has imported what the files now hold, and whether to fork it.

        Files that keep changing while they are imported are left to new Pythons.
        """
        async with self._one_at_a_time:
            for _ in range(_TRIES):
                process = await self._newest()
                if not await asyncio.to_thread(changed, process.ready.result().stamps):
                    return process, True
                self._replace(None)
            return await self._newest(), False

    async def _newest(self) -> TemplateProcess:
        """The newest process that is ready; one is waited for only where there is none at all."""
        if self._current is not None and self._current.is_gone:
            self._current = None
        if self._building is None and self._current is None:
            self._build()
        building = self._building
        if building is not None and (self._current is None or building.done()):
            await asyncio.wait([building])  # a caller may give up; the process is built all the same
            self._building = None
            if self._current is None or building.exception() is None:
                self._replace(building.result())
                self._catch_up()
        assert self._current is not None
        return self._current

    def _catch_up(self) -> None:
        """Build another process where the newest has not tried all that is learnt by now."""
        process = self._current
        if self._building is not None or process is None or process.is_gone or not (self.learns and self.forks):
            return
        untried = set(self.learnt) - self._refused - process.tried
        if untried and process.ready.result().fork_refused is None:
            self._build()

    def _replace(self, process: TemplateProcess | None) -> None:
        if self._current is not None:
            self._current.retire()
        self._current = process

    def _build(self) -> None:
        self._building = asyncio.get_running_loop().create_task(self._built())

    async def _built(self) -> TemplateProcess:
        """A process that imports as much of what was learnt as does no harm."""
        for number in range(_TRIES):
            if number == _TRIES - 1:
                self._refused.update(self.learnt)
            learnt = [name for name in self.learnt if name not in self._refused]
            process = self._start(learnt)
            try:
                prepared = await process.ready
            except (UserError, TemplateGoneError):
                process.retire()
                if not self._drop_recalled():
                    raise
                continue
            except BaseException:
                process.retire()
                raise
            if not prepared.refused:
                await self._keep(learnt, prepared)
                return process
            self._refused.update(prepared.refused)
            self._drop_recalled()
            process.retire()
        raise AssertionError("a template that imports nothing that was learnt refuses some of it")

    def _drop_recalled(self) -> bool:
        """Put aside what was only recalled, which the script may make us learn again; whether there was anything.

        An attempt waits for the first template: it does without, rather than wait for several.
        """
        recalled, self._recalled = self._recalled, frozenset()
        if not recalled or self.cache is None:
            return False
        self.cache.forget()
        self.learnt = [name for name in self.learnt if name not in recalled]
        return True

    async def _keep(self, learnt: Sequence[str], prepared: messages.Prepared) -> None:
        """For the next time that everything starts cold."""
        if self.cache is None or prepared.fork_refused is not None or self._recalled.issuperset({*learnt} - {*LEARNT}):
            return
        files = [path for path in prepared.stamps if path.endswith(".py")]
        await asyncio.to_thread(self.cache.keep, learnt, sorted(self._refused), files)

    def _start(self, learnt: Sequence[str]) -> TemplateProcess:
        argv = [self.script.name, *self.script.arguments]
        bytecode = None if self.cache is None else self.cache.bytecode
        prepare = messages.Prepare(self.preload, learnt, self.script.path_entry, argv, bytecode)
        process = TemplateProcess(prepare, self.environ, self.script.folder, self._handle, self._lose)
        self.started(process.pid)
        self._processes = [other for other in self._processes if other.is_running()]
        self._processes.append(process)
        return process

    def _handle(self, message: Of | Over) -> None:
        if isinstance(message, Over):
            self._owners.pop(message.attempt, None)
            self._imported.pop(message.attempt, None)
            self.hear(message.attempt, message)
        elif isinstance(message.report, messages.Learnt):
            self._learn(message.attempt, message.report)
        else:
            self.hear(message.attempt, message.report)

    def _lose(self, process: TemplateProcess, attempts: list[int]) -> None:
        for attempt in attempts:
            self._owners.pop(attempt, None)
            self.hear(attempt, Gone(process.how))

    def _learn(self, attempt: int, message: messages.Learnt) -> None:
        imported = self._imported.setdefault(attempt, [])
        imported.extend(message.modules)
        if not message.is_last or not self.learns:
            return
        known = {*self.learnt, *self._refused}
        new = [name for name in imported if name not in known]
        if new:
            self.learnt = [*self.learnt, *new]
            self.has_learnt(self.learnt)
        # Another template is worth it where it could import something that the one of this attempt did not try.
        process = self._owners.get(attempt)
        if self._building is None and self.forks and process is not None and not process.is_gone:
            untried = set(imported) - self._refused - process.tried
            if untried and process.ready.result().fork_refused is None:
                self._build()
