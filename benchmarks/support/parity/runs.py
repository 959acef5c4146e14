"""The same few steps on the same samples: by one process, and by each rank of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from phalanx.core.layout import Shard
from phalanx.model.decoder import Decoder
from phalanx.model.logical_parameters import initialise
from phalanx.model.shapes import parameter_table
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.optim.skipping import GradientNorm, Reduction, grad_norm, local
from phalanx.parallel.apply import Build, build_engine
from phalanx.parallel.engine import Engine
from phalanx.parallel.group import Groups
from phalanx.train.device import Device
from phalanx.train.trainer import LocalTrainer
from support.parity.task import LENGTH, Case, Seen, held_out, samples

CPU = torch.device("cpu")
_WEIGHTS_SEED, _DROPOUT_SEED = 5, 3


class Sgd(torch.optim.SGD):
    """Hides no wrong scale of a gradient, as AdamW, LAMB and CAME would; honours the divisor that clips."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None  # only where all gradients are zero

    def step(self, closure: Any = None) -> Any:
        scale, self.grad_scale, self.found_inf = self.grad_scale, None, None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and scale is not None:
                    p.grad.div_(scale)
        return super().step(closure)


@dataclass
class Piece:
    """What one rank saw, and which part of the whole its tensors are."""

    shards: dict[str, Shard]
    seen: Seen


def single(case: Case) -> Seen:
    """One process with the whole model, which takes every batch at once."""
    model = Decoder(case.config, fp8_layers=case.fp8_layers)
    initialise(model, _WEIGHTS_SEED)
    trainer = LocalTrainer(model, Device(CPU, "cpu", torch.float32, 1))
    seen = Seen({n: p.detach().clone() for n, p in trainer.parameters.items()}, {})
    optimizer = make_optimizer(case, trainer.parameters)
    for step in range(case.steps):
        loss = trainer.accumulate_gradients(samples(case, step), micro_batch=case.batch, seed=_DROPOUT_SEED, step=step)
        if step == 0:
            seen.gradients = {n: p.grad.clone() for n, p in trainer.parameters.items() if p.grad is not None}
        _update(optimizer, loss, trainer.total_weight, seen)
        trainer.zero_grad()
    seen.held_out = float(trainer.held_out_loss(held_out(case)))
    return seen


def on_rank(case: Case, groups: Groups) -> Piece:
    """The same as one rank of the case's layout."""
    engine = make_engine(case, groups)
    seen = Seen({n: p.detach().clone() for n, p in engine.parameters.items()}, {})
    optimizer = make_optimizer(case, engine.parameters, engine.reduction, engine.gradient_norm)
    for step in range(case.steps):
        batch = samples(case, step)
        share = len(batch) // engine.data_ranks
        mine = batch.rows(engine.data_index * share, (engine.data_index + 1) * share)
        loss = engine.accumulate_gradients(mine, micro_batch=case.micro_batch, seed=_DROPOUT_SEED, step=step)
        if step == 0:
            seen.gradients = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in engine.parameters.items()
            }
        _update(optimizer, loss, engine.total_weight, seen)
        engine.zero_grad()
        engine.weights_changed()
    seen.held_out = float(engine.held_out_loss(held_out(case)))
    return Piece(engine.shards, seen)


def whole(pieces: Sequence[Piece]) -> Seen:
    """What all ranks saw, their tensors put together by those who own them.

    Raises:
        AssertionError: ranks do not agree, or a row has two owners.
    """
    first = pieces[0].seen
    together = Seen({}, {}, first.losses, first.norms, first.held_out)
    for piece in pieces:
        seen = piece.seen
        assert (seen.losses, seen.norms, seen.held_out) == (first.losses, first.norms, first.held_out), "ranks differ"
        for name, shard in piece.shards.items():
            if shard.owner:
                _place(together.weights, name, shard, seen.weights[name])
                _place(together.gradients, name, shard, seen.gradients[name])
    return together


def make_engine(case: Case, groups: Groups) -> Engine:
    build = Build(
        LENGTH,
        CPU,
        torch.float32,
        seed=_WEIGHTS_SEED,
        recompute=case.recompute,
        compile=case.compiled,
        fp8_layers=case.fp8_layers,
    )
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return build_engine(case.config, case.spread, groups, build)


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


def _update(optimizer: OptimizerSet, loss: Tensor, weight: Tensor, seen: Seen) -> None:
    norm, scale = optimizer.clip()
    optimizer.step(found_inf=(weight == 0).float(), grad_scale=scale)
    if not weight:  # a step without targets has no loss
        assert loss.isnan() and not norm
        return
    seen.losses.append(float(loss))
    seen.norms.append(float(norm))


def _place(together: dict[str, Tensor], name: str, shard: Shard, part: Tensor) -> None:
    target = together.setdefault(name, torch.full(shard.shape, torch.nan))
    region = target[tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))]
    assert region.isnan().all(), f"{name} has two owners"
    region.copy_(part)
