"""Storage behind a network: try again what may pass, and then say in one error which object it was. Torch-free."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAITS_S = (0.2, 0.8, 3.0)
"""Before each further try, seconds; beside the tries that the client library makes by itself."""

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
        OSError: it failed for good; FileNotFoundError and the like at once. Names `path`.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return work()
        except Exception as error:  # of the client library: most of its errors are no OSErrors
            final = next((kind for kind in _FINAL if isinstance(error, kind)), None)
            if final is not None:
                raise final(_FINAL[final], _cause_at(path, error, _FINAL[final]), path) from error
            if wait_s is None or status(error) == _PRECONDITION_FAILED:
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                raise OSError(number, cause_of(error), path) from error
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def _cause_at(path: str, error: BaseException, number: int) -> str:
    """What fsspec says is often the path and nothing else."""
    said = cause_of(error)
    return os.strerror(number) if said.strip("/") in path else said


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
