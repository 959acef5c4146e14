"""What layouts are compared by: a tiny model, samples that are a function of the step, and what a run of it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.model.config import ModelConfig
from phalanx.parallel.config import ParallelConfig

LENGTH = 16
VOCABULARY = 61
MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_multiple": 8,
    "max_sequence": LENGTH,
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "mlp_hidden": 48,
    "init_std": 0.1,
}


@dataclass(frozen=True)
class Case:
    """A layout, and what it is to be tried with.

    Attributes:
        parallel, model, optim: settings of the sections of a config; `optim.name` may be ``sgd``.
        batch: samples of a step, over all ranks.
        micro_batch: samples of a forward pass on each rank; the single process takes all at once.
        masked: whether targets have uneven weights and samples hold several documents.
        compiled: whether the layout's layers are, without code being generated.
        fp8_layers: those that multiply in 8 bits.
    """

    parallel: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 8
    micro_batch: int = 1
    steps: int = 4
    masked: bool = True
    recompute: Any = "none"
    compiled: bool = False
    fp8_layers: range = range(0)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**(MODEL | dict(self.model)))

    @property
    def spread(self) -> ParallelConfig:
        return ParallelConfig(**self.parallel)


@dataclass
class Seen:
    """What a run did: initial weights, gradients of the first step, losses and norms of all, loss on held-out text."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: float = 0.0


def samples(case: Case, step: int) -> Batch:
    """The global batch of a step; one of its samples has no targets at all where weights are uneven."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (case.batch, LENGTH + 1), generator=generator)
    weights = torch.ones(case.batch, LENGTH)
    documents = None
    if case.masked:
        weights = (torch.rand(case.batch, LENGTH, generator=generator) < 0.7).float()
        weights[1] = 0.0
        documents = (torch.rand(case.batch, LENGTH, generator=generator) < 0.15).cumsum(1).to(torch.int32)
    index = step * case.batch + torch.arange(case.batch)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, documents, index)


def held_out(case: Case) -> list[Batch]:
    """What no step of training sees."""
    return [samples(case, 1000 + number) for number in range(3)]
