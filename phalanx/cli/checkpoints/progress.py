"""A bar on the terminal's error stream for what takes long; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

T = TypeVar("T")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """`items` one after another."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not _is_seen(console)) as p:
        task = p.add_task(what, total=len(items))
        for item in items:
            yield item
            p.advance(task)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """What is yielded is called with the number of bytes that have been done since."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not _is_seen(console)) as p:
        task = p.add_task(what, total=total)
        yield lambda count: p.advance(task, count)


def _is_seen(console: Console) -> bool:
    return console.is_terminal
