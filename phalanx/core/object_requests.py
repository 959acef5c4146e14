"""Requests to object stores: tried again where that may help, bounded in time, and one error that names the object."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError

from phalanx.core.files import StoreFailedError, StoreRefusedError

T = TypeVar("T")

# Before each further try, give or take half, so that thousands of ranks do not come back together; beside the tries
# that the client library makes by itself.
WAITS_S = (0.2, 0.8, 3.0)
PATIENCE_S = 60.0  # for a request, with the client library's own tries, beside the time for what it carries
LISTING_S = 600.0  # for one that is many: a listing has a thousand names a page
SLOWEST_BYTES_PER_S = 128 << 10  # a connection that is slower counts as hung

_FINAL: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
PRECONDITION_FAILED = 412


def retried(path: str, work: Callable[[], T]) -> T:
    """Do `work` on the object at `path`, a few times if need be.

    Raises:
        StoreFailedError: it failed for good; FileNotFoundError and the like at once. Names `path`.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return work()
        except Exception as error:  # of the client library: most of its errors are not OSErrors
            final = next((kind for kind in _FINAL if isinstance(error, kind)), None)
            if final is not None:
                kind = StoreRefusedError if final is PermissionError else final
                cause = cause_of(error)
                if cause.strip("/") in path:  # fsspec's message is often the path and nothing else
                    cause = os.strerror(_FINAL[final])
                raise kind(_FINAL[final], cause, path) from error
            if wait_s is None or status(error) == PRECONDITION_FAILED:
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                raise StoreFailedError(number, _answer(error) + cause_of(error), path) from error
            time.sleep(wait_s * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


def bounded(
    fs: Any, call: Callable[..., T], *args: Any, limit_s: float = 0.0, size_bytes: int = 0, **options: Any
) -> T:
    """Call a method of the file system `fs`, and give up where its answer does not come; without a limit where it is
    not one of fsspec's asynchronous file systems.

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


def _answer(error: BaseException) -> str:
    """``503 SlowDown: `` of an error that is an HTTP answer, as far as its message does not say that already."""
    number, code, message = status(error), "", cause_of(error)
    cause: BaseException | None = error
    while cause is not None and not code:
        response = getattr(cause, "response", None)
        code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
        cause = cause.__cause__
    words = [word for word in (str(number or ""), code) if word and word not in message]
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
    """The first line of an error, or its type where it has no message."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (str(message).splitlines() or [""])[0][:400] or type(error).__name__
