"""Optimizer, learning rate and decay of each logical parameter, and what optimizer state a rank holds.

Parameters are split along dimension 0 only (a run of rows; of elements for vectors), so a state tensor is cut in one of
three ways: like its parameter (moments), like the parameter's rows (CAME's row statistics, scales of moments of 8
bits), or not at all (CAME's column statistics, step counters), being then the same on every rank that has a part of the
parameter.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.optim.config import GroupConfig, Kind, OptimConfig


@dataclass(frozen=True)
class Settings:
    """What one parameter is updated with."""

    kind: Kind
    lr: float
    weight_decay: float


def assign(config: OptimConfig, dimensions: Mapping[str, int]) -> dict[str, Settings]:
    """Settings by logical name.

    Vectors and names that hold ``embedding`` are not decayed unless the config says so; Muon takes the matrices but
    embeddings and ``head``, AdamW the rest. Groups of the config come last, in their order.

    Args:
        config: the optimizer's config.
        dimensions: number of dimensions by logical name.

    Raises:
        UserError: a pattern fits no name, or a group gives a parameter that is not a matrix to Muon.
    """
    result = {name: _base(config, name, dims) for name, dims in dimensions.items()}
    for index, group in enumerate(config.groups):
        fitting = [name for name in dimensions if _fits(group.pattern, name)]
        if not fitting:
            raise _no_fit(index, group.pattern, dimensions)
        for name in fitting:
            result[name] = _override(config, result[name], group, name, dimensions[name])
    for index, group in enumerate(config.groups):
        if group.optimizer == "muon":
            _check_matrices(index, group, dimensions)
    return result


def is_embedding(name: str) -> bool:
    """Whether a logical parameter is looked up by token or position."""
    return "embedding" in name.rsplit(".", 1)[-1]


def _base(config: OptimConfig, name: str, dims: int) -> Settings:
    matrix = dims >= 2 and not is_embedding(name)
    kind: Kind = config.name
    if kind == "muon" and (dims != 2 or not matrix or name.rsplit(".", 1)[-1] == "head"):
        kind = "adamw"
    return Settings(kind, config.lr_of(kind), _decay(config, kind, name, dims))


def _decay(config: OptimConfig, kind: Kind, name: str, dims: int) -> float:
    decayed = config.decay_vectors if dims < 2 else not is_embedding(name) or config.decay_embeddings
    return config.weight_decay_of(kind) if decayed else 0.0


def _override(config: OptimConfig, base: Settings, group: GroupConfig, name: str, dims: int) -> Settings:
    if group.optimizer is not None and group.optimizer != base.kind:
        base = Settings(group.optimizer, config.lr_of(group.optimizer), _decay(config, group.optimizer, name, dims))
    if group.lr is not None:
        base = replace(base, lr=group.lr)
    if group.lr_scale is not None:
        base = replace(base, lr=base.lr * group.lr_scale)
    return base if group.weight_decay is None else replace(base, weight_decay=group.weight_decay)


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _no_fit(index: int, pattern: str, names: Iterable[str]) -> UserError:
    known = list(names)
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
    return UserError(
        "fits no parameter",
        cure=f"names are such as {', '.join(near)}",
        field=f"optim.groups.{index}.pattern",
        value=pattern,
    )


def _check_matrices(index: int, group: GroupConfig, dimensions: Mapping[str, int]) -> None:
    wrong = next((name for name, dims in dimensions.items() if dims != 2 and _fits(group.pattern, name)), None)
    if wrong is not None:
        raise UserError(
            f"fits {wrong}, which is no matrix, and gives it to muon",
            cure="narrow the pattern to matrices or choose another optimizer",
            field=f"optim.groups.{index}.pattern",
            value=group.pattern,
        )


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
    raise ValueError(f"state {key!r} is not known: {known} are; say in phalanx.optim.groups how it is cut")


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
