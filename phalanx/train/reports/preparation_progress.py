"""The progress of preparing text, shown only when there is something to prepare."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from phalanx.core import units
from phalanx.data.prepare import Progress


class PrepareDisplay:
    """Context whose `show` takes the reports of `phalanx.data.prepare.prepare`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._stage = ""

    def __enter__(self) -> PrepareDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """A line per stage where the console is not a terminal; where it is, one line that goes when all is done."""
        if self._console.is_terminal:
            self._redraw(progress)
        elif progress.stage != self._stage:
            self._console.print(progress.stage, markup=False, highlight=False, soft_wrap=True)
        self._stage = progress.stage

    def _redraw(self, progress: Progress) -> None:
        if self._bar is None:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Bar(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None, note="")
            self._bar.start()
        self._bar.update(
            self._task,
            description=escape(progress.stage),
            completed=progress.done_bytes,
            total=progress.total_bytes or None,
            note=_amounts(progress),
        )


def _amounts(progress: Progress) -> str:
    """How much is done, as far as that is known."""
    if not progress.total_bytes:
        return ""
    tokens = f", {units.count(progress.num_tokens)} tokens" if progress.num_tokens else ""
    return f"{units.size(progress.done_bytes)} of {units.size(progress.total_bytes)}{tokens}"
