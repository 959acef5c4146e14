"""What each step did and the throughput, kept on the device until it is reported: no synchronisation to write it down.

The throughput (tokens/s) is that of the steps reported together, without evaluations and checkpoints.

A window of steps can be recorded under torch.profiler, as a Chrome trace in the run folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.train.config import ProfileConfig
from phalanx.train.reports.callbacks import StepReport


@dataclass
class _Pending:
    step: int
    values: Tensor  # (4,): loss, gradient norm, skipped, weight of all targets
    lr: float
    tokens: int
    step_tokens: int


@dataclass
class StepRecord:
    """Collects steps and turns them into `StepReport`s when flushed: one device-to-host copy per flush.

    Args:
        clock: seconds, monotonic.
    """

    clock: Callable[[], float] = time.perf_counter
    _pending: list[_Pending] = field(default_factory=list)
    _since_s: float = 0.0
    _warm_s: float | None = None  # when the first step was done, as far as the host had to do with it
    _is_cold: bool = False  # it is among those pending

    def __post_init__(self) -> None:
        self.resume_clock()

    def resume_clock(self) -> None:
        """Leave the time since the last flush out of the rates: an evaluation or a checkpoint took it."""
        self._since_s = self.clock()

    def add(self, step: int, figures: Sequence[Tensor], lr: float, tokens: int, new: int) -> None:
        """Note a step.

        Args:
            figures: scalars on the device: loss, gradient norm, whether the update was left out, weight of all targets.
            new: tokens of this step.
        """
        values = torch.stack([figure.detach().float() for figure in figures])
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
        usual_s: float | None = step_s
        if self._is_cold and self._warm_s is not None:
            # The first step of the process compiles and warms up: what is still to come is estimated without it.
            self._is_cold, others = False, len(self._pending) - 1
            usual_s = max(now_s - max(self._warm_s, self._since_s), 1e-9) / others if others else None
        self._since_s = now_s
        reports = [
            StepReport(
                item.step,
                loss,
                norm,
                item.lr,
                bool(left_out and weight),
                item.tokens,
                rate,
                step_s,
                usual_s,
                untrained=not weight,
            )
            for item, (loss, norm, left_out, weight) in zip(self._pending, rows, strict=True)
        ]
        self._pending.clear()
        return reports


class StepProfiler:
    """Records `config.steps` steps from `config.start_step` on; does nothing where no window is set."""

    def __init__(self, config: ProfileConfig, folder: Path, rank: int = 0) -> None:
        self.config, self.folder, self.rank = config, folder, rank
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
