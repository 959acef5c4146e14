"""Warm starts: a template process that stays, so that a new attempt costs forks and not imports. Torch-free.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.core.errors import UserError
from phalanx.launch.failures import Failure
from phalanx.launch.learning import changed
from phalanx.launch.messages import Exited, Learnt, Of, Over, Prepare, Prepared, RankSpec, Returned
from phalanx.launch.script import Script
from phalanx.launch.store import STORE_MODULE
from phalanx.launch.template_process import TemplateGoneError, TemplateProcess
from phalanx.launch.warm_cache import WarmCache

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
    """Of an attempt: its template process has ended, and every process of the attempt with it."""


Word = Failure | Returned | Exited | Over | Gone
"""What is said of an attempt: of a rank, `Failure` or `Returned` and then `Exited`; at last `Over`, or `Gone`."""


@dataclass
class WarmTemplate:
    """Starts the attempts of one script on this host. For the thread of an asyncio loop, the main one.

    Args:
        script: what the ranks run; its folder and arguments are the template's too.
        environ: environment of the template. What modules read of it at their import is the same for all attempts.
        hear: called with the number of an attempt and a `Word`.
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
    hear: Callable[[int, Word], None]
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
    _said: dict[int, list[str]] = field(default_factory=dict)
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
        """Wait until an attempt could be started at once.

        Returns:
            Why ranks cannot be forked but will each be a new Python; None where they can.

        Raises:
            UserError: something in `preload` cannot be imported, or there is no such folder.
            TemplateGoneError: the template process was killed.
        """
        process, _ = await self._fresh()
        return (await process.ready).fork_refused

    async def spawn(self, attempt: int, specs: Sequence[RankSpec]) -> dict[int, int]:
        """Start the processes of an attempt (`phalanx.launch.script.rank_specs`, `phalanx.launch.store.store_spec`).

        Descriptors in `specs` are handed over, and stay open here.

        Returns:
            The process id of every rank; each leads a session, and so a process group, of its own.

        Raises:
            UserError: as `ready`; or the host has no room for the processes. None is left then.
            TemplateGoneError: the template process was killed.
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
            process.send(attempt, ranks, number)

    async def kill(self, attempt: int) -> None:
        """SIGKILL all processes of an attempt at once, its store too; returns when the last has been reaped.

        A process that is stuck in the kernel keeps this waiting; give it a time limit.
        """
        process = self._owners.get(attempt)
        if process is not None and not process.is_gone:
            await process.kill(attempt)

    async def settle(self) -> None:
        """Wait until what has been learnt so far is imported, for whoever wants the next attempt to have it."""
        while self._building is not None and not self._building.done():
            await asyncio.wait([self._building])

    async def close(self) -> None:
        """End all that is there."""
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
            await asyncio.wait([building])  # whoever waits may give up; the process is built all the same
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
                if not self._doubt():
                    raise
                continue
            except BaseException:
                process.retire()
                raise
            if not prepared.refused:
                await self._keep(learnt, prepared)
                return process
            self._refused.update(prepared.refused)
            self._doubt()
            process.retire()
        raise AssertionError("a template that imports nothing that was learnt refuses some of it")

    def _doubt(self) -> bool:
        """Put aside what was only recalled, which the script may make us learn again; whether there was anything.

        An attempt waits for the first template: it does without, rather than wait for several.
        """
        recalled, self._recalled = self._recalled, frozenset()
        if not recalled or self.cache is None:
            return False
        self.cache.forget()
        self.learnt = [name for name in self.learnt if name not in recalled]
        return True

    async def _keep(self, learnt: Sequence[str], prepared: Prepared) -> None:
        """For the next time that everything starts cold."""
        if self.cache is None or prepared.fork_refused is not None or self._recalled.issuperset({*learnt} - {*LEARNT}):
            return
        files = [path for path in prepared.stamps if path.endswith(".py")]
        await asyncio.to_thread(self.cache.keep, learnt, sorted(self._refused), files)

    def _start(self, learnt: Sequence[str]) -> TemplateProcess:
        argv = [self.script.name, *self.script.arguments]
        bytecode = None if self.cache is None else self.cache.bytecode
        prepare = Prepare(self.preload, learnt, self.script.path_entry, argv, bytecode)
        process = TemplateProcess(prepare, self.environ, self.script.folder, self._take, self._lose)
        self.started(process.pid)
        self._processes = [other for other in self._processes if other.is_running()]
        self._processes.append(process)
        return process

    def _take(self, message: Of | Over) -> None:
        if isinstance(message, Over):
            self._owners.pop(message.attempt, None)
            self._said.pop(message.attempt, None)
            self.hear(message.attempt, message)
        elif isinstance(message.word, Learnt):
            self._learn(message.attempt, message.word)
        else:
            self.hear(message.attempt, message.word)

    def _lose(self, process: TemplateProcess, attempts: list[int]) -> None:
        for attempt in attempts:
            self._owners.pop(attempt, None)
            self.hear(attempt, Gone())

    def _learn(self, attempt: int, word: Learnt) -> None:
        said = self._said.setdefault(attempt, [])
        said.extend(word.modules)
        if not word.is_last:
            return
        known = {*self.learnt, *self._refused}
        new = [name for name in said if name not in known]
        if new and self.learns:
            self.learnt = [*self.learnt, *new]
            self.has_learnt(self.learnt)
        if self.learns and self._building is None and self._could_have(attempt, said):
            self._build()

    def _could_have(self, attempt: int, names: Sequence[str]) -> bool:
        """Whether another template could have imported some of `names` that the one of this attempt did not try."""
        process = self._owners.get(attempt)
        if not self.forks or process is None or process.is_gone or process.ready.result().fork_refused is not None:
            return False
        return bool(set(names) - self._refused - process.tried)
