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
from phalanx.train.evaluate import HeldOut
from phalanx.train.reports.step_record import StepReport

_GAP = 2
_ECHO = 2  # left free at the end of the last line, where a terminal shows ^C, lest it wrap and leave debris
_SAID_EVERY_S = 30.0
_LEAST_URGENT_FIRST = ("memory", "MFU", "lr", "grad norm", "tokens/s")


@dataclass(frozen=True)
class Status:
    """A step as it is shown: the report and what was derived from it.

    Attributes:
        mfu: share of the device's peak rate, or None where the peak is unknown.
        memory_bytes: memory in use.
        left_s: expected time to the end; None: not known yet.
    """

    report: StepReport
    total_steps: int
    mfu: float | None
    memory_bytes: int
    left_s: float | None


@dataclass(frozen=True)
class Looked:
    """How far looking at held-out text is.

    Attributes:
        step: after which it is looked at.
        tokens: that were looked at.
        total: tokens to look at.
        left_s: expected time until then; 0: not known.
    """

    step: int
    tokens: int
    total: int
    left_s: float


class Display(Protocol):
    """Shows a run to a person."""

    def note(self, text: str) -> None:
        """Say something once."""

    def show(self, status: Status) -> None:
        """Show how far training is."""

    def evaluating(self, looked: Looked | None) -> None:
        """Show how far looking at held-out text is; None: it has ended."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


def format_status(status: Status) -> list[tuple[str, str]]:
    """Name and text of every figure, in the order in which they are read."""
    report = status.report
    return [
        ("step", f"{report.step}/{status.total_steps}"),
        ("loss", f"{report.loss:.4f}" + (" skipped" if report.skipped else "")),
        ("lr", f"{report.lr:.2e}"),
        ("grad norm", f"{report.grad_norm:.3f}"),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("MFU", "n/a" if status.mfu is None else f"{status.mfu:.1%}"),
        ("memory", units.size(status.memory_bytes)),
        ("left", "n/a" if status.left_s is None else units.duration(status.left_s)),
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
    """One line per report, for log files and pipes, and one now and then while held-out text is looked at."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self._clock = console, clock
        self._said_s: float | None = None

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: Status) -> None:
        """Print every figure on one line."""
        self.note("  ".join(f"{name} {text}" for name, text in format_status(status)))

    def evaluating(self, looked: Looked | None) -> None:
        """Print a line every half a minute."""
        if looked is None or self._said_s is None:
            self._said_s = None if looked is None else self._clock()
        elif self._clock() - self._said_s >= _SAID_EVERY_S:
            self._said_s = self._clock()
            self.note(f"step {looked.step}: evaluating, {evaluating_text(looked)}")

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
        self._started = False

    def note(self, text: str) -> None:
        """Print a line above the live part."""
        self.console.print(text, markup=False, highlight=False)

    def show(self, status: Status) -> None:
        """Redraw the bar and the figures."""
        if self._training is None:
            self._training = self._bar.add_task("training", total=status.total_steps, note="")
        self._bar.update(self._training, completed=status.report.step)
        figures = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
        row = fitting(format_status(status), self.console.width - _ECHO)
        for name, _ in row:
            figures.add_column(name, justify="right", no_wrap=True)
        figures.add_row(*(text for _, text in row))
        self._figures = figures
        self._redraw()

    def evaluating(self, looked: Looked | None) -> None:
        """Redraw the bar of the evaluation, which is there as long as it goes on."""
        if looked is None:
            if self._evaluating is not None:
                self._bar.remove_task(self._evaluating)
            self._evaluating = None
            return
        if self._evaluating is None:
            self._evaluating = self._bar.add_task("evaluating", total=looked.total, note="")
            self._redraw()
        self._bar.update(self._evaluating, completed=looked.tokens, note=evaluating_text(looked))

    def close(self) -> None:
        """Stop redrawing; the last state stays on the screen."""
        if self._started:
            self._live.stop()

    def _redraw(self) -> None:
        if not self._started:
            self._live.start()
            self._started = True
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
    """`batches` of `text`, shown as they are looked at.

    Args:
        step: whose model looks at them.
        length: tokens of a sample.
        expected_s: how long all may take; 0: that is not known.
    """
    began_s, done, total = clock(), 0, text.samples * length
    display.evaluating(Looked(step, 0, total, expected_s))
    try:
        for batch in batches:
            yield batch
            done = min(done + len(batch), text.samples)
            left_s = (clock() - began_s) / done * (text.samples - done)
            display.evaluating(Looked(step, done * length, total, left_s))
    finally:
        display.evaluating(None)


def evaluating_text(looked: Looked) -> str:
    """``120k of 500k tokens, left 12s``."""
    left = f", left {units.duration(looked.left_s)}" if looked.left_s else ""
    return f"{units.count(looked.tokens)} of {units.count(looked.total)} tokens{left}"


def make_display(console: Console) -> Display:
    """Live where the console is a terminal, plain elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
