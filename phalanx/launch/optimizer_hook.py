"""Steps of a script that knows nothing of us, by a hook on optimizers; and which modules a template may import for it.

What a script that knows nothing of us is given: a hook that torch calls after every optimizer step, and a good end.

torch is reached by name when the script imports it, never imported from here.

What a template process may import beforehand: what a script was seen to import, unless importing it leaves a trace.

A module that is imported before the fork is shared by all ranks of all attempts. So its import must not depend on who
the rank is, and must leave nothing behind that ranks may not share: threads, a device, open files, seeded generators of
random numbers. A template tries; where an import does any of that, the launcher starts another template without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import os
import random
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.core.progress import ProgressWriter
from phalanx.ipc.processes import task_names

_OPTIMIZERS = "torch.optim.optimizer"

# An optimizer that has stepped so often since the one that counts did takes its place: that one is no longer used.
_TAKES_OVER = 16

_LET_GO_S = 0.1
"""Without the interpreter's lock, before and after process groups are destroyed."""


class StepCounter:
    """Calls `count` once per step of the run, however many optimizers there are.

    The first optimizer seen counts. Another takes over when that one is gone, or has not stepped during 16 steps of the
    other: a script may warm up with one and go on with the next, or have one for each parameter.

    Args:
        count: a step has ended.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._leader: Callable[[], Any] = lambda: None
        self._since: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._process = os.getpid()

    def __call__(self, optimizer: Any, arguments: Any = (), keywords: Any = None) -> None:
        """An optimizer has stepped; in a process that a rank has forked this counts for nothing."""
        if self._leader() is not optimizer and not self._takes_over(optimizer):
            return
        if self._since:
            self._since.clear()
        if os.getpid() == self._process:
            self._count()

    def _takes_over(self, optimizer: Any) -> bool:
        steps = self._since.get(optimizer, 0) + 1
        self._since[optimizer] = steps
        if self._leader() is not None and steps <= _TAKES_OVER:
            return False
        self._leader = weakref.ref(optimizer)
        return True


def report_steps(page: ProgressWriter | None, first: Callable[[], None]) -> None:
    """Have the steps of all optimizers of this process reported, as soon as torch is there.

    Args:
        page: where to; None: nowhere. Once the script has claimed it, it is left to the script.
        first: called once, after the first step.
    """
    begun: list[bool] = []

    def count() -> None:
        if page is not None and not page.is_claimed:
            page.step()
        if not begun:
            begun.append(True)
            first()

    counter = StepCounter(count)
    when_imported(_OPTIMIZERS, lambda module: module.register_optimizer_step_post_hook(counter))


def end_groups_well() -> None:
    """Have every thread of a process group let go of what it holds before the script goes on after its groups' end.

    With torch 2.13 some scripts never end: a thread of gloo that has just done a step's last all-reduce holds a Python
    object (`torch.autograd.graph` leaves one with every backward), and needs the interpreter's lock to let it go. If
    the script drops its `DistributedDataParallel` first, as any does whose ``main`` returns after
    ``destroy_process_group``, the main thread joins that thread while it holds the lock. Under torchrun 5 of 12 such
    scripts hung (docs/LOG.md).
    """

    def act(module: ModuleType) -> None:
        destroy = module.destroy_process_group

        @functools.wraps(destroy)
        def destroy_and_let_go(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(_LET_GO_S)
            try:
                return destroy(*arguments, **keywords)
            finally:
                time.sleep(_LET_GO_S)

        for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
            if getattr(known := sys.modules.get(name), "destroy_process_group", None) is destroy:
                setattr(known, "destroy_process_group", destroy_and_let_go)  # noqa: B010 - of a module

    when_imported("torch.distributed", lambda module: act(module) if hasattr(module, "destroy_process_group") else None)


def when_imported(name: str, act: Callable[[Any], Any]) -> None:
    """Call ``act(module)`` once the module `name` has been imported: now, or at the end of its first import."""
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        act(module)
    else:
        sys.meta_path.insert(0, _Watch(name, act))


def is_being_imported(module: Any) -> bool:
    """Whether the code of a module has not come to its end yet."""
    return bool(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
    )  # as Python's own import looks it up


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as all others would, and acts after its code has run."""

    def __init__(self, name: str, act: Callable[[Any], Any]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The spec of the module that is watched for; None for any other."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._act(module)

        loader.exec_module = run_and_act


_RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "PHALANX_PROGRESS",
        "PHALANX_RUN_ATTEMPT",
        "PHALANX_RANK",
        "PHALANX_ATTEMPT",
    }
)

# A message that is no longer than this is written to a pipe whole or not at all.
_PIECE_BYTES = 3000

# Folders of packages, also where another one of these than this Python's has been added to its path.
_INSTALLED = frozenset({"site-packages", "dist-packages"})

# They have generators of random numbers.
_SEEDED = ("numpy", "torch")

Stamp = tuple[int, int]
"""When a file was changed, nanoseconds, and its size in bytes."""


def learnable(modules: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Names of the modules that were imported from files after `known`, in the order in which their imports began."""
    return [
        name
        for name, module in modules.items()
        if name not in known and name != "__main__" and not is_being_imported(module) and _is_file_of(name, module)
    ]


def _is_file_of(name: str, module: Any) -> bool:
    return getattr(getattr(module, "__spec__", None), "name", None) == name and bool(_file_of(module))


def _file_of(module: Any) -> str:
    """The file that a module came from; empty where there is none."""
    spec: Any = getattr(module, "__spec__", None)
    return str(spec.origin) if getattr(spec, "has_location", False) and getattr(spec, "origin", None) else ""


def pieces(names: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """`names` in pieces that fit into a small message, and whether each is the last; one empty piece for none."""
    piece: list[str] = []
    for name in names:
        if piece and sum(len(other) + 8 for other in piece) + len(name) > _PIECE_BYTES:
            yield piece, False
            piece = []
        piece.append(name)
    yield piece, True


def stamps(modules: Mapping[str, Any]) -> dict[str, Stamp]:
    """Of the source files, and compiled ones, that modules came from."""
    found = ((path, stamp_of(path)) for path in {_file_of(module) for module in list(modules.values())} if path)
    return {path: stamp for path, stamp in found if stamp is not None}


def changed(before: Mapping[str, Stamp]) -> list[str]:
    """The files that are no longer as they were."""
    return [path for path, stamp in before.items() if stamp_of(path) != stamp]


def stamp_of(path: str) -> Stamp | None:
    """Of a file; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of some thousand files before a start; a Path for each costs more
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def import_learnt(names: Sequence[str]) -> list[str]:
    """Import what a script was seen to import, and return what must not be imported beforehand.

    Where that is anything, this process is spoiled: some of it was imported already.
    """
    refused: set[str] = set()
    for name in _SEEDED:  # before any module that may seed them
        if name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    with _watched_environment(lambda key: refused.update(_who_reads(key))):
        for name in names:
            if name not in sys.modules and name not in refused:
                loaded = frozenset(sys.modules)
                if not _import_alone(name):
                    refused |= {name, *_own(set(sys.modules) - loaded)}
                _forget(refused)  # so that the next one that imports them is found as well
    return [name for name in names if name in refused]


def _import_alone(name: str) -> bool:
    """Import a module; whether that left nothing behind, and went well if there is one of this name."""
    before = _traces()
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            return False  # another that it needs: of what it did until then, something may be left
    except (Exception, SystemExit):
        return False
    after = _traces()
    return all(after[what] == before.get(what, after[what]) for what in after)


def _traces() -> dict[str, Any]:
    """What an import may change that ranks must not share; generators of random numbers once they are there."""
    descriptors = Path("/proc/self/fd")
    found: dict[str, Any] = {"random": random.getstate()}
    if sys.platform == "linux":
        found["threads"] = len(task_names())
        found["files"] = len(list(descriptors.iterdir()))
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = [str(part) for part in numpy.random.get_state()]
    if (torch := sys.modules.get("torch")) is not None and not is_being_imported(torch):
        found["torch"] = bytes(torch.default_generator.get_state().numpy())
        found["device"] = torch.cuda.is_initialized()
        found["cores"] = torch.get_num_threads()
    return found


def _who_reads(key: str | None) -> list[str]:
    """The modules that are being imported, innermost last, when one reads a variable; none where that is harmless.

    `key` is None where all variables are read. Installed packages do so for the processes that they start; what a
    script brings along may look for its rank.
    """
    if key is not None and key not in _RANK_VARIABLES:
        return []
    names = [name for name, module in list(sys.modules.items()) if is_being_imported(module)]
    return names if names and (key is not None or _own(names[-1:])) else []


def _own(names: Iterable[str]) -> list[str]:
    """Those of `names` that are neither Python's nor installed, but the script's own."""
    files = {name: _file_of(sys.modules.get(name)) for name in names}
    own = own_files(file for file in files.values() if file)
    return [name for name, file in files.items() if file in own]


def own_files(files: Iterable[str]) -> set[str]:
    """Those of `files` that are neither Python's nor installed."""
    paths = sysconfig.get_paths()
    homes = tuple(os.path.realpath(paths[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    real = {file: os.path.realpath(file) for file in files}
    return {
        file for file, place in real.items() if not place.startswith(homes) and _INSTALLED.isdisjoint(Path(place).parts)
    }


def _forget(names: Iterable[str]) -> None:
    """Undo the import of modules as far as another one would see it."""
    for name in names:
        parent, _, last = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)


@contextmanager
def _watched_environment(note: Callable[[str | None], None]) -> Iterator[None]:
    """Have `note` called with every variable that is read; with None for all of them."""
    plain: Any = type(os.environ)

    class Watched(plain):  # type: ignore[misc]
        def __getitem__(self, key: str) -> Any:
            note(key)
            return super().__getitem__(key)

        def __iter__(self) -> Any:
            note(None)
            return super().__iter__()

    os.environ.__class__ = Watched
    try:
        yield
    finally:
        os.environ.__class__ = plain
