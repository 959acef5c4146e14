"""CAME: confidence-guided adaptive memory-efficient optimization (arXiv 2307.02047, algorithm 2).

Where the paper and the authors' code (yangluo7/CAME) differ this follows the code: statistics are means, not sums,
nothing is corrected for bias, tensors of more than two dimensions are factored over the last two, and vectors keep a
full second moment and are not divided by a confidence.

Shapes: B leading dimensions taken together, N rows, M columns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.optim.base import SkippingOptimizer, bundles, clean_gradients, inverse_scale
from phalanx.optim.came_fused import FusedStep, Matrix, Numbers, stacks_of
from phalanx.optim.reduction import Reduction, local

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
    """How many rows, columns and elements the whole logical matrix has."""

    rows: Tensor | int
    columns: Tensor | int
    elements: Tensor | int


class _Work(NamedTuple):
    """One parameter, its gradient (scaled, or zero on a skipped step), its state and memory of its size to work in.

    Matrices are seen as BNM with factors of BN and BM; vectors are flat and have only `factors[0]`, the second moment.
    """

    p: Tensor
    g: Tensor
    m: Tensor
    factors: tuple[Tensor, ...]
    buffer: Tensor


# A step of one parameter: yields a partial sum and the dimension it was summed over, and is sent the complete sum.
# So one text serves a whole matrix, and many spread ones in lockstep with one collective for all.
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
        self._known_counts: dict[Tensor, _Counts] = {}
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
            whole = self._reduction is local  # then one after the other, so that temporaries stay small
            for bundle in [[p] for p in parameters] if whole else bundles(parameters, together=True):
                inverse = inverse_scale(grad_scale, keep, bundle[0])
                gradients = clean_gradients(bundle, inverse, keep)
                if self._fused is not None and _fits_fused(bundle[0], gradients[0]):
                    self._fused(self._matrix(bundle[0], gradients[0]), _numbers(group, bundle[0]), keep)
                    continue
                lr = torch.full((), float(group["lr"]), dtype=bundle[0].dtype, device=bundle[0].device)
                works = [self._work(p, g) for p, g in zip(bundle, gradients, strict=True)]
                counts = [self._counts(p) for p in bundle]
                steps = [_steps(w, lr, keep, c, _rule(group)) for w, c in zip(works, counts, strict=True)]
                _in_lockstep(steps, bundle, self._reduction)

    def _matrix(self, p: Tensor, g: Tensor) -> Matrix:
        return Matrix(p.detach(), g, *(self.state[p][name] for name in ("exp_avg", *_FACTORS)))

    def _work(self, p: Tensor, g: Tensor) -> _Work:
        state = self.state[p]
        if p.dim() < 2:
            flat = (p.detach().view(-1), g.view(-1), state["exp_avg"].view(-1))
            return _Work(*flat, (state["exp_avg_sq"].view(-1),), self._buffer(p).view(-1))
        leading = p.shape[:-2].numel()  # not -1, which fits nothing where a rank holds no row
        shape = (leading, *p.shape[-2:])
        factors = tuple(state[name].view(leading, -1) for name in _FACTORS)
        return _Work(
            p.detach().view(shape), g.view(shape), state["exp_avg"].view(shape), factors, self._buffer(p).view(shape)
        )

    def _buffer(self, p: Tensor) -> Tensor:
        """Memory of the size of `p`: one for all while they are updated one after the other, since fresh pages cost."""
        if self._reduction is not local:
            return torch.empty_like(p)
        kind = (p.device, p.dtype)
        if kind not in self._buffers or self._buffers[kind].numel() < p.numel():
            alike = [q for group in self.param_groups for q in group["params"] if (q.device, q.dtype) == kind]
            self._buffers[kind] = p.new_empty(max(q.numel() for q in alike))
        return self._buffers[kind][: p.numel()]

    def _counts(self, p: Tensor) -> _Counts:
        """Sizes of the whole matrix, which the reduction adds up once from those of its parts."""
        if p not in self._known_counts:
            rows, columns = (p.shape[-2], p.shape[-1]) if p.dim() >= 2 else (1, p.numel())
            if self._reduction is local:
                self._known_counts[p] = _Counts(rows, columns, p.numel())
            else:
                parts = ((rows, -2), (columns, -1), (p.numel(), None))
                whole = [self._reduction([p.new_full((), n)], [p], dim)[0] for n, dim in parts]
                self._known_counts[p] = _Counts(*whole)
        return self._known_counts[p]


def _in_lockstep(steps: Sequence[_Steps], parameters: Sequence[Tensor], reduction: Reduction) -> None:
    """Run the steps of many parameters side by side; those that ask at the same moment share one reduction."""
    waiting = [(next(step), step, parameter) for step, parameter in zip(steps, parameters, strict=True)]
    while waiting:
        dim = waiting[0][0][1]
        asking = [w for w in waiting if w[0][1] == dim]
        totals = reduction([request[0] for request, _, _ in asking], [p for _, _, p in asking], dim)
        going_on = [w for w in waiting if w[0][1] != dim]
        for (_, step, parameter), total in zip(asking, totals, strict=True):
            try:
                going_on.append((step.send(total), step, parameter))
            except StopIteration:
                continue
        waiting = going_on


def _steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    if work.p.dim() > 1:
        return _matrix_steps(work, lr, keep, counts, rule)
    return _vector_steps(work, lr, keep, counts, rule)


def _vector_steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    p, m, second = work.p, work.m, work.factors[0]
    _advance(second, work.g.square() + rule.eps, rule.beta2, keep)
    u = work.g * second.rsqrt()
    total = yield u.square().sum(), None
    _advance(m, u * _clip(total / counts.elements, rule), rule.beta1, keep)
    if keep is None:
        p.mul_(1 - lr * rule.weight_decay).addcmul_(m, -lr)
    else:
        p.copy_(torch.where(keep, p * (1 - lr * rule.weight_decay) - lr * m, p))


def _matrix_steps(work: _Work, lr: Tensor, keep: Tensor | None, counts: _Counts, rule: _Rule) -> _Steps:
    row_BN, col_BM, res_row_BN, res_col_BM = work.factors
    buffer_BNM = torch.mul(work.g, work.g, out=work.buffer)
    yield from _advance_factors(buffer_BNM, row_BN, col_BM, keep, counts, rule.beta2, rule.eps)
    total_B = yield row_BN.sum(-1), -2
    by_row_BN, by_col_BM = _inverse(row_BN, total_B / counts.rows), 1 / col_BM
    # The squares of the scaled gradient, summed without building it.
    total = yield (_weighted_sum(by_row_BN, buffer_BNM) * by_col_BM).sum(), None
    scale_BN = by_row_BN.sqrt() * _clip(total / counts.elements, rule)
    _average(work.g, work.m, buffer_BNM, scale_BN, by_col_BM.sqrt(), keep, rule.beta1)
    yield from _advance_factors(buffer_BNM, res_row_BN, res_col_BM, keep, counts, rule.beta3, rule.eps_residual)
    total_B = yield res_row_BN.sum(-1), -2
    scale_BN = _inverse(res_row_BN, total_B / counts.rows).sqrt() * -lr
    _apply(work.p, work.m, buffer_BNM, scale_BN, res_col_BM.rsqrt(), 1 - lr * rule.weight_decay, keep)


def _average(
    g_BNM: Tensor,
    m_BNM: Tensor,
    buffer_BNM: Tensor,
    scale_BN: Tensor,
    scale_BM: Tensor,
    keep: Tensor | None,
    beta: float,
) -> None:
    """Move the average towards the scaled gradient; leave the squares of their distance in the buffer."""
    torch.mul(g_BNM, scale_BN.unsqueeze(-1), out=buffer_BNM)
    buffer_BNM.mul_(scale_BM.unsqueeze(-2))
    _advance(m_BNM, buffer_BNM, beta, keep)
    buffer_BNM.sub_(m_BNM).square_()


def _apply(
    p_BNM: Tensor,
    m_BNM: Tensor,
    buffer_BNM: Tensor,
    scale_BN: Tensor,
    scale_BM: Tensor,
    shrink: Tensor,
    keep: Tensor | None,
) -> None:
    """Shrink the parameter and add the scaled average; the buffer is overwritten."""
    scaled_BNM = torch.mul(m_BNM, scale_BN.unsqueeze(-1), out=buffer_BNM)
    if keep is None:
        p_BNM.mul_(shrink).addcmul_(scaled_BNM, scale_BM.unsqueeze(-2))
    else:
        p_BNM.copy_(torch.where(keep, p_BNM * shrink + scaled_BNM * scale_BM.unsqueeze(-2), p_BNM))


def _advance_factors(
    square_BNM: Tensor, row_BN: Tensor, col_BM: Tensor, keep: Tensor | None, counts: _Counts, beta: float, eps: float
) -> _Steps:
    """Move the row and column means towards those of `square_BNM` + eps."""
    total_BN = yield square_BNM.sum(-1), -1
    _advance(row_BN, total_BN / counts.columns + eps, beta, keep)
    total_BM = yield square_BNM.sum(-2), -2
    _advance(col_BM, total_BM / counts.rows + eps, beta, keep)


def _inverse(row_BN: Tensor, mean_B: Tensor) -> Tensor:
    """The rows' part of ``1 / v`` for the second moment ``v = row col / mean(row)``."""
    return mean_B.unsqueeze(-1) / row_BN


def _weighted_sum(weight_BN: Tensor, x_BNM: Tensor) -> Tensor:
    """Sum over rows, each times its weight; as a product only on a CPU, since others may round its inputs (TF32)."""
    if x_BNM.device.type == "cpu":
        return torch.matmul(weight_BN.unsqueeze(-2), x_BNM).squeeze(-2)
    return (x_BNM * weight_BN.unsqueeze(-1)).sum(-2)


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
    return Numbers(*torch.tensor((*rates, *rest), dtype=like.dtype, device=like.device).unbind(0))


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
