"""Bytecode of modules for which Python keeps none, so that a template need not compile them at each cold start.

Packages are often installed without (uv, and images that say PYTHONDONTWRITEBYTECODE=1), in places that a job may not
write to. Compiling what torch and its friends import takes three times as long as importing it. Files are
written aside and renamed; one whose checksum, source or owner is not right is passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from phalanx.core.files import digest, make_private, private_folder, prune, read_private, this_python, write_private

_MOST_BYTES = 64 << 20
_MOST_FOLDERS = 4  # one for each Python, with what is installed for it
_SUM_BYTES = 16
_STAMP = struct.Struct("<4sqq")


@contextmanager
def kept_bytecode(folder: Path | None) -> Iterator[None]:
    """Within it, modules that Python would compile and not keep are compiled once and kept in `folder`; None: not."""
    finder = None if folder is None else _begin(folder)
    try:
        yield
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)


def keep_bytecode(environ: Mapping[str, str]) -> None:
    """The same from now on, for a process of our own; `environ` says where the cache is."""
    if (folder := private_folder(environ)) is not None:
        _begin(bytecode_in(folder))


def bytecode_in(folder: Path) -> Path:
    """Where the cache keeps bytecode of this Python."""
    return folder / f"bytecode-{digest(*this_python())[:16]}"


def _begin(folder: Path) -> _Finder | None:
    if PathFinder not in sys.meta_path or not make_private(folder):
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    prune(folder.parent, "bytecode-*", _MOST_FOLDERS)
    finder = _Finder(folder)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)
    return finder


class _Finder:
    """Finds what `PathFinder` finds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """The same spec; where Python does not keep the module's bytecode, with a loader that does."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and not _keeps_python(spec.cached):
            spec.loader = _Loader(name, spec.loader.path, self._folder)
        return spec


def _keeps_python(cached: str | None) -> bool:
    """Whether there is bytecode, or Python will write it."""
    if cached is None or os.access(cached, os.R_OK):
        return cached is not None
    if sys.dont_write_bytecode:
        return False
    folder = Path(cached).parent
    return os.access(folder if folder.is_dir() else folder.parent, os.W_OK)


class _Loader(SourceFileLoader):
    """Takes code from the folder, or compiles it and puts it there."""

    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self._folder = folder

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module."""
        path = self.get_filename(fullname)
        found = os.stat(path)  # noqa: PTH116 - of each of some thousand modules
        stamp = _STAMP.pack(importlib.util.MAGIC_NUMBER, found.st_mtime_ns, found.st_size)
        place = self._folder / digest(path)
        data = read_private(place, _MOST_BYTES)
        begin = _SUM_BYTES + len(stamp)
        if data is not None and data[_SUM_BYTES:begin] == stamp and data[:_SUM_BYTES] == _sum(data):
            kept: Any = marshal.loads(memoryview(data)[begin:])
            if isinstance(kept, CodeType):
                return kept
        code: CodeType = self.source_to_code(self.get_data(path), path)
        body = bytes(_SUM_BYTES) + stamp + marshal.dumps(code)
        with contextlib.suppress(OSError):
            write_private(place, _sum(body) + body[_SUM_BYTES:])  # the checksum shows what a power cut has left
        return code


def _sum(data: bytes) -> bytes:
    """Of all that stands behind it."""
    return hashlib.blake2b(memoryview(data)[_SUM_BYTES:], digest_size=_SUM_BYTES).digest()
