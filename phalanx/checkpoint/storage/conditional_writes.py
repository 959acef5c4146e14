"""The one conditional request to object stores: make an object only if there is none of its name.

`creator` knows which fsspec file systems can do that, and how.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from phalanx.core.errors import UserError
from phalanx.core.object_requests import PRECONDITION_FAILED, bounded, retried, status

Create = Callable[[str, bytes], bool]
"""Make the object at a path with some content, unless there is one: whether it was made."""

_CURE = "use storage that has a conditional write (S3, Google Cloud Storage, Azure), or a folder"
_CONFLICT = 409
_TRIES = 8


def creator(fs: Any, url: str) -> Create:
    """How to make an object only if there is none, on the file system `fs`.

    Raises:
        UserError: it cannot, or only by looking first, which two writers may do at the same time.
    """
    if isinstance(fs, MemoryFileSystem):

        def create_in_memory(path: str, content: bytes) -> bool:
            # fsspec looks first and then writes; this is one step even between threads.
            key = fs._strip_protocol(path)
            made = MemoryFile(fs, key, content)
            return fs.store.setdefault(key, made) is made

        return create_in_memory
    # fsspec's own default looks first; those that override it with a `mode` hand the condition to the server.
    own = getattr(type(fs), "_pipe_file", None)
    if own is None or "mode" not in inspect.signature(own).parameters or own.__module__.startswith("fsspec."):
        protocol = fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])
        problem = f"{protocol}:// has no conditional write"
        raise UserError(problem, cure=_CURE, field="checkpoint.folder", value=url)
    return _Conditional(fs, url)


class _Conditional:
    """Conditional writes, after a first one that shows whether the server obeys the condition at all."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs, self._url = fs, url
        self._is_probed = False

    def __call__(self, path: str, content: bytes) -> bool:
        if not self._is_probed:
            probe = f"{path.rpartition('/')[0]}/.probe-{secrets.token_hex(6)}"
            made = [self._make(probe, b"probe") for _ in range(2)]
            retried(probe, lambda: bounded(self._fs, self._fs.rm_file, probe))
            if made[1]:
                problem = "the server ignores the condition of a conditional write (If-None-Match)"
                raise UserError(problem, cure=_CURE, field="checkpoint.folder", value=self._url)
            self._is_probed = True
        return self._make(path, content)

    def _make(self, path: str, content: bytes) -> bool:
        for turn in range(_TRIES):
            try:
                retried(path, lambda: bounded(self._fs, self._fs.pipe_file, path, content, mode="create"))
            except FileExistsError:
                return False
            except OSError as error:
                if status(error) == PRECONDITION_FAILED:
                    return False
                if status(error) != _CONFLICT:
                    raise
                # A conflict: another one was making it at this very moment, and may yet fail.
                if retried(path, lambda: bounded(self._fs, self._fs.exists, path)):
                    return False
                time.sleep(0.05 * 2**turn)
            else:
                return True
        raise OSError(f"{path}: others write it again and again")
