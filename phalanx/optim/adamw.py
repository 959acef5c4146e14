"""AdamW whose moments are kept in 8 or 16 bits; with 32 it is `torch.optim.AdamW`, which the trainer then uses.

The arithmetic is torch's, in fp32, over moments that are made fp32 on the way. On a GPU one Triton kernel does it for
all matrices of a group, without a copy of any (`phalanx.optim.update_triton`); elsewhere the rows are taken in pieces,
so that what is fp32 for a moment is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.optim import base, quantise
from phalanx.optim.base import SkippingOptimizer, refuse_unfit
from phalanx.optim.groups import blocks_of
from phalanx.optim.quantise import SCALE

_PIECE = 1 << 18
"""Elements that are updated at once where plain torch does it."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether they have signs."""


class AdamW(SkippingOptimizer):
    """AdamW with moments of fewer bits.

    Args:
        params: parameters or groups, fp32; gradients may be of lower precision. Each group may have its own
            ``state_bits``; other than matrices must have 32.
        lr: learning rate.
        betas: decay rates of the first and second moment, per step.
        eps: added to the root of the second moment.
        weight_decay: decoupled: parameters shrink by ``lr * weight_decay`` before the update.
        state_bits: 32, 16 (bfloat16, stochastic rounding) or 8 (block-wise dynamic tree quantisation).

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 8,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas} are not all in [0, 1): give decay rates such as (0.9, 0.95)")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} = {value} is negative: give a number of at least 0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
        super().__init__(params, defaults)
        self._kernels: dict[int, Any] = {}  # by group: what the Triton kernel was last told
        for group in self.param_groups:
            _check_bits(group)

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The step counter (float64, one tensor for the whole group) and both moments, with scales if of 8 bits."""
        if parameter.dtype != torch.float32:
            raise ValueError(f"parameters of {parameter.dtype} are not updated: keep master weights in float32")
        first = next((self.state[p] for p in group["params"] if "step" in self.state[p]), None)
        state = {"step": torch.zeros((), dtype=torch.float64, device=parameter.device) if not first else first["step"]}
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
            states = [self.state[p] for p in group["params"] if "step" in self.state[p]]
            for state in states:
                state["step"] = states[0]["step"]

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        for index, group in enumerate(self.param_groups):
            parameters = self._with_gradients(group)
            if not parameters:
                continue
            step = self.state[parameters[0]]["step"]
            step.add_(1.0 if keep is None else keep.to(step.device))
            numbers, seed = _numbers(group, step, grad_scale, keep), quantise.step_seed(step)
            kernels = base.twin(parameters)
            if kernels is not None:
                launch = self._kernels.setdefault(index, kernels.Launch())
                states = [self.state[p] for p in parameters]
                launch.adamw(parameters, states, numbers, seed, group["state_bits"])
                continue
            for p in parameters:
                self._update_one(p, group["state_bits"], numbers, seed)

    def _update_one(self, p: Tensor, bits: int, numbers: Tensor, seed: Tensor) -> None:
        """The plain reference: piece by piece of rows."""
        assert p.grad is not None
        state = {name: value for name, value in self.state[p].items() if name != "step"}
        whole = {"p": p.detach(), "g": p.grad, **state}
        if p.dim() < 2:
            whole = {name: value.view(-1, 1) for name, value in whole.items()}
        rows = max(1, _PIECE // max(1, whole["p"][:1].numel()))
        for start in range(0, len(p), rows):
            _update_rows({name: value[start : start + rows] for name, value in whole.items()}, bits, numbers, seed)


_DTYPES = {32: torch.float32, 16: torch.bfloat16}


def _update_rows(rows: dict[str, Tensor], bits: int, numbers: Tensor, seed: Tensor) -> None:
    shrink, size, root, eps, to_m, keep_v, to_v, inverse, kept = numbers.to(torch.float32).unbind()
    keep, p = kept > 0, rows["p"]
    raw = rows["g"].to(torch.float32)
    g = torch.where(keep, raw, 0.0) * inverse
    m, v = (_read(rows, name, signed, bits) for name, signed in MOMENTS.items())
    m = m + to_m * (g - m)
    v = v * keep_v + g * g * to_v
    new = p * shrink - size * m / (v.sqrt() * root + eps)
    random = quantise.hashed(p, seed) if bits == 16 else None
    for (name, signed), value in zip(MOMENTS.items(), (m, v), strict=True):
        _write(rows, name, value, keep, signed, bits, random if signed or random is None else random >> 16)
    p.copy_(torch.where(keep, new, p))


def _read(rows: dict[str, Tensor], name: str, signed: bool, bits: int) -> Tensor:
    if bits == 8:
        return quantise.dequantise(rows[name], rows[name + SCALE], signed=signed)
    return rows[name].to(torch.float32)


def _write(
    rows: dict[str, Tensor], name: str, value: Tensor, keep: Tensor, signed: bool, bits: int, random: Tensor | None
) -> None:
    if bits == 8:
        codes, scales = quantise.quantise(value, signed=signed)
        rows[name].copy_(torch.where(keep, codes, rows[name]))
        rows[name + SCALE].copy_(torch.where(keep, scales, rows[name + SCALE]))
        return
    stored = value if random is None else quantise.round_stochastically(value, random)
    rows[name].copy_(torch.where(keep, stored, rows[name]))


def _numbers(group: dict[str, Any], step: Tensor, grad_scale: Tensor | None, keep: Tensor | None) -> Tensor:
    """What a step needs beside tensors (float64, made on the device), in the order in which `_update_rows` takes it."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    # A skipped first step leaves the counter at 0 and the corrections too; nothing is then written of the result.
    c1, c2 = (torch.where(c > 0, c, 1.0) for c in (c1, c2))
    inverse = base.inverse_scale(grad_scale, keep, step)
    filled = [torch.full_like(step, x) for x in (1 - lr * group["weight_decay"], group["eps"], 1 - beta1, beta2, 1.0)]
    shrink, eps, to_m, keep_v, one = filled
    kept = one if keep is None else keep.to(step)
    return torch.stack(
        [shrink, lr / c1, c2.rsqrt(), eps, to_m, keep_v, one - keep_v, one if inverse is None else inverse, kept]
    )


def _check_bits(group: dict[str, Any]) -> None:
    bits = group["state_bits"]
    if bits not in (8, 16, 32):
        raise ValueError(f"state_bits = {bits} is unknown: use 8, 16 or 32")
    for parameter in group["params"]:
        refuse_unfit(parameter)
        if bits != 32 and parameter.dim() != 2:
            raise ValueError(
                f"state_bits = {bits} is for matrices, not shape {tuple(parameter.shape)}: put it into a group of 32"
            )
