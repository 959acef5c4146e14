"""What a template has imported for a script, kept on disk for the next time that everything starts cold.

Kept are names of modules that a script was seen to import, once a template has imported them all without harm, names of
those that must not be imported beforehand, and bytecode where Python keeps none (`phalanx.launch.bytecode`). It is a
cache: what cannot be read, belongs to another user or is no longer right is passed over, and written anew.

Nothing is imported that the script does not import by itself: names count only while the import statements of the
script and of its own modules are what they were, as are Python and the installed packages. And nothing is believed that
others may have written: the folder and its files are this user's alone.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.files import digest, private_folder, prune, read_private, this_python, write_private
from phalanx.launch.bytecode import bytecode_in
from phalanx.launch.learnt_imports import own_files
from phalanx.launch.user_script import Script

_FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_NAMES = 50_000
_MOST_SCRIPTS = 128


@dataclass(frozen=True)
class Recalled:
    """What is known from earlier: modules to import, in order, and those that must not be imported beforehand."""

    learnt: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()


class WarmCache:
    """Of one script, in a folder that is private to this user. No method raises where a file cannot be used."""

    def __init__(self, folder: Path, script: Script, environ: Mapping[str, str]) -> None:
        self._script = script
        place = _source(script) or Path(script.folder).resolve() / script.name
        key = digest(*this_python(), str(place), str(script.is_module), environ.get("PYTHONPATH", ""))
        self._file = folder / f"{key}.json"
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
        """Keep what a template has imported without harm, from `files`, and names of modules that do harm."""
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
    if len(names) > _MOST_NAMES or not all(part.isidentifier() for name in names for part in name.split(".")):
        return None
    return value


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
