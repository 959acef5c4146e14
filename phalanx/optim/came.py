"""CAME: confidence-guided adaptive memory-efficient optimization (arXiv 2307.02047, algorithm 2).

Where the paper and the authors' code (yangluo7/CAME) differ this follows the code: statistics are means, not sums,
nothing is corrected for bias, tensors of more than two dimensions are factored over the last two, and vectors keep a
full second moment and are not divided by a confidence.

Parameters of one shape are updated as a stack, so that a GPU gets as many kernels for many as for one; on a CPU each
is a stack of its own. Shapes: L parameters, B leading dimensions taken together, N rows, M columns.

*The fused step* over one matrix is compiled passes: each walks the matrix once, without a buffer of its size.

A compiler for CPUs makes one loop of sums over columns and one of sums over rows, so that a matrix would be read twice
by each pass, and the second time across its rows. Here the rows are dealt to R stacks that are walked abreast: in one
loop the squares are summed along each stack's row, and over the stacks into a matrix R times smaller, of which the sum
over rows is then cheap. More than four stacks were slower: too many streams for one core's cache. Shapes: N = R K rows
in R stacks of K rows, M columns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.optim.skipping import (
    Reduction,
    SkippingOptimizer,
    check_settings,
    clean_gradients,
    inverse_scale,
    local,
    stacked,
    stacked_gradients,
    stacks,
)


class _Numbers(NamedTuple):
    """The settings of a step as scalar tensors: Python numbers would be converted at every element."""

    to_average: Tensor
    to_square: Tensor
    to_instability: Tensor
    eps: Tensor
    eps_residual: Tensor
    clip_threshold: Tensor
    minus_lr: Tensor
    shrink: Tensor


class _Matrix(NamedTuple):
    p: Tensor
    g: Tensor
    m: Tensor
    row: Tensor
    col: Tensor
    res_row: Tensor
    res_col: Tensor


def _stacks_of(rows: int) -> int:
    return next(n for n in (4, 2, 1) if rows % n == 0)  # 1 is not worth a fused step


class _FusedStep:
    """The compiled passes; sizes are symbols, so that matrices of all shapes with as many stacks share them.

    Rows are always given as RK: where a length of N and one of M are equal, a square matrix would be compiled anew.
    """

    def __init__(self) -> None:
        passes: tuple[Callable[..., Any], ...] = (_squares, _fused_advance, _fused_clip, _average, _fused_apply)
        compiled = [torch.compile(each, dynamic=True, fullgraph=True) for each in passes]
        self._squares, self._advance, self._clip, self._average, self._apply = compiled
        self._ones: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def __call__(self, matrix: _Matrix, numbers: _Numbers, keep: Tensor | None) -> None:
        rows, columns = matrix.p.shape
        stacks = _stacks_of(rows)
        p_RKM, g_RKM, m_RKM = (x.view(stacks, rows // stacks, columns) for x in (matrix.p, matrix.g, matrix.m))
        row_RK, res_row_RK = (x.view(stacks, rows // stacks) for x in (matrix.row, matrix.res_row))
        kind = (matrix.p.device, matrix.p.dtype, columns)
        if kind not in self._ones:
            self._ones[kind] = matrix.p.new_ones(columns)
        # Sums over rows stay outside: compiled, they are four times slower than torch's own.
        over_KM, over_RK = self._squares(g_RKM, self._ones[kind])
        scales = self._advance(over_RK, over_KM.sum(0), row_RK, matrix.col, numbers.to_square, numbers.eps, keep)
        scale_RK = self._clip(g_RKM, *scales, numbers)
        over_KM, over_RK = self._average(g_RKM, m_RKM.unbind(0), scale_RK, scales[1], numbers, keep)
        rate, eps = numbers.to_instability, numbers.eps_residual
        scales = self._advance(over_RK, over_KM.sum(0), res_row_RK, matrix.res_col, rate, eps, keep)
        self._apply(p_RKM, m_RKM, *scales, numbers, keep)


def _squares(g_RKM: Tensor, ones_M: Tensor) -> tuple[Tensor, Tensor]:
    """Squares summed over stacks (KM) and along rows (RK), in one loop.

    The ones keep it so: without a vector over columns the compiler makes one loop of K and M, which does not fuse
    with sums along rows; nor does it fuse where the sums are worked on further, so `_advance` is a graph of its own.
    """
    squares = [g_KM.square() for g_KM in g_RKM.unbind(0)]
    return _sum(squares) * ones_M, torch.stack([s.sum(-1) for s in squares])


def _fused_advance(
    over_RK: Tensor, over_M: Tensor, row_RK: Tensor, col_M: Tensor, rate: Tensor, eps: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Move row and column means towards those of new squares; return the two factors of ``1 / sqrt(v)``."""
    new_row_RK = _moved(row_RK, over_RK / over_M.numel() + eps, rate, keep)
    new_col_M = _moved(col_M, over_M / over_RK.numel() + eps, rate, keep)
    row_RK.copy_(new_row_RK)
    col_M.copy_(new_col_M)
    return (new_row_RK.mean() / new_row_RK).sqrt(), new_col_M.rsqrt()


def _fused_clip(g_RKM: Tensor, scale_RK: Tensor, scale_M: Tensor, numbers: _Numbers) -> Tensor:
    """The rows' factor of the clipped update, from that of the unclipped one."""
    pairs = zip(g_RKM.unbind(0), scale_RK.unbind(0), strict=True)
    squares = [(g_KM * s_K.unsqueeze(-1)).square() for g_KM, s_K in pairs]
    mean = (_sum(squares) * scale_M.square()).sum(-1).sum() / g_RKM.numel()
    return scale_RK / (mean.sqrt() / numbers.clip_threshold).clamp(min=1.0)


def _average(
    g_RKM: Tensor, ms_KM: Sequence[Tensor], scale_RK: Tensor, scale_M: Tensor, numbers: _Numbers, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance the average; return the squares of its distance to the update, summed as in `_squares`."""
    us_KM = [g * s.unsqueeze(-1) * scale_M for g, s in zip(g_RKM.unbind(0), scale_RK.unbind(0), strict=True)]
    news_KM = [_moved(m, u, numbers.to_average, keep) for m, u in zip(ms_KM, us_KM, strict=True)]
    squares = [(u - m).square() for u, m in zip(us_KM, news_KM, strict=True)]
    for m, new in zip(ms_KM, news_KM, strict=True):
        m.copy_(new)
    return _sum(squares), torch.stack([s.sum(-1) for s in squares])


def _fused_apply(
    p_RKM: Tensor, m_RKM: Tensor, scale_RK: Tensor, scale_M: Tensor, numbers: _Numbers, keep: Tensor | None
) -> None:
    new = p_RKM * numbers.shrink + m_RKM * (scale_RK * numbers.minus_lr).unsqueeze(-1) * scale_M
    p_RKM.copy_(new if keep is None else torch.where(keep, new, p_RKM))


def _sum(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else _sum(terms[: len(terms) // 2]) + _sum(terms[len(terms) // 2 :])


def _moved(average: Tensor, value: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
    new = average + weight * (value - average)
    return new if keep is None else torch.where(keep, new, average)


_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


class _Rule(NamedTuple):
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
    """CAME over logical matrices, fp32 or fp64: factors and the clip belong to each parameter it is given.

    Raises:
        ValueError: a setting is out of range, or `compile` is combined with a reduction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-4,  # the authors advise 1/3 to 1 times AdamW's
        # decay rates, per step, of the update, of the squared gradient and of the instability
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),  # added to the squared gradient and to the squared instability
        clip_threshold: float = 1.0,  # bound of the root mean square of an update
        weight_decay: float = 0.0,  # decoupled: parameters shrink by ``lr * weight_decay`` before the update
        *,
        reduction: Reduction = local,  # completes sums over matrices that are spread over ranks
        compile: bool = False,  # run the step through ``torch.compile`` (needs the local reduction)
    ) -> None:
        if len(betas) != 3 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas} are not three rates in [0, 1): give for example (0.9, 0.999, 0.9999)")
        if len(eps) != 2:
            raise ValueError(f"eps = {eps} are not two numbers: give for example (1e-30, 1e-16)")
        if not clip_threshold > 0:
            raise ValueError(f"clip_threshold = {clip_threshold} is not positive: give for example 1.0")
        check_settings(compile, reduction, lr=lr, eps=min(eps), weight_decay=weight_decay)
        rule = {"betas": betas, "eps": eps, "clip_threshold": clip_threshold, "weight_decay": weight_decay}
        self._reduction = reduction
        self._known_counts: dict[Tensor, tuple[Tensor, ...]] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._fused = _FusedStep() if compile else None
        super().__init__(params, {"lr": lr, **rule})

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
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
            if self._fused is not None and parameters:
                parameters = self._update_fused(group, parameters, grad_scale, keep)
            alone = bool(parameters) and parameters[0].is_cpu and not self.as_on_device
            if self._reduction is not local:
                self._learn_counts(parameters)
            begun = []
            for alike in stacks(parameters, alone=alone):
                gradients = stacked_gradients(alike, inverse_scale(grad_scale, keep, alike[0]), keep)
                lr = torch.full((), float(group["lr"]), dtype=alike[0].dtype, device=alike[0].device)
                work = self._work(alike, gradients)
                make = _matrix_steps if work.ps[0].dim() > 1 else _vector_steps
                steps = make(work, lr, keep, self._counts(alike), _rule(group))
                if self._reduction is local:  # one after the other, so that temporaries stay small
                    _finish(steps)
                    self._keep_factors(alike, work)
                else:
                    begun.append((alike, work, steps))
            if begun:
                _in_lockstep([(steps, alike) for alike, _, steps in begun], parameters, self._reduction)
            for alike, work, _ in begun:
                self._keep_factors(alike, work)

    def _update_fused(
        self, group: dict[str, Any], parameters: list[Tensor], grad_scale: Tensor | None, keep: Tensor | None
    ) -> list[Tensor]:
        """Run the compiled passes over what they are made for; return the other parameters."""
        assert self._fused is not None
        inverse = inverse_scale(grad_scale, keep, parameters[0])
        left = []
        for p in parameters:
            (g,) = clean_gradients([p], inverse, keep)
            # A matrix with an even number of rows, not in pieces.
            if p.dim() == 2 and p.numel() and p.is_contiguous() and g.is_contiguous() and _stacks_of(len(p)) > 1:
                state = (self.state[p][name] for name in ("exp_avg", *_FACTORS))
                self._fused(_Matrix(p.detach(), g, *state), _numbers(group, p), keep)
            else:
                left.append(p)
        return left

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
        if len(ps) == 1:  # its factors are views of its state
            return
        for name, factors in zip(_FACTORS if ps[0].dim() >= 2 else ("exp_avg_sq",), work.factors, strict=True):
            own = [self.state[p][name] for p in ps]
            torch._foreach_copy_(own, list(factors.view(len(ps), *own[0].shape).unbind()))

    def _buffer(self, p: Tensor) -> Tensor:
        # One for all while they are updated one after the other, since fresh pages cost.
        if self._reduction is not local or not p.is_cpu:
            return torch.empty_like(p)
        kind = (p.device, p.dtype)
        if kind not in self._buffers or self._buffers[kind].numel() < p.numel():
            alike = [q for group in self.param_groups for q in group["params"] if (q.device, q.dtype) == kind]
            self._buffers[kind] = p.new_empty(max(q.numel() for q in alike))
        return self._buffers[kind][: p.numel()]

    def _counts(self, ps: list[Tensor]) -> _Counts:
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
    try:
        total, _ = next(steps)
        while True:
            total, _ = steps.send(total)
    except StopIteration:
        pass


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
    # The rows' and the columns' part of 1 / v, for the second moment v = row col / mean(row).
    by_row_LBN, by_col_LBM = _mean(total_LB, counts.rows).unsqueeze(-1) / row_LBN, 1 / col_LBM
    # The squares of the scaled gradient, summed without building it.
    if buffer_LBNM.is_cpu:  # a product only on a CPU, since others may round its inputs (TF32)
        weighted_LBM = torch.matmul(by_row_LBN.unsqueeze(-2), buffer_LBNM).squeeze(-2)
    else:
        weighted_LBM = (buffer_LBNM * by_row_LBN.unsqueeze(-1)).sum(-2)
    total_L = yield (weighted_LBM * by_col_LBM).sum((-2, -1)), None
    scale_LBN = by_row_LBN.sqrt() * _clip(total_L / counts.elements, rule)[:, None, None]
    torch.mul(work.g, scale_LBN.unsqueeze(-1), out=buffer_LBNM)
    buffer_LBNM.mul_(by_col_LBM.sqrt().unsqueeze(-2))
    distance_LBNM = _move(work.ms, buffer_LBNM, rule.beta1, keep)
    # The distance to the moved average is beta1 of that to the one before.
    yield from _advance_factors(
        distance_LBNM.square_(), rule.beta1**2, res_row_LBN, res_col_LBM, keep, counts, rule.beta3, rule.eps_residual
    )
    total_LB = yield res_row_LBN.sum(-1), -2
    scale_LBN = (_mean(total_LB, counts.rows).unsqueeze(-1) / res_row_LBN).sqrt() * -lr
    _apply(work, scale_LBN, res_col_LBM.rsqrt(), 1 - lr * rule.weight_decay, keep)


def _move(averages: list[Tensor], values: Tensor, beta: float, keep: Tensor | None) -> Tensor:
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
    total_LBN = yield square_LBNM.sum(-1), -1
    _advance(row_LBN, _mean(total_LBN, counts.columns) * factor + eps, beta, keep)
    total_LBM = yield square_LBNM.sum(-2), -2
    _advance(col_LBM, _mean(total_LBM, counts.rows) * factor + eps, beta, keep)


def _mean(total: Tensor, count: Tensor | int) -> Tensor:
    """Sums (L, ...) divided by one count, or by one for each parameter of the stack."""
    return total / (count if isinstance(count, int) else count.view(-1, *[1] * (total.dim() - 1)))


def _clip(mean_square: Tensor, rule: _Rule) -> Tensor:
    return 1 / (mean_square.sqrt() / rule.clip_threshold).clamp(min=1.0)


def _advance(average: Tensor, value: Tensor, beta: float, keep: Tensor | None) -> None:
    """``average = beta * average + (1 - beta) * value``, or nothing on a skipped step (where `value` may be NaN)."""
    if keep is None:
        average.lerp_(value, 1 - beta)
    else:
        average.copy_(torch.where(keep, average.lerp(value, 1 - beta), average))


def _numbers(group: dict[str, Any], like: Tensor) -> _Numbers:
    rule, lr = _rule(group), float(group["lr"])
    rates = (1 - rule.beta1, 1 - rule.beta2, 1 - rule.beta3)
    rest = (rule.eps, rule.eps_residual, rule.clip_threshold, -lr, 1 - lr * rule.weight_decay)
    # Each is filled in on the device: copied there together, the host would wait for them.
    return _Numbers(*(torch.full((), number, dtype=like.dtype, device=like.device) for number in (*rates, *rest)))


def _rule(group: dict[str, Any]) -> _Rule:
    beta1, beta2, beta3 = group["betas"]
    eps, eps_residual = group["eps"]
    return _Rule(beta1, beta2, beta3, eps, eps_residual, group["clip_threshold"], group["weight_decay"])
