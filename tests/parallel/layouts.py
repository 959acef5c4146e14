"""A spread model against a single process: the same few steps on the same samples, in this process's threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.init import initialise
from phalanx.model.shapes import parameter_table
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.clip import grad_norm
from phalanx.optim.config import OptimConfig
from phalanx.optim.reduction import GradientNorm, Reduction, local
from phalanx.parallel.apply import Build, build_engine
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.engine import Engine
from phalanx.train.device import Device
from phalanx.train.trainer import LocalTrainer

CPU = torch.device("cpu")
LENGTH = 16
MODEL: dict[str, Any] = {
    "vocab_size": 61,
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
        masked: whether targets have uneven weights and samples hold several documents.
    """

    parallel: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 8
    micro_batch: int = 1
    steps: int = 4
    masked: bool = True
    recompute: Any = "none"

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**(MODEL | dict(self.model)))

    @property
    def spread(self) -> ParallelConfig:
        return ParallelConfig(**self.parallel)


@dataclass
class Seen:
    """What a run did: initial weights, first gradients, losses and norms of all steps, loss on held-out text."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: float = 0.0


def samples(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (case.batch, LENGTH + 1), generator=generator)
    weights = torch.ones(case.batch, LENGTH)
    documents = None
    if case.masked:
        weights = (torch.rand(case.batch, LENGTH, generator=generator) < 0.7).float()
        weights[1] = 0.0
        documents = (torch.rand(case.batch, LENGTH, generator=generator) < 0.15).cumsum(1).to(torch.int32)
    index = step * case.batch + torch.arange(case.batch)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, documents, index)


class Sgd(torch.optim.SGD):
    """Hides no wrong scale of a gradient, as AdamW, LAMB and CAME would; honours the divisor that clips."""

    grad_scale: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        scale, self.grad_scale = self.grad_scale, None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and scale is not None:
                    p.grad.div_(scale)
        return super().step(closure)


def make_optimizer(
    case: Case,
    parameters: Mapping[str, torch.nn.Parameter],
    reduction: Reduction = local,
    gradient_norm: GradientNorm = grad_norm,
) -> OptimizerSet:
    settings = {"lr": 1e-3} | dict(case.optim)
    if settings.get("name") == "sgd":
        groups = [{"params": list(parameters.values()), "peak_lr": settings["lr"]}]
        sgd: Any = {"adamw": Sgd(groups, lr=settings["lr"])}
        return OptimizerSet(parameters, sgd, settings.get("clip_norm", 1.0), gradient_norm)
    shapes = {name: p.shape for name, p in parameter_table(case.config).items()}
    return build_optimizer(
        OptimConfig(**settings), parameters, reduction=reduction, gradient_norm=gradient_norm, whole_shapes=shapes
    )


def single(case: Case) -> Seen:
    model = Decoder(case.config)
    initialise(model, 5)
    trainer = LocalTrainer(model, Device(CPU, "cpu", torch.float32, 1))
    seen = Seen({n: p.detach().clone() for n, p in trainer.parameters.items()}, {})
    optimizer = make_optimizer(case, trainer.parameters)
    for step in range(case.steps):
        loss = trainer.accumulate_gradients(samples(case, step), micro_batch=case.batch, seed=3, step=step)
        if step == 0:
            seen.gradients = {n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None}
        _update(optimizer, loss, seen)
        trainer.zero_grad()
    seen.held_out = float(trainer.held_out_loss([samples(case, 100), samples(case, 101), samples(case, 102)]))
    return seen


def spread(case: Case) -> Seen:
    """The same on every rank of a layout; what the ranks hold is put together by its owners."""
    pieces = run_ranks(case.spread.layout, lambda groups: _on_rank(case, groups))
    whole = Seen({}, {})
    for engine, seen in pieces:
        for name, shard in engine.shards.items():
            if shard.owner:
                _place(whole.weights, name, shard, seen.weights[name])
                _place(whole.gradients, name, shard, seen.gradients[name])
    first = pieces[0][1]
    assert all((s.losses, s.norms, s.held_out) == (first.losses, first.norms, first.held_out) for _, s in pieces)
    whole.losses, whole.norms, whole.held_out = first.losses, first.norms, first.held_out
    return whole


def make_engine(case: Case, groups: ThreadGroups) -> Engine:
    build = Build(LENGTH, CPU, torch.float32, seed=5, recompute=case.recompute)
    return build_engine(case.config, case.spread, groups, build)


def _on_rank(case: Case, groups: ThreadGroups) -> tuple[Engine, Seen]:
    engine = make_engine(case, groups)
    seen = Seen({n: p.detach().clone() for n, p in engine.parameters.items()}, {})
    optimizer = make_optimizer(case, engine.parameters, engine.reduction, engine.gradient_norm)
    for step in range(case.steps):
        batch = samples(case, step)
        share = len(batch) // engine.data_ranks
        mine = batch.rows(engine.data_index * share, (engine.data_index + 1) * share)
        loss = engine.accumulate_gradients(mine, micro_batch=case.micro_batch, seed=3, step=step)
        if step == 0:
            seen.gradients = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in engine.parameters.items()
            }
        _update(optimizer, loss, seen)
        engine.zero_grad()
        engine.weights_changed()
    seen.held_out = float(engine.held_out_loss([samples(case, 100), samples(case, 101), samples(case, 102)]))
    return engine, seen


def _update(optimizer: OptimizerSet, loss: Tensor, seen: Seen) -> None:
    norm, scale = optimizer.clip()
    optimizer.step(grad_scale=scale)
    seen.losses.append(float(loss))
    seen.norms.append(float(norm))


def _place(whole: dict[str, Tensor], name: str, shard: Any, part: Tensor) -> None:
    target = whole.setdefault(name, torch.full(shard.shape, torch.nan))
    region = target[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))]
    assert region.isnan().all(), f"{name} has two owners"
    region.copy_(part)
