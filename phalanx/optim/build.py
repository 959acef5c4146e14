"""From a config and named parameters to optimizers behind one interface, with gradient clipping by the global norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.optim import skipping
from phalanx.optim.adamw import AdamW
from phalanx.optim.came import CAME
from phalanx.optim.config import Kind, OptimConfig
from phalanx.optim.groups import Settings, assign, bits_of
from phalanx.optim.lamb import LAMB
from phalanx.optim.muon import Muon
from phalanx.optim.skipping import GradientNorm, Reduction, SkippingOptimizer, clip_scale, grad_norm, local


class OptimizerSet:
    """All optimizers of a run as one; made by `build_optimizer`.

    Parameters are known by their logical names. The state exists from the start, so a checkpoint can be loaded before
    the first step, and its tensors keep their identity: steps and loading change them in place.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Mapping[Kind, torch.optim.Optimizer],
        clip_norm: float,
        gradient_norm: GradientNorm = grad_norm,
    ) -> None:
        self._parameters, self._optimizers = dict(parameters), dict(optimizers)
        self._clip_norm, self._gradient_norm = clip_norm, gradient_norm
        for optimizer in self._optimizers.values():
            create_state(optimizer)

    def clip(self) -> tuple[Tensor, Tensor | None]:
        """The norm of the whole gradient, and the divisor for `step` that clips it (None where clipping is off)."""
        norm = self._gradient_norm(self._parameters.values())
        return norm, clip_scale(norm, self._clip_norm) if self._clip_norm else None

    def set_lr(self, factor: float) -> float:
        """Set every learning rate to `factor` times its peak; returns the first group's, for the log."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        return next(iter(self.lrs().values()))

    def lrs(self) -> dict[str, float]:
        """Present learning rates: by optimizer, or ``optimizer@peak`` where one has several."""
        rates: dict[str, float] = {}
        for kind, optimizer in self._optimizers.items():
            peaks = {group["peak_lr"]: float(group["lr"]) for group in optimizer.param_groups}
            rates |= {kind if len(peaks) == 1 else f"{kind}@{peak:g}": lr for peak, lr in peaks.items()}
        return rates

    def step(self, found_inf: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        """Update all parameters that have gradients.

        Args:
            found_inf: a float32 scalar on the device of the parameters; 1.0 leaves parameters and state as they are.
            grad_scale: gradients are divided by this float32 scalar (AdamW writes the quotients back to ``.grad``).
        """
        optimizer: Any
        for optimizer in self._optimizers.values():
            # The protocol of torch's fused optimizers: two attributes, set for the time of the step.
            optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
            try:
                optimizer.step()
            finally:
                optimizer.found_inf = optimizer.grad_scale = None

    def zero_grad(self) -> None:
        """Set all gradients to zero in place: those of aliases are views, which None would only hide."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state, by ``<logical name>.<state>``, in the order of the parameters: the tensors, not copies."""
        owners = {p: o for o in self._optimizers.values() for group in o.param_groups for p in group["params"]}
        return {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            if parameter in owners
            for key, value in owners[parameter].state[parameter].items()
        }

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the state of a checkpoint into this one; nothing is changed when anything does not fit.

        Raises:
            UserError: names are missing or unknown, or shapes or types differ.
        """
        mine = self.state_tensors()
        missing, unknown = [n for n in mine if n not in tensors], [n for n in tensors if n not in mine]
        if missing or unknown:
            what = [f"lacks {len(missing)} (first {missing[0]})"] if missing else []
            what += [f"holds {len(unknown)} unknown to this run (first {unknown[0]})"] if unknown else []
            raise UserError(
                f"of this run's optimizer state the checkpoint {' and '.join(what)}",
                cure="resume with the optim settings the checkpoint was made with, or start anew with train.init_from",
            )
        for name, tensor in mine.items():
            theirs = tensors[name]
            if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
                raise UserError(
                    f"optimizer state {name} is {_kind(theirs)} in the checkpoint and {_kind(tensor)} in this run",
                    cure="resume with the model the checkpoint was made with, or start anew with train.init_from",
                )
        # In place, and only after all have been checked: others hold on to these tensors.
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def build_optimizer(
    config: OptimConfig,
    # logical name to parameter; each is one logical matrix or vector in fp32
    named_parameters: Mapping[str, torch.nn.Parameter],
    *,
    reduction: Reduction = local,  # completes sums over parameters that are spread over ranks
    gradient_norm: GradientNorm = grad_norm,  # of the whole gradient, where other ranks hold parts of it
    # shapes of all logical parameters of the model, where only parts of some are here
    whole_shapes: Mapping[str, Sequence[int]] | None = None,
) -> OptimizerSet:
    """Make the optimizers of `config` for logical parameters; those that need no gradient are left out.

    Raises:
        UserError: a group's pattern fits nothing, there is nothing to train, or an optimizer needs whole matrices, or
            all parameters, where only parts are here.
    """
    trained = {name: p for name, p in named_parameters.items() if p.requires_grad}
    if not trained:
        raise UserError("there is no parameter to train", cure="leave requires_grad on for some of the model")
    shapes = whole_shapes or {name: p.shape for name, p in trained.items()}
    everywhere = assign(config, {name: len(shape) for name, shape in shapes.items()})
    _check_parts(config, everywhere, shapes, trained)
    ours = config.state_bits != 32 or skipping.twin(list(trained.values())) is not None
    # Parameters of the same settings, and, where some states have fewer bits, of as many, are one group of torch's.
    by_kind: dict[Kind, dict[tuple[Settings, int], dict[str, Any]]] = {config.name: {}}
    for name, parameter in trained.items():
        chosen, bits = everywhere[name], bits_of(shapes[name], config.state_bits)
        fresh = {"params": [], "lr": chosen.lr, "peak_lr": chosen.lr, "weight_decay": chosen.weight_decay}
        if ours and chosen.kind == "adamw":  # torch's AdamW knows no such setting
            fresh["state_bits"] = bits
        group = by_kind.setdefault(chosen.kind, {}).setdefault((chosen, bits), fresh)
        group["params"].append(parameter)
    optimizers = {
        kind: _make(kind, list(groups.values()), config, reduction, gradient_norm, our_adamw=ours)
        for kind, groups in by_kind.items()
        if groups
    }
    return OptimizerSet(trained, optimizers, config.clip_norm, gradient_norm)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step would make; parameters and steps taken are untouched."""
    if isinstance(optimizer, SkippingOptimizer):
        optimizer.create_state()
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:  # as Adam._init_group for fused=True
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                optimizer.state[p].update(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))


def _check_parts(
    config: OptimConfig,
    everywhere: Mapping[str, Settings],
    shapes: Mapping[str, Sequence[int]],
    parameters: Mapping[str, Tensor],
) -> None:
    """Refuse what cannot be done with parts of matrices, or without the parameters of other ranks."""
    cut = [n for n, p in parameters.items() if everywhere[n].kind == "muon" and tuple(p.shape) != tuple(shapes[n])]
    if cut:
        raise UserError(
            f"works on whole matrices, and the layout splits {cut[0]} over ranks",
            cure="spread the run with parallel.replicate or parallel.pipeline only, or take another optimizer",
            field="optim.name",
            value="muon",
        )
    partial = len(shapes) > len(parameters) and {s.kind for s in everywhere.values()} != {"lamb"}
    if partial and config.lamb.max_grad_norm is not None and any(s.kind == "lamb" for s in everywhere.values()):
        raise UserError(
            "is the norm of LAMB's parameters alone, which no stage of a pipeline knows beside other optimizers",
            cure="leave it out and set optim.clip_norm",
            field="optim.lamb.max_grad_norm",
            value=config.lamb.max_grad_norm,
        )


def _make(
    kind: Kind,
    groups: list[dict[str, Any]],
    config: OptimConfig,
    reduction: Reduction,
    gradient_norm: GradientNorm,
    *,
    our_adamw: bool,
) -> torch.optim.Optimizer:
    betas, eps = config.betas_of(kind), config.eps_of(kind)
    if kind == "adamw" and our_adamw:
        return AdamW(groups, betas=(betas[0], betas[1]), eps=eps)
    if kind == "adamw":
        return torch.optim.AdamW(groups, betas=(betas[0], betas[1]), eps=eps, fused=True)
    if kind == "muon":
        options = config.muon.model_dump(include={"momentum", "nesterov", "ns_steps"})
        return Muon(groups, eps=eps, adjust_lr_fn=config.muon.adjust_lr, **options)
    # A compiled step is one graph, in which no sum over ranks can be taken.
    sums: dict[str, Any] = {"reduction": reduction, "compile": config.compile and reduction is local}
    if kind == "came":
        came = config.came
        pair, triple = (eps, came.eps_residual), (betas[0], betas[1], betas[2])
        return CAME(groups, betas=triple, eps=pair, clip_threshold=came.clip_threshold, **sums)
    clipping = None if gradient_norm is grad_norm else gradient_norm
    return LAMB(groups, betas=(betas[0], betas[1]), eps=eps, gradient_norm=clipping, **sums, **config.lamb.model_dump())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
