"""What a template process may import beforehand: what a script was seen to import, unless importing it leaves a trace.

A module that is imported before the fork is shared by all ranks of all attempts. So its import must not depend on which
rank it is in, and must leave nothing behind that ranks may not share: threads, a device, open files, seeded generators
of random numbers. A template tries; where an import does any of that, the launcher starts another template without it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.ipc.processes import task_names
from phalanx.launch.fresh_rank import is_being_imported

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

_PIECE_BYTES = 3000  # a message that is no longer than this is written to a pipe whole or not at all

# Folders of packages, also where another one of these than this Python's has been added to its path.
_INSTALLED = frozenset({"site-packages", "dist-packages"})

Stamp = tuple[int, int]
"""When a file was changed, nanoseconds, and its size in bytes."""


def learnable(modules: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    """Names of the modules that were imported from files after `known`, in the order in which their imports began."""
    return [
        name
        for name, module in modules.items()
        if name not in known
        and name != "__main__"
        and not is_being_imported(module)
        and getattr(getattr(module, "__spec__", None), "name", None) == name
        and _file_of(module)
    ]


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
    found = ((path, _stamp_of(path)) for path in {_file_of(module) for module in list(modules.values())} if path)
    return {path: stamp for path, stamp in found if stamp is not None}


def changed(before: Mapping[str, Stamp]) -> list[str]:
    """The files that are no longer as they were."""
    return [path for path, stamp in before.items() if _stamp_of(path) != stamp]


def _stamp_of(path: str) -> Stamp | None:
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
    for name in ("numpy", "torch"):  # before any module that may seed their generators
        if name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    with _watched_environment(lambda key: refused.update(_who_reads(key))):
        for name in names:
            if name not in sys.modules and name not in refused:
                loaded = frozenset(sys.modules)
                if not _import_alone(name):
                    refused |= {name, *_own(set(sys.modules) - loaded)}
                for again in refused:  # undone, so that the next one that imports them is found as well
                    parent, _, last = again.rpartition(".")
                    if sys.modules.pop(again, None) is not None and parent in sys.modules:
                        vars(sys.modules[parent]).pop(last, None)
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
    found: dict[str, Any] = {"random": random.getstate()}
    if sys.platform == "linux":
        found["threads"] = len(task_names())
        found["files"] = len(list(Path("/proc/self/fd").iterdir()))
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
