"""Which optimizer, learning rate and decay each logical parameter gets. Torch-free."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from phalanx.core.errors import UserError
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
        UserError: a pattern fits no name, or a group gives a parameter that is no matrix to Muon.
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
