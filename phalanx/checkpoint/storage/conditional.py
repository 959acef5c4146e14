"""Making an object only if there is none of its name: which fsspec file systems can, and how. Torch-free."""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from phalanx.checkpoint.storage.retry import bounded, retried, status
from phalanx.core.errors import UserError

Create = Callable[[str, bytes], bool]
"""Make the object at a path with some content, unless there is one: whether it was made."""

_CURE = "use storage that has a conditional write (S3, Google Cloud Storage, Azure), or a folder"
_EXISTS, _CONFLICT = 412, 409
_TRIES = 8


def creator(fs: Any, url: str) -> Create:
    """How to make an object only if there is none, on the file system `fs`.

    Raises:
        UserError: it cannot, or only by looking first, which two writers may do at the same time.
    """
    if isinstance(fs, MemoryFileSystem):
        return lambda path, content: _create_in_memory(fs, path, content)
    # fsspec's own default looks first; those that override it with a `mode` hand the condition to the server.
    own = getattr(type(fs), "_pipe_file", None)
    if own is None or "mode" not in inspect.signature(own).parameters or own.__module__.startswith("fsspec."):
        raise UserError(
            f"{_protocol(fs)}:// has no conditional write", cure=_CURE, field="checkpoint.folder", value=url
        )
    return _Conditional(fs, url)


class _Conditional:
    """Conditional writes, after a first one that finds out whether the server heeds the condition at all."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs, self._url = fs, url
        self._is_heeded = False

    def __call__(self, path: str, content: bytes) -> bool:
        if not self._is_heeded:
            self._probe(f"{path.rpartition('/')[0]}/.probe-{secrets.token_hex(6)}")
        return self._make(path, content)

    def _probe(self, path: str) -> None:
        made = [self._make(path, b"probe") for _ in range(2)]
        retried(path, lambda: bounded(self._fs, self._fs.rm_file, path))
        if made[1]:
            problem = "the server ignores the condition of a conditional write (If-None-Match)"
            raise UserError(problem, cure=_CURE, field="checkpoint.folder", value=self._url)
        self._is_heeded = True

    def _make(self, path: str, content: bytes) -> bool:
        for turn in range(_TRIES):
            try:
                retried(path, lambda: bounded(self._fs, self._fs.pipe_file, path, content, mode="create"))
            except FileExistsError:
                return False
            except OSError as error:
                if status(error) not in (_EXISTS, _CONFLICT):
                    raise
                # A conflict: another one was making it at this very moment, and may yet fail.
                if status(error) == _EXISTS or self._is_there(path):
                    return False
                time.sleep(0.05 * 2**turn)
            else:
                return True
        raise OSError(f"{path}: others write it again and again")

    def _is_there(self, path: str) -> bool:
        return bool(retried(path, lambda: bounded(self._fs, self._fs.exists, path)))


def _create_in_memory(fs: Any, path: str, content: bytes) -> bool:
    """fsspec looks first and then writes; this is one step even between threads."""
    key = fs._strip_protocol(path)
    made = MemoryFile(fs, key, content)
    return fs.store.setdefault(key, made) is made


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])
