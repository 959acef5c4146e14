"""Initial weights from a counter hash of (seed, logical name, element index): any slice alone gets the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.kernels.counter import make_key, normal
from phalanx.model.config import ModelConfig
from phalanx.model.logical import LogicalParameters
from phalanx.model.part import DecoderPart
from phalanx.model.shapes import Parameter, parameter_table


def initialise(model: DecoderPart, seed: int) -> None:
    """Fill every weight: matrices and embeddings normal(0, init_std), the residual outputs (``o``, ``down``) smaller by
    ``sqrt(2 layers)`` unless `init_depth_scaled` is off (GPT-2, section 2.3), norms 1, biases 0.

    The values do not depend on how projections are merged, nor on the device type.
    """
    table = parameter_table(model.config)
    with torch.no_grad():
        for name, parameter in LogicalParameters(model).items():
            values = initial_values(model.config, table[name], seed, device=parameter.device, dtype=parameter.dtype)
            parameter.copy_(values)


def initial_values(
    config: ModelConfig,
    parameter: Parameter,
    seed: int,
    *,
    offsets: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The initial values of one logical parameter, or of its slice ``[offsets, offsets + shape)``."""
    shape = tuple(parameter.shape if shape is None else shape)
    if parameter.role in ("norm", "bias"):
        return torch.full(shape, 1.0 if parameter.role == "norm" else 0.0, device=device, dtype=dtype)
    std = config.init_std
    if parameter.role == "output" and config.init_depth_scaled:
        std /= math.sqrt(2 * config.layers)
    key = make_key(seed, "init", parameter.name)
    return normal(key, parameter.shape, offsets=offsets, shape=shape, std=std, device=device, dtype=dtype)
