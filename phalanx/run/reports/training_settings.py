"""What a job's `phalanx train` will do, by its config file and its words."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.run.config import RunConfig
from phalanx.run.flags import Training


def training_folder(config: RunConfig, job: Path) -> Path | None:
    """The run folder of the `phalanx train` that a job runs, as seen from here; None: it runs something else."""
    training = config.training
    if training is None:
        return None
    base = Path(config.working_folder or ".").absolute()
    named = training.folder or str(_table(base, training, "run").get("folder", ""))
    return base / named if named else job


def training_alerts(config: RunConfig) -> dict[str, Any]:
    """``[alerts]`` that a training is started with, by its config file and its words; empty: there is none."""
    training = config.training
    if training is None:
        return {}
    return _table(Path(config.working_folder or "."), training, "alerts") | dict(training.alerts)


def _table(base: Path, training: Training, name: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # which the training will report
        found = tomllib.loads((base / training.config).read_text(encoding="utf-8-sig")).get(name, {})
        return found if isinstance(found, dict) else {}
    return {}
