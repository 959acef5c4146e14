"""What every contender is asked to train, the text they all read, and the stopwatch that times them all alike.

Needs torch and numpy only: contenders run under the interpreter of their own library as well as under ours.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass(frozen=True)
class Task:
    """A model, a batch and a machine. The defaults are the recipe for a CPU in nanoGPT's README.

    Attributes:
        text: file that all read; its distinct characters are the vocabulary.
        folder: where a contender may write.
        steps: optimizer steps, all told.
        overrides: settings of ours alone, as ``key=value``.
        activation: Hugging Face's name of the MLP's nonlinearity, for its contender; the others have the exact GELU.
        nanogpt: folder of a checkout of nanoGPT, for the contender of that name.
    """

    text: str
    folder: str
    layers: int = 4
    heads: int = 4
    hidden: int = 128
    length: int = 64
    batch: int = 12
    steps: int = 120
    threads: int = 1
    precision: str = "fp32"
    overrides: tuple[str, ...] = ()
    activation: str = "gelu"
    nanogpt: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "overrides": tuple(values["overrides"])})


class Stopwatch:
    """CPU seconds (user and system, all threads of the process) and wall seconds at the end of every optimizer step.

    It hangs on the step of whatever `torch.optim.Optimizer` a loop uses, so that no loop has to be changed or told.
    """

    def __init__(self) -> None:
        self.stamps: list[tuple[float, float]] = []
        self._handle = register_optimizer_step_post_hook(self._stamp)

    def _stamp(self, *_: object) -> None:
        self.stamps.append((time.process_time(), time.perf_counter()))


def characters(task: Task) -> tuple[np.ndarray, int]:
    """The first nine tenths of the text as character ids, and the number of distinct characters."""
    text = Path(task.text).read_text(encoding="utf-8")
    symbols = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    ids = np.array([symbols[symbol] for symbol in text], dtype=np.uint16)
    return ids[: len(ids) * 9 // 10], len(symbols)


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of ``length + extra`` characters at random places, as many as a run needs."""

    def __init__(self, task: Task, extra: int) -> None:
        self.ids, self.vocabulary = characters(task)
        self.width = task.length + extra
        rng = np.random.default_rng(0)
        self.starts = rng.integers(0, len(self.ids) - self.width, size=task.steps * task.batch)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return torch.from_numpy(self.ids[start : start + self.width].astype(np.int64))
