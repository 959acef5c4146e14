"""CAME: confidence-guided adaptive memory-efficient optimization (arXiv 2307.02047, algorithm 2).

Where the paper and the authors' code (yangluo7/CAME) differ this follows the code: statistics are means, not sums,
nothing is corrected for bias, tensors of more than two dimensions are factored over the last two, and vectors keep a
full second moment and are not divided by a confidence.

Parameters of one shape are updated as a stack, so that a GPU gets as many kernels for many as for one; on a CPU each
is a stack of its own.

Shapes: L parameters, B leading dimensions taken together, N rows, M columns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.optim.base import (
    Reduction,
    SkippingOptimizer,
    clean_gradients,
    inverse_scale,
    local,
    stacked,
    stacked_gradients,
    stacks,
)
from phalanx.optim.came_fused import FusedStep, Matrix, Numbers, stacks_of

_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


class _Rule(NamedTuple):
    """The settings of one group that stay the same from step to step."""

    beta1: float
    beta2: float
    beta3: float
    eps: float
    eps_residual: float
    clip_threshold: float
    weight_decay: float


class _Counts(NamedTuple):
    """How many rows, columns and elements the whole logical matrices of a stack have: the same number, or (L,)."""

    rows: Tensor | int
    columns: Tensor | int
    elements: Tensor | int


class _Work(NamedTuple):
    """Parameters of one shape, their gradients (scaled, or zero on a skipped step), state, and memory to work in.

    Matrices are seen as BNM with factors of LBN and LBM; vectors are flat and have only `factors[0]`, the second
    moment. What is as large as a parameter is left where it is, in a list; the gradients and the memory are stacks.
    """

    ps: list[Tensor]
    g: Tensor
    ms: list[Tensor]
    factors: tuple[Tensor, ...]
    buffer: Tensor


# A step of one stack: yields partial sums (L, ...) and the dimension they were summed over, and is sent complete sums.
# So one text serves whole matrices, and many spread ones in lockstep with one collective for all.
_Steps = Generator[tuple[Tensor, int | None], Tensor, None]


class CAME(SkippingOptimizer):
    """CAME over logical matrices: factors and the clip belong to each parameter it is given.

    Args:
        params: parameters or groups, fp32 or fp64; gradients may be of lower precision.
        lr: learning rate; the authors advise 1/3 to 1 times AdamW's.
        betas: decay rates, per step, of the update, of the squared gradient and of the instability.
        eps: added to the squared gradient and to the squared instability.
        clip_threshold: bound of the root mean square of an update.
        weight_decay: decoupled: parameters shrink by ``lr * weight_decay`` before the update.
        reduction: completes sums over matrices that are spread over ranks.
        compile: run the step through ``torch.compile`` (needs the local reduction).

    Raises:
        ValueError: a setting is out of range, or `compile` is combined with a reduction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        reduction: Reduction = local,
        compile: bool = False,
    ) -> None:
        _check(lr, betas, eps, clip_threshold, weight_decay)
        if compile and reduction is not local:
            raise ValueError(
                "compile = True does not fit a reduction over ranks: leave compile off for sharded layouts"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        self._reduction = reduction
        self._known_counts: dict[Tensor, tuple[Tensor, ...]] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._fused = FusedStep() if compile else None
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The update's average; for matrices the row and column means, for vectors the second moment."""
        average = torch.zeros_like(parameter)
        if parameter.dim() < 2:
            return {"exp_avg": average, "exp_avg_sq": torch.zeros_like(parameter)}
        rows, columns = parameter.shape[:-1], parameter.shape[:-2] + parameter.shape[-1:]
        return {
            "exp_avg": average,
            "exp_avg_sq_row": parameter.new_zeros(rows),
            "exp_avg_sq_col": parameter.new_zeros(columns),
            "exp_avg_res_row": parameter.new_zeros(rows),
            "exp_avg_res_col": parameter.new_zeros(columns),
        }

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        for group in self.param_groups:
            parameters = self._with_gradients(group)
            if self._fused is not None:
                inverse = inverse_scale(grad_scale, keep, parameters[0]) if parameters else None
                parameters = self._update_fused(group, parameters, inverse, keep)
            alone = bool(parameters) and parameters[0].is_cpu and not self.as_on_device
            if self._reduction is not local:
                self._learn_counts(parameters)
            begun = []
            for alike in stacks(parameters, alone=alone):
                gradients = stacked_gradients(alike, inverse_scale(grad_scale, keep, alike[0]), keep)
                lr = torch.full((), float(group["lr"]), dtype=alike[0].dtype, device=alike[0].device)
                work = self._work(alike, gradients)
                steps = _steps(work, lr, keep, self._counts(alike), _rule(group))
                begun.append((alike, work, steps))
                if self._reduction is local:  # one after the other, so that temporaries stay small
                    _finish(steps)
                    self._keep_factors(*begun.pop()[:2])
            if begun:
                _in_lockstep([(steps, alike) for alike, _, steps in begun], parameters, self._reduction)
            for alike, work, _ in begun:
                self._keep_factors(alike, work)

    def _update_fused(
        self, group: dict[str, Any], parameters: list[Tensor], inverse: Tensor | None, keep: Tensor | None
    ) -> list[Tensor]:
        """Run the compiled passes over what they are made for; return the other parameters."""
        assert self._fused is not None
        left = []
        for p in parameters:
            (gradient,) = clean_gradients([p], inverse, keep)
            if _fits_fused(p, gradient):
                self._fused(self._matrix(p, gradient), _numbers(group, p), keep)
            else:
                left.append(p)
        return left

    def _matrix(self, p: Tensor, g: Tensor) -> Matrix:
        return Matrix(p.detach(), g, *(self.state[p][name] for name in ("exp_avg", *_FACTORS)))

    def _work(self, ps: list[Tensor], g: Tensor) -> _Work:
        p, states = ps[0], [self.state[p] for p in ps]
        buffer = self._buffer(p).view_as(g) if len(ps) == 1 else torch.empty_like(g)
        if p.dim() < 2:
            shape: tuple[int, ...] = (p.numel(),)
            factors: tuple[Tensor, ...] = (stacked([state["exp_avg_sq"].view(shape) for state in states]),)
        else:
            leading = p.shape[:-2].numel()  # not -1, which fits nothing where a rank holds no row
            shape = (leading, *p.shape[-2:])
            factors = tuple(stacked([s[name].view(leading, s[name].shape[-1]) for s in states]) for name in _FACTORS)
        seen, ms = [p.detach().view(shape) for p in ps], [state["exp_avg"].view(shape) for state in states]
        return _Work(seen, g.view(len(ps), *shape), ms, factors, buffer.view(len(ps), *shape))

    def _keep_factors(self, ps: list[Tensor], work: _Work) -> None:
        """Copy the factors of a stack back into the state of each parameter; of one alone they are views of it."""
        if len(ps) == 1:
            return
        for name, factors in zip(_FACTORS if ps[0].dim() >= 2 else ("exp_avg_sq",), work.factors, strict=True):
            own = [self.state[p][name] for p in ps]
            torch._foreach_copy_(own, list(factors.view(len(ps), *own[0].shape).unbind()))

    def _buffer(self, p: Tensor) -> Tensor:
        """Memory of the size of `p`: one for all while they are updated one after the other, since fresh pages cost."""
        if self._reduction is not local or not p.is_cpu:
            return torch.empty_like(p)
        kind = (p.device, p.dtype)
        if kind not in self._buffers or self._buffers[kind].numel() < p.numel():
            alike = [q for group in self.param_groups for q in group["params"] if (q.device, q.dtype) == kind]
            self._buffers[kind] = p.new_empty(max(q.numel() for q in alike))
        return self._buffers[kind][: p.numel()]

    def _counts(self, ps: list[Tensor]) -> _Counts:
        """Sizes of the whole matrices, which the reduction adds up once from those of their parts."""
        rows, columns = (ps[0].shape[-2], ps[0].shape[-1]) if ps[0].dim() >= 2 else (1, ps[0].numel())
        if self._reduction is local:
            return _Counts(rows, columns, ps[0].numel())
        return _Counts(*(torch.stack(known) for known in zip(*(self._known_counts[p] for p in ps), strict=True)))

    def _learn_counts(self, parameters: list[Tensor]) -> None:
        """Ask for the sizes of whole matrices, in the order of the parameters, which is the same on all ranks."""
        for p in parameters:
            if p not in self._known_counts:
                rows, columns = (p.shape[-2], p.shape[-1]) if p.dim() >= 2 else (1, p.numel())
                parts = ((rows, -2), (columns, -1), (p.numel(), None))
                self._known_counts[p] = tuple(self._reduction([p.new_full((), n)], [p], dim)[0] for n, dim in parts)


def _finish(steps: _Steps) -> None:
    """Run the step of whole matrices, whose sums are complete."""
    try:
        total, _ = next(steps)
        while True:
            total, _ = steps.send(total)
    except StopIteration:
        return


def _in_lockstep(
    begun: Sequence[tuple[_Steps, list[Tensor]]], parameters: Sequence[Tensor], reduction: Reduction
) -> None:
    """Run the steps of many stacks side by side; those that ask at the same moment share one reduction.

    What is asked for, and in which order, follows the order of `parameters`: ranks hold other rows, and so make other
    stacks, of the same ones.
    """
    order = {parameter: index for index, parameter in enumerate(parameters)}
    waiting = [(next(steps), steps, ps) for steps, ps in begun]
    while waiting:
        dim = min(waiting, key=lambda w: order[w[2][0]])[0][1]
        asking = [w for w in waiting if w[0][1] == dim]
        sums = {p: total for (totals, _), _, ps in asking for p, total in zip(ps, totals.unbind(), strict=True)}
        asked = sorted(sums, key=order.__getitem__)
        complete = dict(zip(asked, reduction([sums[p] for p in asked], asked, dim), strict=True))
        waiting = [w for w in waiting if w[0][1] != dim]
        for _, steps, ps in asking:
            try:
                waiting.append((steps.send(stacked([complete[p] for p in ps])), steps, ps))
            except StopIteration:
                continue


def _steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    if work.ps[0].dim() > 1:
        return _matrix_steps(work, lr, keep, counts, rule)
    return _vector_steps(work, lr, keep, counts, rule)


def _vector_steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    second = work.factors[0]
    _advance(second, work.g.square() + rule.eps, rule.beta2, keep)
    u = work.g * second.rsqrt()
    total_L = yield u.square().sum(-1), None
    u.mul_(_clip(total_L / counts.elements, rule).unsqueeze(-1))
    _move(work.ms, u, rule.beta1, keep)
    scaled = torch.mul(stacked(work.ms), -lr, out=work.buffer)
    _add(work.ps, scaled, 1 - lr * rule.weight_decay, keep)


def _matrix_steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    row_LBN, col_LBM, res_row_LBN, res_col_LBM = work.factors
    buffer_LBNM = torch.mul(work.g, work.g, out=work.buffer)
    yield from _advance_factors(buffer_LBNM, 1.0, row_LBN, col_LBM, keep, counts, rule.beta2, rule.eps)
    total_LB = yield row_LBN.sum(-1), -2
    by_row_LBN, by_col_LBM = _inverse(row_LBN, _mean(total_LB, counts.rows)), 1 / col_LBM
    # The squares of the scaled gradient, summed without building it.
    total_L = yield (_weighted_sum(by_row_LBN, buffer_LBNM) * by_col_LBM).sum((-2, -1)), None
    scale_LBN = by_row_LBN.sqrt() * _clip(total_L / counts.elements, rule)[:, None, None]
    torch.mul(work.g, scale_LBN.unsqueeze(-1), out=buffer_LBNM)
    buffer_LBNM.mul_(by_col_LBM.sqrt().unsqueeze(-2))
    distance_LBNM = _move(work.ms, buffer_LBNM, rule.beta1, keep)
    # The distance to the moved average is beta1 of that to the one before.
    yield from _advance_factors(
        distance_LBNM.square_(), rule.beta1**2, res_row_LBN, res_col_LBM, keep, counts, rule.beta3, rule.eps_residual
    )
    total_LB = yield res_row_LBN.sum(-1), -2
    scale_LBN = _inverse(res_row_LBN, _mean(total_LB, counts.rows)).sqrt() * -lr
    _apply(work, scale_LBN, res_col_LBM.rsqrt(), 1 - lr * rule.weight_decay, keep)


def _move(averages: list[Tensor], values: Tensor, beta: float, keep: Tensor | None) -> Tensor:
    """Move averages towards a stack of values, which becomes that of their distances before."""
    distances = list(values.unbind())
    torch._foreach_sub_(distances, averages)
    if keep is not None:
        values.masked_fill_(~keep, -0.0)
    torch._foreach_add_(averages, distances, alpha=1 - beta)
    return values


def _apply(work: _Work, scale_LBN: Tensor, scale_LBM: Tensor, shrink: Tensor, keep: Tensor | None) -> None:
    """Shrink the parameters and add the scaled averages; the buffer is overwritten."""
    if len(work.ps) == 1:
        torch.mul(work.ms[0], scale_LBN[0].unsqueeze(-1), out=work.buffer[0])
        if keep is None:  # a pass less
            work.ps[0].mul_(shrink).addcmul_(work.buffer[0], scale_LBM[0].unsqueeze(-2))
            return
    else:
        torch._foreach_copy_(list(work.buffer.unbind()), work.ms)
        work.buffer.mul_(scale_LBN.unsqueeze(-1))
    _add(work.ps, work.buffer.mul_(scale_LBM.unsqueeze(-2)), shrink, keep)


def _add(ps: list[Tensor], values: Tensor, shrink: Tensor, keep: Tensor | None) -> None:
    """Shrink parameters and add a stack of values, which is overwritten."""
    if keep is not None:
        values.masked_fill_(~keep, -0.0)
        shrink = torch.where(keep, shrink, 1.0)
    torch._foreach_mul_(ps, shrink)
    torch._foreach_add_(ps, list(values.unbind()))


def _advance_factors(
    square_LBNM: Tensor,
    factor: float,
    row_LBN: Tensor,
    col_LBM: Tensor,
    keep: Tensor | None,
    counts: _Counts,
    beta: float,
    eps: float,
) -> _Steps:
    """Move the row and column means towards those of `square_LBNM` times `factor`, + eps."""
    total_LBN = yield square_LBNM.sum(-1), -1
    _advance(row_LBN, _mean(total_LBN, counts.columns) * factor + eps, beta, keep)
    total_LBM = yield square_LBNM.sum(-2), -2
    _advance(col_LBM, _mean(total_LBM, counts.rows) * factor + eps, beta, keep)


def _mean(total: Tensor, count: Tensor | int) -> Tensor:
    """Sums (L, ...) divided by one count, or by one for each parameter of the stack."""
    return total / (count if isinstance(count, int) else count.view(-1, *[1] * (total.dim() - 1)))


def _inverse(row_LBN: Tensor, mean_LB: Tensor) -> Tensor:
    """The rows' part of ``1 / v`` for the second moment ``v = row col / mean(row)``."""
    return mean_LB.unsqueeze(-1) / row_LBN


def _weighted_sum(weight_LBN: Tensor, x_LBNM: Tensor) -> Tensor:
    """Sum over rows, each times its weight; as a product only on a CPU, since others may round its inputs (TF32)."""
    if x_LBNM.device.type == "cpu":
        return torch.matmul(weight_LBN.unsqueeze(-2), x_LBNM).squeeze(-2)
    return (x_LBNM * weight_LBN.unsqueeze(-1)).sum(-2)


def _clip(mean_square: Tensor, rule: _Rule) -> Tensor:
    """The factor that bounds an update's root mean square."""
    return 1 / (mean_square.sqrt() / rule.clip_threshold).clamp(min=1.0)


def _advance(average: Tensor, value: Tensor, beta: float, keep: Tensor | None) -> None:
    """``average = beta * average + (1 - beta) * value``, or nothing on a skipped step (where `value` may be NaN)."""
    if keep is None:
        average.lerp_(value, 1 - beta)
    else:
        average.copy_(torch.where(keep, average.lerp(value, 1 - beta), average))


def _fits_fused(p: Tensor, g: Tensor) -> bool:
    """Whether the compiled passes are made for this tensor: a matrix with an even number of rows, not in pieces."""
    return p.dim() == 2 and p.numel() > 0 and p.is_contiguous() and g.is_contiguous() and stacks_of(len(p)) > 1


def _numbers(group: dict[str, Any], like: Tensor) -> Numbers:
    rule, lr = _rule(group), float(group["lr"])
    rates = (1 - rule.beta1, 1 - rule.beta2, 1 - rule.beta3)
    rest = (rule.eps, rule.eps_residual, rule.clip_threshold, -lr, 1 - lr * rule.weight_decay)
    # Each is filled in on the device: copied there together, the host would wait for them.
    return Numbers(*(torch.full((), number, dtype=like.dtype, device=like.device) for number in (*rates, *rest)))


def _rule(group: dict[str, Any]) -> _Rule:
    beta1, beta2, beta3 = group["betas"]
    eps, eps_residual = group["eps"]
    return _Rule(beta1, beta2, beta3, eps, eps_residual, group["clip_threshold"], group["weight_decay"])


def _check(lr: float, betas: Sequence[float], eps: Sequence[float], clip_threshold: float, weight_decay: float) -> None:
    if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas = {betas} are not three rates in [0, 1): give for example (0.9, 0.999, 0.9999)")
    if len(eps) != 2:
        raise ValueError(f"eps = {eps} are not two numbers: give for example (1e-30, 1e-16)")
    for name, value in (("lr", lr), ("eps", min(eps)), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name} = {value} is negative: give a number of at least 0")
    if not clip_threshold > 0:
        raise ValueError(f"clip_threshold = {clip_threshold} is not positive: give for example 1.0")
