"""AdamW (decoupled weight decay) whose moments are kept in 8, 16 or 32 bits.

With 32 it is `torch.optim.AdamW`, with the same state, which the trainer then uses on a CPU. On a GPU torch's fused one
reads and writes at little more than half of the memory's rate (docs/optimizers.md), and writes the scaled gradients
back besides.

The arithmetic is torch's, in fp32, over moments that are made fp32 on the way. On a GPU one Triton kernel does it for
all matrices of a group, without a copy of any (`phalanx.optim.update_triton`); elsewhere the rows are taken in pieces,
so that what is fp32 for a moment is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.optim import quantise, skipping
from phalanx.optim.groups import blocks_of
from phalanx.optim.quantise import SCALE
from phalanx.optim.skipping import (
    SkippingOptimizer,
    check_rates,
    check_settings,
    refuse_unfit,
    share_step_counters,
    step_counter,
)

_PIECE, _PIECE_ON_GPU = 1 << 18, 1 << 24
"""Elements that are updated at once where plain torch does it."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether they have signs."""


class AdamW(SkippingOptimizer):
    """AdamW with moments of fewer bits, of parameters in fp32. `ValueError`: a setting is out of range."""

    def __init__(
        self,
        # parameters or groups. Each group may have its own ``state_bits``; other than matrices must have 32
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,  # decoupled: parameters shrink by ``lr * weight_decay`` before the update
        *,
        state_bits: int = 8,  # 32, 16 (bfloat16, stochastic rounding) or 8 (block-wise dynamic tree quantisation)
    ) -> None:
        check_rates(betas)
        check_settings(lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
        super().__init__(params, defaults)
        self._kernels: dict[int, Any] = {}  # by group: the last launch of the Triton kernel
        for group in self.param_groups:
            bits = group["state_bits"]
            if bits not in (8, 16, 32):
                raise ValueError(f"state_bits = {bits} is unknown: use 8, 16 or 32")
            for p in group["params"]:
                refuse_unfit(p)
                if bits != 32 and p.dim() != 2:
                    raise ValueError(
                        f"state_bits = {bits} is for matrices, not shape {tuple(p.shape)}: put it into a group of 32"
                    )

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if parameter.dtype != torch.float32:
            raise ValueError(f"parameters of {parameter.dtype} are not updated: keep master weights in float32")
        # Where no moment is narrow, the counter is as torch's AdamW has it, whose checkpoints are ours and ours its.
        wide = all(each["state_bits"] == 32 for each in self.param_groups)
        dtype = torch.float32 if wide else torch.float64
        state = {"step": step_counter(group, self.state, parameter.device, dtype)}
        for name, signed in MOMENTS.items():
            if group["state_bits"] == 8:
                state[name] = torch.full_like(parameter, quantise.zero_code(signed), dtype=torch.uint8)
                state[name + SCALE] = parameter.new_zeros(len(parameter), blocks_of(parameter.shape[1]))
            else:
                state[name] = torch.zeros_like(parameter, dtype=_DTYPES[group["state_bits"]])
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's, which gives state the parameters' dtype: that is undone, and a group has one counter again."""
        super().load_state_dict(state_dict)
        for index, group in enumerate(self.param_groups):
            saved = [state_dict["state"].get(i, {}) for i in state_dict["param_groups"][index]["params"]]
            for p, theirs in zip(group["params"], saved, strict=True):
                for name, value in theirs.items():
                    self.state[p][name] = value.to(device=p.device, copy=True)
        share_step_counters(self)

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        for index, group in enumerate(self.param_groups):
            parameters = self._with_gradients(group)
            if not parameters:
                continue
            step = self.state[parameters[0]]["step"]
            step.add_(1.0 if keep is None else keep.to(step.device))
            numbers, seed = _numbers(group, step.double(), grad_scale, keep), quantise.step_seed(step)
            kernels = skipping.twin(parameters)
            if kernels is not None:
                launch = self._kernels.setdefault(index, kernels.Launch())
                states = [self.state[p] for p in parameters]
                launch.adamw(parameters, states, numbers, seed, group["state_bits"])
                continue
            for p in parameters:
                assert p.grad is not None
                state = {name: value for name, value in self.state[p].items() if name != "step"}
                whole = {"p": p.detach(), "g": p.grad, **state}
                if p.dim() < 2:
                    whole = {name: value.view(-1, 1) for name, value in whole.items()}
                # A piece of rows at a time, so that what is fp32 for a moment is small.
                piece_size = _PIECE if p.device.type == "cpu" else _PIECE_ON_GPU
                rows = max(1, piece_size // max(1, whole["p"][:1].numel()))
                for start in range(0, len(p), rows):
                    piece = {name: value[start : start + rows] for name, value in whole.items()}
                    _update_rows(piece, group["state_bits"], numbers, seed)


_DTYPES = {32: torch.float32, 16: torch.bfloat16}


def _update_rows(rows: dict[str, Tensor], bits: int, numbers: Tensor, seed: Tensor) -> None:
    shrink, size, root, eps, to_m, keep_v, to_v, inverse, kept = numbers.to(torch.float32).unbind()
    keep, p = kept > 0, rows["p"]
    raw = rows["g"].to(torch.float32)
    g = torch.where(keep, raw, 0.0) * inverse
    m, v = (
        quantise.dequantise(rows[name], rows[name + SCALE], signed=signed) if bits == 8 else rows[name].float()
        for name, signed in MOMENTS.items()
    )
    m = m + to_m * (g - m)
    v = v * keep_v + g * g * to_v
    new = p * shrink - size * m / (v.sqrt() * root + eps)
    random = quantise.hashed(p, seed) if bits == 16 else None
    for (name, signed), value in zip(MOMENTS.items(), (m, v), strict=True):
        if bits == 8:
            codes, scales = quantise.quantise(value, signed=signed)
            rows[name].copy_(torch.where(keep, codes, rows[name]))
            rows[name + SCALE].copy_(torch.where(keep, scales, rows[name + SCALE]))
            continue
        if random is not None:  # each moment takes 16 bits of its own
            value = quantise.round_stochastically(value, random if signed else random >> 16)
        rows[name].copy_(torch.where(keep, value, rows[name]))
    p.copy_(torch.where(keep, new, p))


def _numbers(group: dict[str, Any], step: Tensor, grad_scale: Tensor | None, keep: Tensor | None) -> Tensor:
    """What a step needs beside tensors (float64, made on the device), in the order in which `_update_rows` takes it."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    # A skipped first step leaves the counter at 0 and the corrections too; nothing is then written of the result.
    c1, c2 = (torch.where(c > 0, c, 1.0) for c in (c1, c2))
    inverse = skipping.inverse_scale(grad_scale, keep, step)
    filled = [torch.full_like(step, x) for x in (1 - lr * group["weight_decay"], group["eps"], 1 - beta1, beta2, 1.0)]
    shrink, eps, to_m, keep_v, one = filled
    kept = one if keep is None else keep.to(step)
    return torch.stack(
        [shrink, lr / c1, c2.rsqrt(), eps, to_m, keep_v, one - keep_v, one if inverse is None else inverse, kept]
    )
