"""The progress of preparing text, shown only when there is something to prepare."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from phalanx.core import units
from phalanx.data.prepare import Progress


class PrepareDisplay:
    """Context whose `show` takes the reports of `phalanx.data.prepare.prepare`; `note` is called with each stage."""

    def __init__(self, console: Console, note: Callable[[str], None] = lambda _: None) -> None:
        self._console, self._note = console, note
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
        if progress.stage != self._stage:
            self._note(progress.stage)
        if self._console.is_terminal:
            self._redraw(progress)
        elif progress.stage != self._stage:
            self._console.print(progress.stage, markup=False, highlight=False, soft_wrap=True)
        self._stage = progress.stage

    def _redraw(self, progress: Progress) -> None:
        if self._bar is None:
            texts = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
            self._bar = Bar(SpinnerColumn(), *texts, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None, note="")
            self._bar.start()
        note = ""
        if progress.total_bytes:
            note = f"{units.size(progress.done_bytes)} of {units.size(progress.total_bytes)}"
            note += f", {units.count(progress.num_tokens)} tokens" if progress.num_tokens else ""
        self._bar.update(
            self._task,
            description=escape(progress.stage),
            completed=progress.done_bytes,
            total=progress.total_bytes or None,
            note=note,
        )
