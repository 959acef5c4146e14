"""Tasks that nobody awaits: what they raise is told to their loop, whose handler writes it down.

asyncio itself says so only when a task is thrown away, and of one that is held it never does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def told(task: asyncio.Task[T], what: str) -> asyncio.Task[T]:
    """Have the loop's exception handler told when this task fails; gives the task.

    Args:
        what: it does, such as ``the end of host-3``.
    """
    task.add_done_callback(partial(_tell, what))
    return task


def _tell(what: str, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": f"{what} has failed", "exception": error, "task": task})
