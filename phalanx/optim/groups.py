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
from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.optim.config import Kind, OptimConfig


@dataclass(frozen=True)
class Settings:
    """Optimizer, rate and decay of one parameter."""

    kind: Kind
    lr: float
    weight_decay: float


def assign(config: OptimConfig, dimensions: Mapping[str, int]) -> dict[str, Settings]:
    """Settings by logical name.

    Vectors and names that hold ``embedding`` are not decayed unless the config says so; Muon takes the matrices but
    embeddings and ``head``, AdamW the rest. Groups of the config come last, in their order.

    Args:
        dimensions: number of dimensions by logical name.

    Raises:
        UserError: a pattern fits no name, or a group gives a parameter that is not a matrix to Muon.
    """
    result: dict[str, Settings] = {}
    for name, dims in dimensions.items():
        kind: Kind = config.name
        # Muon is made for the matrices of hidden layers; its authors give embeddings and the head to AdamW.
        if kind == "muon" and (dims != 2 or _is_embedding(name) or name.rsplit(".", 1)[-1] == "head"):
            kind = "adamw"
        result[name] = Settings(kind, config.lr_of(kind), _decay(config, kind, name, dims))
    # In the order of the config, so that of several groups that fit a name the last one decides.
    for index, group in enumerate(config.groups):
        where = {"field": f"optim.groups.{index}.pattern", "value": group.pattern}
        fitting = [name for name in dimensions if _fits(group.pattern, name)]
        if not fitting:
            known = list(dimensions)
            near = difflib.get_close_matches(group.pattern, known, n=3, cutoff=0.4) or known[:3]
            raise UserError("fits no parameter", cure=f"names are such as {', '.join(near)}", **where)
        for name in fitting:
            chosen = result[name]
            # Another optimizer has a rate and a decay of its own: a rate that suits Muon is far too high for AdamW.
            if group.optimizer is not None and group.optimizer != chosen.kind:
                decay = _decay(config, group.optimizer, name, dimensions[name])
                chosen = Settings(group.optimizer, config.lr_of(group.optimizer), decay)
            lr = (group.lr or chosen.lr) * (1.0 if group.lr_scale is None else group.lr_scale)
            decay = chosen.weight_decay if group.weight_decay is None else group.weight_decay
            result[name] = Settings(chosen.kind, lr, decay)
        wrong = next((name for name in fitting if dimensions[name] != 2), None)
        if group.optimizer == "muon" and wrong is not None:
            raise UserError(
                f"fits {wrong}, which is no matrix, and gives it to muon",
                cure="narrow the pattern to matrices or choose another optimizer",
                **where,
            )
    return result


def _is_embedding(name: str) -> bool:
    return "embedding" in name.rsplit(".", 1)[-1]


def _decay(config: OptimConfig, kind: Kind, name: str, dims: int) -> float:
    decayed = config.decay_vectors if dims < 2 else not _is_embedding(name) or config.decay_embeddings
    return config.weight_decay_of(kind) if decayed else 0.0


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.fullmatch(pattern.removeprefix("re:"), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


# By the names that optimizers give their state. An unknown one is refused, so that a new kind of state is never cut
# wrongly.
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
    # A scale is fp32 and belongs to a block of a row: a split between rows never cuts a block.
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
