"""Phalanx: the very session of `phalanx train`, with the logging that a user gets."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from contenders.task import Task
from phalanx.core.config import load
from phalanx.train.config import RunConfig
from phalanx.train.session import run_session

RECIPE = Path(__file__).parents[2] / "configs" / "shakespeare-nanogpt.toml"


def settings(task: Task) -> list[str]:
    """The recipe's config changed into the task's."""
    values = {
        "data.sources.0.path": task.text,
        "data.folder": f"{task.folder}/prepared",
        "data.sequence_length": task.length,
        "model.layers": task.layers,
        "model.heads": task.heads,
        "model.hidden": task.hidden,
        "optim.schedule.warmup_steps": min(100, task.steps // 4),
        "run.folder": f"{task.folder}/run",
        "train.steps": task.steps,
        "train.global_batch": task.batch,
        "train.precision": task.precision,
        "train.threads": task.threads,
        "train.device": "cpu",
        "evaluate.every_steps": 0,
        "evaluate.final_tokens": task.batch * task.length,
    }
    return [*(f"{key}={value}" for key, value in values.items()), *task.overrides]


def run(task: Task) -> None:
    config = load(RunConfig, RECIPE, settings(task)).value
    with Path(os.devnull).open("w") as nowhere:
        run_session(config, RECIPE, Console(file=nowhere))
