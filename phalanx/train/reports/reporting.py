"""From step reports to what a person sees and to what is kept: the display, and every metrics logger."""

from __future__ import annotations

from pathlib import Path

from phalanx.core import units
from phalanx.telemetry.loggers import MetricsLogger
from phalanx.train.evaluate import Evaluation
from phalanx.train.reports.display import Display, Status
from phalanx.train.reports.record import StepReport
from phalanx.train.run import Run


class Reporter:
    """Turns reports into figures: MFU, memory, time left.

    Args:
        flops_per_token: of forward and backward, from the model's shapes.
    """

    def __init__(self, run: Run, display: Display, logger: MetricsLogger, flops_per_token: float) -> None:
        self._run = run
        self._display = display
        self._logger = logger
        self._flops_per_token = flops_per_token
        self._last_evaluation: Evaluation | None = None

    def report(self, reports: list[StepReport]) -> None:
        """Log every step and show the newest."""
        if not reports:
            return
        memory_bytes = self._run.device.memory_in_use_bytes()
        mfu = self._mfu(reports[-1])
        for report in reports:
            self._logger.log(report.step, self._values(report, mfu, memory_bytes))
        newest = reports[-1]
        self._run.progress.train_s += sum(report.step_s for report in reports)
        left_s = (self._run.total_steps - newest.step) * newest.step_s
        self._display.show(Status(newest, self._run.total_steps, mfu, memory_bytes, left_s))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Log and show held-out figures."""
        values = {
            "validation_loss": evaluation.loss,
            "validation_perplexity": evaluation.perplexity,
            "validation_bits_per_byte": evaluation.bits_per_byte,
            "validation_tokens": evaluation.tokens,
        }
        self._logger.log_evaluation(step, values)
        self._display.note(f"step {step}: held-out {describe(evaluation)}")

    def flush(self) -> None:
        """Make durable what was logged, so that a checkpoint never knows of steps that the metrics lack."""
        self._logger.flush()

    def saved(self, path: Path) -> None:
        """Say where a checkpoint was written."""
        self._display.note(f"step {self._run.progress.step}: checkpoint {path}")

    def note_profile(self, path: Path | None) -> None:
        """Say where a profile was written, if one was."""
        if path is not None:
            self._display.note(f"profile {path} (open it in chrome://tracing or perfetto)")

    def _mfu(self, report: StepReport) -> float | None:
        peak = self._run.peak
        if peak is None:
            return None
        return report.tokens_per_s * self._flops_per_token / (peak.flops_per_s * self._run.ranks.size)

    def _values(self, report: StepReport, mfu: float | None, memory_bytes: int) -> dict[str, float | int | str]:
        values: dict[str, float | int | str] = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "skipped": int(report.skipped),
            "tokens": report.tokens,
            "tokens_per_s": report.tokens_per_s,
            "step_s": report.step_s,
            "memory_bytes": memory_bytes,
        }
        if mfu is not None:
            values["mfu"] = mfu
        return values


def describe(evaluation: Evaluation) -> str:
    """One line of held-out figures."""
    return (
        f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, "
        f"{evaluation.bits_per_byte:.4f} bits per byte ({units.count(evaluation.tokens)} tokens)"
    )
