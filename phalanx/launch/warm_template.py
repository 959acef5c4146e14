"""Warm starts: a template process that stays, and the cache of what it has imported for a script.

What a template has imported for a script, kept on disk for the next time that everything starts cold.

Kept are names of modules that a script was seen to import, once a template has imported them all without harm, names of
those that must not be imported beforehand, and bytecode where Python keeps none (`phalanx.launch.bytecode`). It is a
cache: what cannot be read, belongs to somebody else or is no longer right is passed over, and written anew.

Nothing is imported that the script does not import by itself: names count only while the import statements of the
script and of its own modules are what they were, as are Python and the installed packages. And nothing is believed that
others may have written: the folder and its files are this user's alone.

    WarmTemplate ── starts ──► template process ── forks ──► store, rank 0 … rank N-1     attempt 1
      (executor)                     │            └─ forks ──► store, rank 0 … rank N-1     attempt 2 …
          ▲                          │
          └── Of, Over ──────────────┘

What a script imports is learnt from its first attempt. A second template process then imports it in the background and
takes over with the next attempt; the first ends with the ranks that it has. The same happens when a file has changed
from which a module was imported: no attempt runs code that is older than its start.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.files import digest, private_folder, prune, read_private, this_python, write_private
from phalanx.launch.bytecode import bytecode_in
from phalanx.launch.launch_messages import Exited, Learnt, Of, Over, Prepare, Prepared, RankSpec, Returned
from phalanx.launch.optimizer_hook import changed, own_files
from phalanx.launch.rank_failures import Failure
from phalanx.launch.rendezvous_store import STORE_MODULE
from phalanx.launch.template_process import TemplateGoneError, TemplateProcess
from phalanx.launch.user_script import Script

_FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_NAMES = 50_000
_MOST_SCRIPTS = 128


@dataclass(frozen=True)
class Recalled:
    """What is known from earlier.

    Attributes:
        learnt: modules to import, in this order.
        refused: modules that must not be imported beforehand.
    """

    learnt: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()


class WarmCache:
    """Of one script. Its methods read and write small files; none raises where that fails.

    Args:
        folder: private to this user, see `open_cache`.
        script: what is run.
        environ: of the template.
    """

    def __init__(self, folder: Path, script: Script, environ: Mapping[str, str]) -> None:
        self._script = script
        place = _source(script) or Path(script.folder).resolve() / script.name
        self._file = (
            folder / f"{digest(*this_python(), str(place), str(script.is_module), environ.get('PYTHONPATH', ''))}.json"
        )
        self.bytecode = bytecode_in(folder)

    def recall(self) -> Recalled:
        """What was kept, as far as it is still right; nothing else."""
        found = _read(self._file)
        if found is None or found["packages"] != _packages():
            return Recalled()
        if found["imports"] != _imports([_source(self._script), *map(Path, found["own"])]):
            return Recalled()
        with contextlib.suppress(OSError):
            os.utime(self._file)  # what is used is not thrown away
        return Recalled(tuple(found["learnt"]), frozenset(found["refused"]))

    def keep(self, learnt: Sequence[str], refused: Iterable[str], files: Iterable[str]) -> None:
        """Keep what a template has imported without harm.

        Args:
            learnt: names of modules, in order.
            refused: names of those that do harm.
            files: that the template has imported.
        """
        own = sorted(own_files(files))
        value = {
            "format": _FORMAT,
            "packages": _packages(),
            "imports": _imports([_source(self._script), *map(Path, own)]),
            "own": own,
            "learnt": list(learnt),
            "refused": sorted(refused),
        }
        with contextlib.suppress(OSError):
            write_private(self._file, json.dumps(value).encode(), is_durable=True)
            prune(self._file.parent, "*.json", _MOST_SCRIPTS)

    def forget(self) -> None:
        """What was kept has done harm."""
        with contextlib.suppress(OSError):
            self._file.unlink()


def open_cache(script: Script, environ: Mapping[str, str]) -> WarmCache | None:
    """The cache of a script, in `private_folder`; None: there is none."""
    folder = private_folder(environ)
    return None if folder is None else WarmCache(folder, script, environ)


def _read(path: Path) -> dict[str, Any] | None:
    """What a file holds, if it is what `WarmCache.keep` writes."""
    data = read_private(path, _MOST_BYTES)
    try:
        value = json.loads(data or b"")
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        return None
    lists = [value.get(key) for key in ("learnt", "refused", "own")]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists):
        return None
    names = [*value["learnt"], *value["refused"]]
    if len(names) > _MOST_NAMES or not all(_is_module_name(name) for name in names):
        return None
    return value


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _packages() -> str:
    """Of what is installed: the names of the folders that say so have versions."""
    found: list[str] = []
    for entry in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):
            found += sorted(f"{entry}/{name}" for name in os.listdir(entry or ".") if name.endswith("-info"))  # noqa: PTH208 - a Path for each of some thousand names costs more
    return digest(*found)


def _imports(files: Iterable[Path | None]) -> str:
    """Of the import statements in these files, wherever they stand; None: there is no such file."""
    return digest(*(f"{path}\0{_statements(path)}" for path in files if path is not None))


def _statements(path: Path) -> str:
    try:
        source = path.read_bytes()
    except OSError:
        return "absent"
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return hashlib.sha256(source).hexdigest()
    return "\n".join(ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _source(script: Script) -> Path | None:
    """The file of a script, or of a module that lies below the working folder; None: it is installed."""
    folder = Path(script.folder).resolve()
    if not script.is_module:
        return (folder / script.name).resolve()
    place = folder.joinpath(*script.name.split("."))
    candidates = (place.with_name(f"{place.name}.py"), place / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


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
        """Start the processes of an attempt (`phalanx.launch.user_script.rank_specs`,
        `phalanx.launch.rendezvous_store.store_spec`).

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
