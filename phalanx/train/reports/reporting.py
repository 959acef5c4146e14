"""From step reports to what a person sees and to what is kept: the display, and every metrics logger."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.session.ledger import Event
from phalanx.core import units
from phalanx.telemetry.loggers import Kind, MetricsLogger
from phalanx.train.evaluate import Evaluation
from phalanx.train.expected import Expected
from phalanx.train.reports.comparing import Watch
from phalanx.train.reports.display import Display, Status
from phalanx.train.reports.record import StepReport
from phalanx.train.run import Run


class Reporter:
    """Turns reports into figures: MFU, memory, time left.

    Args:
        flops_per_token: of forward and backward, from the model's shapes.
        expected: what the run's first steps are held against; None: nothing.
        base_bytes: memory of the process before anything of the run was made.

    Attributes:
        watch: times the first steps.
    """

    def __init__(
        self,
        run: Run,
        display: Display,
        logger: MetricsLogger,
        flops_per_token: float,
        expected: Expected | None = None,
        base_bytes: int = 0,
    ) -> None:
        self.watch = Watch(expected, run, display.note, base_bytes)
        self._run = run
        self._display = display
        self._logger = logger
        self._flops_per_token = flops_per_token
        self._last_evaluation: Evaluation | None = None

    def report(self, reports: list[StepReport], *, shown: bool = True) -> None:
        """Log every step and show the newest, unless it is not `shown`."""
        if not reports:
            return
        memory_bytes = self._run.device.memory_in_use_bytes()
        mfu = self._mfu(reports[-1])
        for report in reports:
            self._logger.log(report.step, self._values(report, mfu, memory_bytes))
        newest = reports[-1]
        self._run.progress.train_s += sum(report.step_s for report in reports)
        left_s = (self._run.total_steps - newest.step) * newest.step_s
        if shown:
            self._display.show(Status(newest, self._run.total_steps, mfu, memory_bytes, left_s))

    def evaluated(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Log and show held-out figures; they are returned by their names."""
        values: dict[str, float] = {
            "validation_loss": evaluation.loss,
            "validation_perplexity": evaluation.perplexity,
            "validation_bits_per_byte": evaluation.bits_per_byte,
            "validation_tokens": evaluation.tokens,
        }
        self._logger.log_event("evaluation", step, values)
        self._display.note(f"step {step}: held-out {describe(evaluation)}")
        return values

    def flush(self) -> None:
        """Make durable what was logged, so that a checkpoint never knows of steps that the metrics lack."""
        self._logger.flush()

    def kept(self, events: list[Event]) -> bool:
        """Log what became of snapshots, and show the checkpoints among them; says whether there was any."""
        for event in events:
            kind: Kind = "checkpoint" if event.persist else "snapshot"
            told = {"name": event.name, "problem": event.problem}
            values = event.figures() | {f"checkpoint/{name}": text for name, text in told.items() if text}
            self._logger.log_event(kind, event.step, values)
            if event.name:
                self._display.note(f"step {event.step}: checkpoint {event.name} ({_costs(event)})")
        return bool(events)

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


def _costs(event: Event) -> str:
    """``3.1 MB, stall 4 ms, durable after 0.21 s``."""
    parts = [units.size(event.persist_bytes)] if event.persist_bytes else []
    parts.append(f"stall {event.stall_s * 1e3:.0f} ms")
    if event.durable_s:
        parts.append(f"durable after {event.durable_s:.2f} s")
    if event.put_off:
        parts.append(f"{event.put_off} steps late")
    if event.skipped:
        parts.append(f"{event.skipped} skipped before it")
    return ", ".join(parts)


def describe(evaluation: Evaluation) -> str:
    """One line of held-out figures."""
    return (
        f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, "
        f"{evaluation.bits_per_byte:.4f} bits per byte ({units.count(evaluation.tokens)} tokens)"
    )
