"""What contenders train, and how their steps are timed. Needs torch alone: peers run under their own interpreter."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """A model, and how much of it goes through the device at once.

    Attributes:
        gpt: learned positions, LayerNorm, GELU and tied embeddings instead of Llama's rotary ones, RMSNorm and SwiGLU.
        recompute: whether layers are computed again in the backward pass, in every contender that can.
        state_bits: of AdamW's moments; peers that have 32 alone are left out of a shape that has no room for them.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    vocabulary: int
    batch: int
    length: int
    gpt: bool = False
    rope_theta: float = 10_000.0
    recompute: bool = False
    state_bits: int = 32


SHAPES = {
    "tiny": Shape(2, 64, 2, 2, 256, 512, 2, 64, gpt=True),
    "tiny-llama": Shape(2, 64, 2, 1, 176, 512, 2, 64),
    "gpt2-124m": Shape(12, 768, 12, 12, 3072, 50304, 32, 1024, gpt=True),
    "llama-1.3b": Shape(24, 2048, 16, 16, 5504, 32000, 8, 2048),
    "llama-8b-4-layers": Shape(4, 4096, 32, 8, 14336, 128256, 2, 8192, rope_theta=500_000.0),
    "llama-8b": Shape(32, 4096, 32, 8, 14336, 128256, 1, 8192, rope_theta=500_000.0, recompute=True, state_bits=8),
}


@dataclass(frozen=True)
class Task:
    """A shape on a device.

    Attributes:
        steps: that are timed, after a warm-up.
        source: folder of a checkout that a contender needs, such as nanoGPT's; text that the trainer reads.
        folder: where a contender may write.
    """

    shape: str
    device: str = "cuda"
    steps: int = 12
    compiled: bool = True
    precision: str = "bf16"
    source: str = ""
    folder: str = ""

    @property
    def sizes(self) -> Shape:
        """Of the model."""
        return SHAPES[self.shape]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        return cls(**json.loads(text))


def tokens(task: Task) -> Tensor:
    """(batch, length + 1) tokens that mean nothing, on the device; arithmetic does not care."""
    shape = task.sizes
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
    return drawn.to(task.device)


def timed(task: Task, step: Callable[[], Tensor]) -> dict[str, Any]:
    """What `step`, which gives its loss, takes: seconds of every step, the first apart, and peak memory.

    Raises:
        AssertionError: the loss is no number, or is not what an untrained model has.
    """
    seconds = [measured_s(task.device, step) for _ in range(WARM_UP_STEPS + task.steps)]
    loss = float(step())
    assert 0.0 < loss < 2 * math.log(task.sizes.vocabulary), f"a loss of {loss}"
    return {
        "step_s": statistics.median(seconds[WARM_UP_STEPS:]),
        "first_step_s": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated() if task.device == "cuda" else 0,
        "loss": loss,
    }


def measured_s(device: str, work: Callable[[], object]) -> float:
    """Wall time of `work` with the queue of the device, of that type, empty before and after."""
    wait = torch.cuda.synchronize if device == "cuda" else int
    wait()
    start_s = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start_s
