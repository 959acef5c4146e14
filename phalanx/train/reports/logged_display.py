"""What is shown of a run goes into its log file, too, as the plain lines of a pipe."""

from __future__ import annotations

from rich.console import Console

from phalanx.telemetry.run_log import RunLog, copy_stderr
from phalanx.train.reports.callbacks import StepReport
from phalanx.train.reports.display import Display, EvaluationProgress, PlainDisplay


class _LogLines(PlainDisplay):
    """Lines that go into a log alone."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(Console(emoji=False, quiet=True))
        self._log = log

    def note(self, text: str) -> None:
        """Append it."""
        self._log.note(text)


class LoggedDisplay:
    """Shows a run on another display, and writes the same down; implements `phalanx.train.reports.display.Display`.

    Args:
        is_first: on rank 0, whose figures are the run's; others, whose rates are of their own clocks, write the step.
    """

    def __init__(self, shown: Display, log: RunLog, *, is_first: bool = True) -> None:
        self._shown, self._log, self._lines, self._is_first = shown, log, _LogLines(log), is_first

    def note(self, text: str) -> None:
        """Say something once."""
        self._lines.note(text)
        self._shown.note(text)

    def show(self, report: StepReport) -> None:
        """Show how far training is."""
        if self._is_first:
            self._lines.show(report)
        else:
            self._log.note(f"step {report.step}/{report.total_steps}")
        self._shown.show(report)
        copy_stderr(self._log)  # a live display that has begun takes what is written to stderr

    def evaluating(self, progress: EvaluationProgress | None) -> None:
        """Show how far an evaluation is; None: it has ended."""
        self._lines.evaluating(progress)
        self._shown.evaluating(progress)
        copy_stderr(self._log)

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._shown.close()
