"""Requests to object stores: tried again where that may help, bounded in time, and one error that names the object.

The one conditional request makes an object only if there is none of its name: `creator` knows which fsspec file systems
can do that, and how.
"""

from __future__ import annotations

import errno
import inspect
import os
import random
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from phalanx.core.errors import UserError
from phalanx.core.files import StoreFailedError, StoreRefusedError

T = TypeVar("T")

WAITS_S = (0.2, 0.8, 3.0)
"""Before each further try, seconds, give or take half, so that thousands of ranks do not come back together; beside
the tries that the client library makes by itself."""

PATIENCE_S = 60.0
"""How long a request may take, with the client library's own tries, beside the time for what it carries."""

LISTING_S = 600.0
"""How long one may take that is many: a listing has a thousand names a page."""

SLOWEST_BYTES_PER_S = 128 << 10
"""A connection that is slower counts as hung."""

_FINAL: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
_PRECONDITION_FAILED = 412


def retried(path: str, work: Callable[[], T]) -> T:
    """Do `work` on the object at `path`, a few times if need be.

    Raises:
        StoreFailedError: it failed for good; FileNotFoundError and the like at once. Names `path`.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return work()
        except Exception as error:  # of the client library: most of its errors are no OSErrors
            final = next((kind for kind in _FINAL if isinstance(error, kind)), None)
            if final is not None:
                kind = StoreRefusedError if final is PermissionError else final
                raise kind(_FINAL[final], _cause_at(path, error, _FINAL[final]), path) from error
            if wait_s is None or status(error) == _PRECONDITION_FAILED:
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                raise StoreFailedError(number, _answer(error) + cause_of(error), path) from error
            time.sleep(wait_s * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def bounded(
    fs: Any, call: Callable[..., T], *args: Any, limit_s: float = 0.0, size_bytes: int = 0, **options: Any
) -> T:
    """Call a method of the file system `fs`, and give it up where its answer does not come.

    Those of fsspec's file systems that are no asynchronous ones are asked without a limit.

    Args:
        limit_s: how long it may take; 0: `PATIENCE_S`, and the time for `size_bytes`.
        size_bytes: what is sent or comes.

    Raises:
        TimeoutError: no answer came.
    """
    if not isinstance(fs, AsyncFileSystem):
        return call(*args, **options)
    limit_s = limit_s or PATIENCE_S + size_bytes / SLOWEST_BYTES_PER_S
    try:
        return call(*args, timeout=limit_s, **options)
    except FSTimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:.0f} s") from error


def _cause_at(path: str, error: BaseException, number: int) -> str:
    """What fsspec says is often the path and nothing else."""
    said = cause_of(error)
    return os.strerror(number) if said.strip("/") in path else said


def _answer(error: BaseException) -> str:
    """``503 SlowDown: `` of an error that is an HTTP answer, as far as its message does not say that already."""
    number, code, said = status(error), "", cause_of(error)
    cause: BaseException | None = error
    while cause is not None and not code:
        response = getattr(cause, "response", None)
        code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
        cause = cause.__cause__
    words = [word for word in (str(number or ""), code) if word and word not in said]
    return " ".join(dict.fromkeys(words)) + (": " if words else "")


def status(error: BaseException | None) -> int:
    """The HTTP status that an error of the client library stands for; 0 where it has none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = getattr(error, "status", None) or getattr(error, "status_code", None) or getattr(error, "code", None)
        if isinstance(code, int):
            return code
        error = error.__cause__
    return 0


def cause_of(error: BaseException) -> str:
    """The first line of an error, or its name where it says nothing."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (str(said).splitlines() or [""])[0][:400] or type(error).__name__


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
