"""What optimizer state a rank holds: of which size, and what part of each tensor, from its parameter's. Torch-free.

Parameters are split along dimension 0 only (a run of rows; of elements for vectors), so a state tensor is cut in one of
three ways: like its parameter (moments), like the parameter's rows (CAME's row statistics, scales of moments of 8
bits), or not at all (CAME's column statistics, step counters), being then the same on every rank that has a part of the
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from phalanx.core.shard import Shard

LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer"})
SCALES = frozenset({"exp_avg_scale", "exp_avg_sq_scale"})
ROWS = frozenset({"exp_avg_sq_row", "exp_avg_res_row"})
COLUMNS = frozenset({"exp_avg_sq_col", "exp_avg_res_col"})
COUNTERS = frozenset({"step"})

BLOCK = 256
"""Columns of a matrix that share a scale, where moments have 8 bits."""
LEAST_NUMEL = 4096
"""Elements from which on moments are kept in fewer bits: smaller ones save nothing (as in bitsandbytes and torchao)."""


def blocks_of(columns: int) -> int:
    """Blocks of a row."""
    return -(-columns // BLOCK)


def bits_of(shape: Sequence[int], bits: int) -> int:
    """Of the moments of a logical parameter of this whole shape, where `bits` are asked for."""
    return bits if len(shape) == 2 and math.prod(shape) >= LEAST_NUMEL else 32


def moment_bytes(shape: Sequence[int], bits: int) -> int:
    """Of one moment of a logical parameter, with its scales."""
    numel, bits = math.prod(shape), bits_of(shape, bits)
    return numel * bits // 8 + (4 * shape[0] * blocks_of(shape[1]) if bits == 8 else 0)


def state_shard(key: str, parameter: Shard) -> Shard:
    """The part of the state tensor `key` (as optimizers name it) that goes with a part of its parameter.

    Of what is the same on all parts the owner is the rank that owns the parameter's first row. So every tensor has one
    owner of each element, also where parts are empty.

    Raises:
        ValueError: the key is not known, or the parameter is split along another dimension than the first.
    """
    if parameter.sizes[1:] != parameter.shape[1:]:
        raise ValueError(f"a block {parameter.offsets} + {parameter.sizes} of {parameter.shape} is no run of rows")
    if key in LIKE_PARAMETER:
        return parameter
    if key in SCALES:
        blocks = blocks_of(parameter.shape[1])
        of_scales = (parameter.shape[0], blocks), (parameter.offsets[0], 0), (parameter.sizes[0], blocks)
        return Shard(*of_scales, parameter.axes, parameter.owner)
    if key in ROWS:
        shape, offsets, sizes = parameter.shape[:-1], parameter.offsets[:-1], parameter.sizes[:-1]
        return Shard(shape, offsets, sizes, parameter.axes, parameter.owner)
    if key in COLUMNS:
        return _same_everywhere(parameter.shape[1:], parameter)
    if key in COUNTERS:
        return _same_everywhere((), parameter)
    known = ", ".join(sorted(LIKE_PARAMETER | SCALES | ROWS | COLUMNS | COUNTERS))
    raise ValueError(f"state {key!r} is not known: {known} are; say in phalanx.optim.state_shards how it is cut")


def state_shards(names: Iterable[str], parameters: Mapping[str, Shard]) -> dict[str, Shard]:
    """Parts by ``<logical name>.<state>``, the names of `OptimizerSet.state_tensors`.

    Raises:
        ValueError: as `state_shard`.
    """
    split = ((name, *name.rsplit(".", 1)) for name in names)
    return {name: state_shard(key, parameters[parameter]) for name, parameter, key in split}


def _same_everywhere(shape: tuple[int, ...], parameter: Shard) -> Shard:
    has_first = parameter.offsets[0] == 0 and parameter.sizes[0] > 0
    return Shard.whole(shape, owner=parameter.owner and has_first)
