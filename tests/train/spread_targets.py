"""What ranks are made to do by tests of real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from phalanx.launch.environment import Worker
from phalanx.train import assemble as assembling
from phalanx.train.config import RunConfig
from phalanx.train.run import Run
from phalanx.train.session import train_rank


def raise_at_step_5(worker: Worker, config: RunConfig, folder: str) -> int:
    """Train, but rank 1 has an error of its own in the middle of step 5; notes down when, and every process."""
    (Path(folder) / f"pid-{worker.rank}").write_text(str(os.getpid()))
    if worker.rank == 1:
        accumulate_gradients = Run.accumulate_gradients

        def failing(run: Run, batch: Any) -> Any:
            if run.progress.step + 1 == 5:
                (Path(folder) / "raised_ns").write_text(str(time.monotonic_ns()))
                raise ArithmeticError("rank 1 has come to step 5")
            return accumulate_gradients(run, batch)

        Run.accumulate_gradients = failing  # type: ignore[method-assign]
    assembling.measure_peak = lambda device: None  # type: ignore[attr-defined]
    return train_rank(worker, config, Path("tiny.toml"))
