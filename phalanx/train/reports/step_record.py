"""What each step did, kept on the device until it is printed, so that writing it down costs no synchronisation.

A window of steps can be recorded under torch.profiler, as a Chrome trace in the run folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.train.config import ProfileConfig


@dataclass(frozen=True)
class StepReport:
    """One finished step, as plain numbers.

    Attributes:
        step: counted from 1.
        loss: mean cross-entropy per weighted token, nats; without the z-loss term.
        grad_norm: norm of the gradient before clipping.
        lr: base learning rate of the step.
        skipped: the bad-step policy left this update out.
        tokens: tokens read from the start of the run to the end of this step.
        tokens_per_s: rate over the steps reported together with this one.
        step_s: mean wall time of those steps.
        usual_s: the same without the first step of the process, which compiles and warms up, for what is still to come;
            None: there was no other.
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


@dataclass
class _Pending:
    step: int
    values: Tensor  # (3,): loss, gradient norm, skipped
    lr: float
    tokens: int
    step_tokens: int


@dataclass
class StepRecord:
    """Collects steps and turns them into `StepReport`s when flushed: one device-to-host copy per flush.

    Args:
        clock: seconds, monotonic; time while `paused` (evaluation, checkpoints) is not counted.
    """

    clock: Callable[[], float] = time.perf_counter
    _pending: list[_Pending] = field(default_factory=list)
    _since_s: float = 0.0
    _warm_s: float | None = None  # when the first step was done, as far as the host had to do with it
    _is_cold: bool = False  # it is among those pending

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    def add(
        self, step: int, loss: Tensor, grad_norm: Tensor, skipped: Tensor, lr: float, tokens: int, new: int
    ) -> None:
        """Note a step; tensors are scalars on the device, `new` is the number of tokens of this step."""
        values = torch.stack([loss.detach().float(), grad_norm.detach().float(), skipped.float()])
        self._pending.append(_Pending(step, values, lr, tokens, new))
        if self._warm_s is None:
            self._warm_s, self._is_cold = self.clock(), True

    def flush(self) -> list[StepReport]:
        """Wait for the noted steps and return them, oldest first."""
        if not self._pending:
            return []
        rows = torch.stack([item.values for item in self._pending]).tolist()
        now_s = self.clock()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        rate = sum(item.step_tokens for item in self._pending) / elapsed_s
        step_s = elapsed_s / len(self._pending)
        usual_s = self._usual_s(now_s, step_s)
        self._since_s = now_s
        reports = [
            StepReport(item.step, loss, norm, item.lr, bool(skipped), item.tokens, rate, step_s, usual_s)
            for item, (loss, norm, skipped) in zip(self._pending, rows, strict=True)
        ]
        self._pending.clear()
        return reports

    def _usual_s(self, now_s: float, step_s: float) -> float | None:
        if not self._is_cold or self._warm_s is None:
            return step_s
        self._is_cold, others = False, len(self._pending) - 1
        return max(now_s - max(self._warm_s, self._since_s), 1e-9) / others if others else None

    def resume_clock(self) -> None:
        """Leave the time since the last flush out of the rates: something other than training took it."""
        self._since_s = self.clock()


class StepProfiler:
    """Records `config.steps` steps from `config.start_step` on; does nothing where no window is set."""

    def __init__(self, config: ProfileConfig, folder: Path, rank: int = 0) -> None:
        self.config = config
        self.folder = folder
        self.rank = rank
        self._records = not config.ranks or rank in config.ranks
        self._profiler: Any = None

    def before_step(self, step: int) -> None:
        """Start recording when the window begins; `step` counts from 1."""
        if self._records and self.config.start_step and step == self.config.start_step:
            self._profiler = torch.profiler.profile(profile_memory=True, record_shapes=True)
            self._profiler.start()

    def after_step(self, step: int) -> Path | None:
        """Write the trace when the window ends and return its path."""
        if self._profiler is None or step < self.config.start_step + self.config.steps - 1:
            return None
        return self._finish(step)

    def _finish(self, step: int) -> Path:
        self._profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        of_rank = f"-rank-{self.rank}" if self.rank else ""
        path = self.folder / f"steps-{self.config.start_step}-{step}{of_rank}.json.gz"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        return path

    def close(self) -> None:
        """Drop a window that training ended in the middle of."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
