"""Tasks that nothing awaits: what they raise goes to their loop's exception handler, which writes it down.

asyncio itself does so only when a task is thrown away, and never for one that is held.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def report_failure(task: asyncio.Task[T], what: str) -> asyncio.Task[T]:
    """The task, whose failure its loop's handler reports; `what` it does is such as ``the end of host-3``."""
    task.add_done_callback(partial(_report, what))
    return task


def _report(what: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": f"{what} has failed", "exception": error, "task": task})
