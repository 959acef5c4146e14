"""Reports with their MFU, memory and time left, sent to the metrics, the display and a user's callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.checkpoint.session.snapshot_outcomes import SnapshotEvent
from phalanx.core import units
from phalanx.data.batch import Batch
from phalanx.telemetry.loggers import MetricsLogger
from phalanx.train.evaluation import Evaluation, HeldOut
from phalanx.train.reports.callbacks import Callback, CheckpointReport, StepReport, UserCallbacks
from phalanx.train.reports.display import Display, shown
from phalanx.train.reports.prediction_check import Watch
from phalanx.train.run_progress import RunProgress

LONGER = "where prompts are longer than samples, set data.sequence_length or train.global_batch higher"
_FORWARD_SHARE = 3.0  # a forward pass costs a third of a forward and a backward pass


@dataclass(frozen=True)
class RunSizes:
    """What figures of steps are derived with."""

    total_steps: int
    length: int  # tokens of a sample
    flops_per_token: float  # of forward and backward, from the model's shapes
    peak_flops_per_s: float | None  # of the devices of all ranks; None: unknown
    memory_bytes: Callable[[], int]  # memory in use on this rank
    samples_left: Callable[[int], int]  # held-out samples to be evaluated from a step on


class Reporter:
    """Reports what happens in a run.

    Args:
        watch: times the first steps.
        callbacks: a user's; called after the metrics and the display.
        clock: seconds.

    Attributes:
        newest: the step that was reported last; None: none was.
    """

    def __init__(
        self,
        sizes: RunSizes,
        progress: RunProgress,
        display: Display,
        logger: MetricsLogger,
        watch: Watch,
        callbacks: tuple[Callback, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch, self.callbacks = watch, UserCallbacks(callbacks)
        self.newest: StepReport | None = None
        self._own: tuple[Callback, ...] = (_Metrics(logger), _Shown(display))
        self._sizes, self._progress = sizes, progress
        self._display, self._logger, self._clock = display, logger, clock
        self._evaluation_s_per_token = 0.0
        self._is_told = False  # that a step had no target

    def report(self, reports: list[StepReport], *, shown: bool = True) -> None:
        """Report every step; the newest is shown, unless it is not `shown`."""
        # Memory and MFU are of all steps that are reported together: between two of them the host does not wait for the
        # device, so it cannot know those of one.
        sizes, memory_bytes = self._sizes, self._sizes.memory_bytes() if reports else 0
        for report in reports:
            is_shown = shown and report is reports[-1]
            peak = sizes.peak_flops_per_s
            full = replace(
                report,
                total_steps=sizes.total_steps,
                mfu=None if peak is None else reports[-1].tokens_per_s * sizes.flops_per_token / peak,
                memory_bytes=memory_bytes,
                left_s=self._left_s(report) if is_shown else None,
                is_shown=is_shown,
            )
            # Before a checkpoint is taken all steps are reported, so its counters include the time of each.
            self._progress.train_s += report.step_s
            self._note_untrained(report)
            self.newest = full
            self._call("on_step", report.step, full)

    def _note_untrained(self, report: StepReport) -> None:
        """Count a step that trained nothing; of each start the first is told."""
        if not report.untrained:
            return
        self._progress.untrained += 1
        if not self._is_told:
            self._is_told = True
            self._display.note(
                f"step {report.step}: no token of its batch is a target, so it changes nothing; {LONGER}"
            )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Report held-out figures."""
        self._call("on_evaluate", step, step, evaluation)

    def kept(self, events: list[SnapshotEvent]) -> bool:
        """Report what became of snapshots; says whether there was any."""
        for event in events:
            report = CheckpointReport(event.step, event.persist, event.name, event.problem, event.figures())
            self._call("on_checkpoint", event.step, report)
        return bool(events)

    def note_profile(self, path: Path | None) -> None:
        """Say where a profile was written, if one was."""
        if path is not None:
            self._display.note(f"profile {path} (open it in chrome://tracing or perfetto)")

    def flush(self) -> None:
        """Make durable what was logged, so that a checkpoint never knows of steps that the metrics lack."""
        self._logger.flush()

    def watched(self, text: HeldOut, batches: Iterable[Batch]) -> Iterator[Batch]:
        """`batches` of `text`, shown as they are evaluated; how long they take is noted for what is left."""
        step, length = self._progress.step, self._sizes.length
        began_s, done = self._clock(), 0
        for batch in shown(self._display, step, length, text, batches, self.evaluation_s(text), self._clock):
            yield batch
            done += len(batch)
            self._evaluation_s_per_token = (self._clock() - began_s) / (done * length)

    def evaluation_s(self, text: HeldOut) -> float:
        """How long evaluating `text` takes by what was seen so far; 0: nothing was."""
        return self._evaluation_s_per_token * text.samples * self._sizes.length

    def _left_s(self, newest: StepReport) -> float | None:
        """Until all is done; None while only the first step was seen, whose time says nothing about the rest."""
        steps = self._sizes.total_steps - newest.step
        if newest.usual_s is None:
            return None if steps else self._evaluations_left_s(newest)
        return steps * newest.usual_s + self._evaluations_left_s(newest)

    def _evaluations_left_s(self, newest: StepReport) -> float:
        """Before an evaluation was seen, a token of it is taken to cost a third of one trained on."""
        trained_s_per_token = (newest.usual_s or newest.step_s) / (newest.tokens_per_s * newest.step_s)
        tokens = self._sizes.length * self._sizes.samples_left(newest.step)
        return tokens * (self._evaluation_s_per_token or trained_s_per_token / _FORWARD_SHARE)

    def _call(self, method: str, step: int, *reported: object) -> None:
        for callback in self._own:  # their errors, such as a full disk, end the run at once
            getattr(callback, method)(*reported)
        self.callbacks.call(method, step, *reported)


class _Metrics(Callback):
    """Writes the figures to every metrics logger."""

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def on_step(self, report: StepReport) -> None:
        values: dict[str, float | int | str] = {
            "loss": report.loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "skipped": int(report.skipped),
            "tokens": report.tokens,
            "tokens_per_s": report.tokens_per_s,
            "step_s": report.step_s,
            "memory_bytes": report.memory_bytes,
        }
        if report.mfu is not None:
            values["mfu"] = report.mfu
        if report.untrained:  # its loss is no number that went wrong: there is none
            del values["loss"]
            values["untrained"] = 1
        self._logger.log(report.step, values)

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        if evaluation.is_whole:  # one that was ended early is made up for by the next start
            self._logger.log_event("evaluation", step, evaluation.figures())

    def on_checkpoint(self, report: CheckpointReport) -> None:
        texts = {"checkpoint/name": report.name, "checkpoint/problem": report.problem}
        values: dict[str, float | int | str] = dict(report.figures)
        values |= {name: text for name, text in texts.items() if text}
        self._logger.log_event("checkpoint" if report.persist else "snapshot", report.step, values)


class _Shown(Callback):
    """Shows a person the newest step, evaluations and durable checkpoints."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def on_step(self, report: StepReport) -> None:
        if report.is_shown:
            self._display.show(report)

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        if evaluation.tokens or evaluation.is_whole:
            self._display.note(f"step {step}: held-out {describe(evaluation)}")

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """``step 20: checkpoint step-00000020 (3.1 MB, stall 4 ms, durable after 0.21 s)``."""
        if not report.name:
            return
        figure = {name.removeprefix("checkpoint/"): value for name, value in report.figures.items()}
        parts = [units.size(figure["persist_bytes"])] if figure["persist_bytes"] else []
        parts.append(f"stall {figure['stall_s'] * 1e3:.0f} ms")
        if figure["durable_s"]:
            parts.append(f"durable after {figure['durable_s']:.2f} s")
        if figure["put_off"]:
            parts.append(f"{figure['put_off']:.0f} steps late")
        if figure["skipped"]:
            parts.append(f"{figure['skipped']:.0f} skipped before it")
        self._display.note(f"step {report.step}: checkpoint {report.name} ({', '.join(parts)})")


def describe(evaluation: Evaluation) -> str:
    """One line of held-out figures."""
    if not evaluation.tokens:
        return "no token that was looked at is a target, so there is no loss"
    bits = f", {evaluation.bits_per_byte:.4f} bits per byte" if evaluation.text_bytes else ""
    of = f" of {units.count(evaluation.held_out_tokens)}" if evaluation.held_out_tokens else ""
    early = "" if evaluation.is_whole else ", ended early"
    tokens = f"{units.count(evaluation.tokens)}{of} tokens{early}"
    return f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}{bits} ({tokens})"
