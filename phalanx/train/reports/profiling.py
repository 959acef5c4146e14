"""A window of steps under torch.profiler, written as a Chrome trace into the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phalanx.train.config import ProfileConfig


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
