"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from phalanx.core import units
from phalanx.data.batch import Batch
from phalanx.train.evaluation import HeldOut
from phalanx.train.reports.callbacks import StepReport

_GAP = 2
_ECHO = 2  # left free at the end of the last line, where a terminal shows ^C, lest it wrap and leave debris
_LINE_EVERY_S = 30.0
_LEAST_URGENT_FIRST = ("memory", "MFU", "lr", "grad norm", "tokens/s")


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation on held-out text is."""

    step: int  # after which it is made
    tokens: int  # of `total`, evaluated so far
    total: int
    left_s: float  # expected time to its end; 0: not known


class Display(Protocol):
    """Shows a run to a person."""

    def note(self, text: str) -> None:
        """Say something once."""

    def show(self, report: StepReport) -> None:
        """Show how far training is."""

    def evaluating(self, progress: EvaluationProgress | None) -> None:
        """Show how far an evaluation is; None: it has ended."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


def format_step(report: StepReport) -> list[tuple[str, str]]:
    """Name and text of every figure, in the order in which they are read."""
    return [
        ("step", f"{report.step}/{report.total_steps}"),
        ("loss", "no targets" if report.untrained else f"{report.loss:.4f}" + (" skipped" if report.skipped else "")),
        ("lr", f"{report.lr:.2e}"),
        ("grad norm", f"{report.grad_norm:.3f}"),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("MFU", "n/a" if report.mfu is None else f"{report.mfu:.1%}"),
        ("memory", units.size(report.memory_bytes)),
        ("left", "n/a" if report.left_s is None else units.duration(report.left_s)),
    ]


def fitting(figures: list[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Those figures that fit side by side into `width` columns; the first to go are the least urgent."""
    kept = list(figures)
    for name in _LEAST_URGENT_FIRST:
        if sum(max(len(title), len(text)) + _GAP for title, text in kept) <= width:
            break
        kept = [figure for figure in kept if figure[0] != name]
    return kept


class PlainDisplay:
    """One line per report, for log files and pipes, and one now and then in an evaluation."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self._clock = console, clock
        self._printed_s: float | None = None

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, report: StepReport) -> None:
        """Print every figure on one line."""
        self.note("  ".join(f"{name} {text}" for name, text in format_step(report)))

    def evaluating(self, progress: EvaluationProgress | None) -> None:
        """Print a line every half a minute."""
        if progress is None or self._printed_s is None:
            self._printed_s = None if progress is None else self._clock()
        elif self._clock() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = self._clock()
            self.note(f"step {progress.step}: evaluating, {evaluating_text(progress)}")

    def close(self) -> None:
        """Nothing to undo."""


class LiveDisplay:
    """Progress bars and a row of figures that are redrawn in place; notes scroll by above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>5.1f}%"),
            TextColumn("{task.fields[note]}"),
            expand=True,
        )
        self._training: TaskID | None = None
        self._evaluating: TaskID | None = None
        self._figures: Table | None = None
        self._live = Live(console=console, refresh_per_second=4)

    def note(self, text: str) -> None:
        """Print a line above the live part."""
        self.console.print(text, markup=False, highlight=False)

    def show(self, report: StepReport) -> None:
        """Redraw the bar and the figures."""
        if self._training is None:
            self._training = self._bar.add_task("training", total=report.total_steps, note="")
        self._bar.update(self._training, completed=report.step)
        figures = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
        row = fitting(format_step(report), self.console.width - _ECHO)
        for name, _ in row:
            figures.add_column(name, justify="right", no_wrap=True)
        figures.add_row(*(text for _, text in row))
        self._figures = figures
        self._redraw()

    def evaluating(self, progress: EvaluationProgress | None) -> None:
        """Redraw the bar of the evaluation, which is there as long as it goes on."""
        if progress is None:
            if self._evaluating is not None:
                self._bar.remove_task(self._evaluating)
            self._evaluating = None
            return
        if self._evaluating is None:
            self._evaluating = self._bar.add_task("evaluating", total=progress.total, note="")
            self._redraw()
        self._bar.update(self._evaluating, completed=progress.tokens, note=evaluating_text(progress))

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        if self._live.is_started:
            self._live.stop()

    def _redraw(self) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._bar if self._figures is None else Group(self._bar, self._figures))


def shown(
    display: Display,
    step: int,
    length: int,
    text: HeldOut,
    batches: Iterable[Batch],
    expected_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Batch]:
    """`batches` of `text`, shown as they are evaluated.

    Args:
        step: whose model is evaluated.
        length: tokens of a sample.
        expected_s: how long all may take; 0: not known.
    """
    began_s, done, total = clock(), 0, text.samples * length
    display.evaluating(EvaluationProgress(step, 0, total, expected_s))
    try:
        for batch in batches:
            yield batch
            done = min(done + len(batch), text.samples)
            left_s = (clock() - began_s) / done * (text.samples - done)
            display.evaluating(EvaluationProgress(step, done * length, total, left_s))
    finally:
        display.evaluating(None)


def evaluating_text(progress: EvaluationProgress) -> str:
    """``120k of 500k tokens, left 12s``."""
    left = f", left {units.duration(progress.left_s)}" if progress.left_s else ""
    return f"{units.count(progress.tokens)} of {units.count(progress.total)} tokens{left}"


def make_display(console: Console) -> Display:
    """Live where the console is a terminal, plain elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
