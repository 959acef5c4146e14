"""LAMB: layer-wise adaptive moments for large batches (arXiv 1904.00962, algorithm 2).

Public references disagree, so what they disagree on are named options. The defaults are those of timm 1.0
(``timm.optim.lamb``) except that the clip inside the step is off, since the training loop clips already;
cybertronai/pytorch-lamb is ``bias_correction=False, always_adapt=True, max_weight_norm=10``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.optim import skipping
from phalanx.optim.skipping import (
    GradientNorm,
    Reduction,
    SkippingOptimizer,
    bundles,
    check_rates,
    check_settings,
    clean_gradients,
    inverse_scale,
    local,
    share_step_counters,
    step_counter,
)


class _Rule(NamedTuple):
    beta1: float
    beta2: float
    weight_decay: float
    adapt: bool
    trust_clip: bool
    max_weight_norm: float


class LAMB(SkippingOptimizer):
    """LAMB over logical matrices: one trust ratio for each parameter it is given, fp32 or fp64.

    Raises:
        ValueError: a setting is out of range, or `compile` is combined with a reduction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,  # added to the update, times the parameter, before the trust ratio is taken
        *,
        # divide the moments by ``1 - beta**step`` (timm and apex do, cybertronai does not)
        bias_correction: bool = True,
        # clip the norm of all gradients of this optimizer inside the step; None leaves them
        max_grad_norm: float | None = None,
        # use the trust ratio also for groups without weight decay (apex calls it ``use_nvlamb``)
        always_adapt: bool = False,
        trust_clip: bool = False,  # bound the trust ratio by 1
        # bound the parameter's norm in the trust ratio (cybertronai: 10); None for no bound
        max_weight_norm: float | None = None,
        reduction: Reduction = local,  # completes sums over matrices that are spread over ranks
        gradient_norm: GradientNorm | None = None,  # for `max_grad_norm`, where other ranks hold parts of the gradient
        # on a CPU, run the step through ``torch.compile`` (one graph for all shapes; needs the local reduction). On a
        # GPU three Triton kernels do it in any case
        compile: bool = False,
    ) -> None:
        check_settings(compile, reduction, lr=lr, eps=eps, weight_decay=weight_decay)
        check_rates(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "always_adapt": always_adapt,
            "trust_clip": trust_clip,
            "max_weight_norm": max_weight_norm,
        }
        self.max_grad_norm = max_grad_norm
        self._reduction, self._gradient_norm = reduction, gradient_norm
        self._launches: dict[Tensor, Any] = {}  # by first parameter: the last launch of the Triton kernels
        self._compiled: Callable[..., None] | None = (
            torch.compile(_compiled_step, dynamic=True, fullgraph=True) if compile else None
        )
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        step = step_counter(group, self.state, parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's; the counter of a group is one tensor again."""
        super().load_state_dict(state_dict)
        share_step_counters(self)

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        found = [(group, self._with_gradients(group)) for group in self.param_groups]
        found = [(group, parameters) for group, parameters in found if parameters]
        if self.max_grad_norm is not None and found:
            grad_scale = self._clipping_scale([p for _, ps in found for p in ps], grad_scale, self.max_grad_norm)
        for group, parameters in found:
            step = self.state[parameters[0]]["step"]
            step.add_(1.0 if keep is None else keep.to(step.device))
            scalars = _scalars(group, step)
            inverse = inverse_scale(grad_scale, keep, parameters[0])
            for bundle in bundles(parameters, together=self._reduction is not local or self.as_on_device):
                kernels = skipping.twin(bundle)
                if kernels is None:
                    self._update_bundle(group, bundle, keep, inverse, scalars)
                    continue
                # On a GPU: three kernels for the whole bundle.
                one = torch.ones_like(scalars[0])
                rest = [one if inverse is None else inverse.to(scalars), one if keep is None else keep.to(scalars)]
                numbers = torch.cat([scalars, torch.stack(rest)]).to(bundle[0])
                launch = self._launches.setdefault(bundle[0], kernels.Launch())
                squares = launch.lamb_moments(bundle, [self.state[p] for p in bundle], numbers)
                if self._reduction is not local:
                    squares = torch.stack(self._reduction(list(squares.unbind()), bundle, None))
                launch.lamb_apply(numbers, _factors(squares, numbers, keep, _rule(group)))

    def _clipping_scale(self, parameters: list[Tensor], grad_scale: Tensor | None, limit: float) -> Tensor:
        """The divisor that brings the norm of all gradients, already divided by `grad_scale`, down to `limit`."""
        if self._gradient_norm is not None:
            total = self._gradient_norm(parameters)
        else:
            norms = torch._foreach_norm([p.grad.to(p.dtype) for p in parameters if p.grad is not None])
            squares = self._reduction([norm.square() for norm in norms], parameters, None)
            total = torch.stack([square.to(squares[0]) for square in squares]).sum().sqrt()
        scale = torch.ones_like(total) if grad_scale is None else grad_scale.to(total)
        return torch.maximum(scale, total / limit)

    def _update_bundle(
        self, group: dict[str, Any], ps: list[Tensor], keep: Tensor | None, inverse: Tensor | None, scalars: Tensor
    ) -> None:
        rule = _rule(group)
        scalars = scalars.to(ps[0])
        inverse = None if inverse is None else inverse.to(ps[0])
        ms = [self.state[p]["exp_avg"] for p in ps]
        vs = [self.state[p]["exp_avg_sq"] for p in ps]
        if self._compiled is not None:
            inverse = scalars.new_ones(()) if inverse is None else inverse
            for p, m, v in zip(ps, ms, vs, strict=True):
                flat = [x.detach().view(-1) for x in (p, p.grad, m, v) if x is not None]
                self._compiled(*flat, scalars, inverse, keep, rule)
            return
        gs = clean_gradients(ps, inverse, keep)
        us = _updates(ps, gs, ms, vs, scalars, keep, rule)
        squares = [
            torch.stack([a, b]).square() for a, b in zip(torch._foreach_norm(ps), torch._foreach_norm(us), strict=True)
        ]
        factors = _factors(torch.stack(self._reduction(squares, ps, None)), scalars, keep, rule)
        torch._foreach_addcmul_(ps, us, list(factors.unbind()))


def _updates(
    ps: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    scalars: Tensor,
    keep: Tensor | None,
    rule: _Rule,
) -> list[Tensor]:
    """Advance the moments in place and return Adam's update (plus decay) of every parameter, not yet scaled."""
    if keep is None:
        torch._foreach_lerp_(ms, gs, 1 - rule.beta1)
        torch._foreach_mul_(vs, rule.beta2)
    else:  # gradients are zero where the step is skipped
        kept = keep.to(scalars)
        torch._foreach_lerp_(ms, gs, [(1 - rule.beta1) * kept] * len(ms))
        torch._foreach_mul_(vs, 1 - (1 - rule.beta2) * kept)
    torch._foreach_addcmul_(vs, gs, gs, 1 - rule.beta2)
    us = list(torch._foreach_sqrt(vs))
    torch._foreach_mul_(us, scalars[1])
    torch._foreach_add_(us, other=scalars[2])  # by name, else torch takes it for a number, which it reads back
    torch._foreach_reciprocal_(us)
    torch._foreach_mul_(us, ms)
    if rule.weight_decay:
        torch._foreach_add_(us, ps, alpha=rule.weight_decay)
    return us


def _factors(squares: Tensor, scalars: Tensor, keep: Tensor | None, rule: _Rule) -> Tensor:
    """``-lr * trust ratio`` from squared norms (..., [parameter, update]); zero where the step is skipped."""
    factors = -scalars[0].expand(squares.shape[:-1])
    if rule.adapt:
        weight, update = squares.sqrt().unbind(-1)
        ratio = torch.where((weight > 0) & (update > 0), weight.clamp(max=rule.max_weight_norm) / update, 1.0)
        factors = factors * (ratio.clamp(max=1.0) if rule.trust_clip else ratio)
    return factors if keep is None else torch.where(keep, factors, 0.0)


def _compiled_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, inverse: Tensor, keep: Tensor | None, rule: _Rule
) -> None:
    """The same arithmetic for one flat parameter, written without mutation in the middle so that it fuses.

    All numbers come from `scalars`: Python floats would be converted from float64 at every element.
    """
    g = g.to(p.dtype) * inverse
    m_new = m.lerp(g, scalars[3])
    v_new = v * scalars[4] + g * g * scalars[5]
    if keep is not None:
        m_new, v_new = torch.where(keep, m_new, m), torch.where(keep, v_new, v)
    u = m_new / (v_new.sqrt() * scalars[1] + scalars[2]) + p * scalars[6]
    factor = _factors(torch.stack([p.square().sum(), u.square().sum()]), scalars, keep, rule)
    m.copy_(m_new)
    v.copy_(v_new)
    p.add_(u * factor)


def _scalars(group: dict[str, Any], step: Tensor) -> Tensor:
    """``[lr, a, e, 1 - beta1, beta2, 1 - beta2, decay]``, float64, where the update is ``m / (sqrt(v) * a + e)``.

    Folding the bias corrections this way, ``a = c1 / sqrt(c2)`` and ``e = eps * c1``, saves two passes.
    """
    beta1, beta2 = group["betas"]
    c1 = 1 - beta1**step if group["bias_correction"] else torch.ones_like(step)
    c2 = 1 - beta2**step if group["bias_correction"] else torch.ones_like(step)
    # A skipped first step leaves the counter at 0 and the corrections too; nothing is then read of the result.
    c1, c2 = (torch.where(c > 0, c, 1.0) for c in (c1, c2))
    numbers = (float(group["lr"]), 1 - beta1, beta2, 1 - beta2, group["weight_decay"])
    lr, *rest = (torch.full_like(step, number) for number in numbers)
    return torch.stack([lr, c1 / c2.sqrt(), group["eps"] * c1, *rest])


def _rule(group: dict[str, Any]) -> _Rule:
    limit = group["max_weight_norm"]
    adapt = bool(group["weight_decay"] != 0 or group["always_adapt"])
    beta1, beta2 = group["betas"]
    return _Rule(beta1, beta2, group["weight_decay"], adapt, group["trust_clip"], math.inf if limit is None else limit)
