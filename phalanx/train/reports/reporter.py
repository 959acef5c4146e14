"""From step reports to what a person sees and to what is kept: the display, and every metrics logger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from phalanx.checkpoint.session.snapshot_outcomes import Event
from phalanx.core import units
from phalanx.data.batch import Batch
from phalanx.telemetry.loggers import Kind, MetricsLogger
from phalanx.train.evaluate import Evaluation, HeldOut
from phalanx.train.predicted_cost import Expected
from phalanx.train.reports.display import Display, Status, shown
from phalanx.train.reports.prediction_check import Watch
from phalanx.train.reports.step_record import StepReport
from phalanx.train.training_run import Run

_FORWARD_SHARE = 3.0  # a forward pass costs a third of a forward and a backward pass


class Reporter:
    """Turns reports into figures: MFU, memory, time left.

    Args:
        flops_per_token: of forward and backward, from the model's shapes.
        expected: what the run's first steps are held against; None: nothing.
        base_bytes: memory of the process before anything of the run was made.
        clock: seconds.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch = Watch(expected, run, display.note, base_bytes)
        self._run = run
        self._display = display
        self._logger = logger
        self._flops_per_token = flops_per_token
        self._clock = clock
        self._evaluation_s_per_token = 0.0

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
        if shown:
            self._display.show(Status(newest, self._run.total_steps, mfu, memory_bytes, self._left_s(newest)))

    def watched(self, text: HeldOut, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches` of `text`, shown as they are looked at; how long they take is noted for what is left."""
        step, length = self._run.progress.step, self._run.config.data.sequence_length
        began_s, done = self._clock(), 0
        for batch in shown(self._display, step, length, text, batches, self.evaluation_s(text), self._clock):
            yield batch
            done += len(batch)
            self._evaluation_s_per_token = (self._clock() - began_s) / (done * length)

    def evaluation_s(self, text: HeldOut) -> float:
        """How long looking at `text` takes by what was seen so far; 0: nothing was."""
        return self._evaluation_s_per_token * text.samples * self._run.config.data.sequence_length

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Log and show held-out figures; those that were ended early are only shown."""
        if evaluation.is_whole:
            self._logger.log_event("evaluation", step, evaluation.figures())
        if evaluation.tokens:
            self._display.note(f"step {step}: held-out {describe(evaluation)}")

    def _left_s(self, newest: StepReport) -> float | None:
        """Until all is done; None while only the first step was seen, which compiles and tells nothing of the rest."""
        steps = self._run.total_steps - newest.step
        if newest.usual_s is None:
            return None if steps else self._evaluations_left_s(newest)
        return steps * newest.usual_s + self._evaluations_left_s(newest)

    def _evaluations_left_s(self, newest: StepReport) -> float:
        """Evaluations from this step on; before one was seen, a token is taken to cost a third of one trained on."""
        if not self._run.has_validation:
            return 0.0
        config, run = self._run.config, self._run
        every = config.evaluate.every_steps
        between = (run.total_steps - 1) // every - max(newest.step - 1, run.progress.evaluated) // every if every else 0
        length, final = config.data.sequence_length, run.held_out(config.evaluate.final_tokens).samples
        tokens = length * (max(between, 0) * run.held_out(config.evaluate.tokens).samples + final)
        step_tokens = newest.tokens_per_s * newest.step_s
        trained_s_per_token = (newest.usual_s or newest.step_s) / step_tokens
        return tokens * (self._evaluation_s_per_token or trained_s_per_token / _FORWARD_SHARE)

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
    bits = f", {evaluation.bits_per_byte:.4f} bits per byte" if evaluation.text_bytes else ""
    of = f" of {units.count(evaluation.held_out_tokens)}" if evaluation.held_out_tokens else ""
    early = "" if evaluation.is_whole else ", ended early"
    tokens = f"{units.count(evaluation.tokens)}{of} tokens{early}"
    return f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}{bits} ({tokens})"
