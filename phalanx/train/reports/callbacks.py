"""What is called as a run goes on: the metrics, the display and a user's own code all implement `Callback`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from phalanx.core.errors import UserError
from phalanx.train.evaluation import Evaluation

Answer = Literal["stop"] | None
"""What a callback returns: "stop" ends the run after the next step, with a checkpoint, as a signal would."""


@dataclass(frozen=True)
class StepReport:
    """One finished step, as plain numbers.

    Attributes:
        step: counted from 1.
        loss: mean cross-entropy per weighted token, nats; without the z-loss term; NaN where no token has a weight.
        grad_norm: norm of the gradient before clipping.
        lr: base learning rate of the step.
        skipped: the bad-step policy left this update out.
        tokens: tokens read from the start of the run to the end of this step.
        tokens_per_s: rate over the steps reported together with this one.
        step_s: mean wall time of those steps.
        usual_s: the same without the first step of the process, which compiles and warms up; None: there was no other.
        total_steps: of the whole run.
        mfu: share of the devices' peak rate; None where the peak is unknown.
        memory_bytes: memory in use on this rank.
        left_s: expected time to the end of the run; None: not known yet, or this step is not shown.
        is_shown: it is one of those that the terminal shows, the newest of `logging.every_steps`.
        untrained: no token of its batch is a target, so it changed nothing.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    tokens: int
    tokens_per_s: float
    step_s: float
    usual_s: float | None = None
    total_steps: int = 0
    mfu: float | None = None
    memory_bytes: int = 0
    left_s: float | None = None
    is_shown: bool = False
    untrained: bool = False


@dataclass(frozen=True)
class CheckpointReport:
    """What became of a snapshot of the run's state.

    Attributes:
        step: optimizer steps done.
        persist: it was to become a durable checkpoint; else it stays in the memory of hosts.
        name: of the durable checkpoint; empty: there is none.
        problem: what went wrong; empty: nothing.
        figures: seconds and bytes, by their names in metrics.jsonl, such as ``checkpoint/stall_s``.
    """

    step: int
    persist: bool
    name: str = ""
    problem: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Override what you want to hear of. Each method is called on rank 0 alone, and may return "stop"."""

    def on_step(self, report: StepReport) -> Answer:
        """A step has ended. Called for each, in order, when its figures are read from the device: up to
        `logging.every_steps` later, and before any checkpoint that contains the step."""

    def on_evaluate(self, step: int, evaluation: Evaluation) -> Answer:
        """The model of `step` has been evaluated on held-out text."""

    def on_checkpoint(self, report: CheckpointReport) -> Answer:
        """A snapshot has become durable, stays in memory as it was to, or has failed."""


class CallbackError(UserError):
    """A user's callback raised. The run was stopped with a checkpoint, from which the next start goes on."""


class UserCallbacks:
    """Calls a user's callbacks; the first that fails, or asks for it, has the run stopped.

    Attributes:
        stop: the run is to stop.
        error: what the first failed callback is reported as; None: none failed.
    """

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks
        self.stop = False
        self.error: CallbackError | None = None

    def call(self, method: str, step: int, *reported: object) -> None:
        """Call a method of each callback with what is `reported` of a step."""
        for callback in self._callbacks:
            if self.error is not None:
                return
            try:
                answer = getattr(callback, method)(*reported)
                if answer not in (None, "stop"):
                    raise TypeError(f'returned {answer!r}, neither None nor "stop"')
            except Exception as error:
                # Not raised here, in the middle of a step: the loop stops as if it were asked to, and raises it when
                # the last checkpoint is durable.
                self.error = CallbackError(
                    f"{type(callback).__name__}.{method} failed at step {step} ({type(error).__name__}: {error})",
                    cure="mend it, or leave it out; the run goes on from its newest checkpoint",
                )
                self.error.__cause__ = error
                self.stop = True
            else:
                self.stop = self.stop or answer is not None
