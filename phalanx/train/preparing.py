"""The progress bar of preparing text, shown only when there is something to prepare."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from phalanx.data.prepare import Progress


class PrepareDisplay:
    """Context whose `show` takes the reports of `phalanx.data.prepare.prepare`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._stage = ""

    def __enter__(self) -> PrepareDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """A line per stage where the console is no terminal, a bar where it is."""
        if not self._console.is_terminal:
            if progress.stage != self._stage:
                self._stage = progress.stage
                self._console.print(progress.stage, markup=False, highlight=False)
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(progress.stage, total=None)
            self._bar.start()
        total = progress.total_bytes or None
        self._bar.update(self._task, description=progress.stage, completed=progress.done_bytes, total=total)
