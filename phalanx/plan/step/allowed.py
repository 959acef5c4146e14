"""Which values the fields of a job and a strategy may have.

Every prediction asks this first, so that what is allowed is collected once, and what is right is let through by a few
calls into C; only what is wrong is looked at field by field.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from phalanx.core.errors import UserError
from phalanx.plan.types import Job, Model, Software, Strategy

_MANY = 10**9
"""More of anything is no size; products of two fit into 64 bits."""
_SIZE, _COUNT = (1, _MANY), (0, _MANY)
_INT = {int}


@dataclass(frozen=True)
class Allowed:
    """What the fields of one class may be.

    Attributes:
        kind: the class.
        numbers: least and most of each whole number.
        words: what each choice, or flag, is chosen from.
    """

    kind: type
    numbers: Mapping[str, tuple[int, int]]
    words: Mapping[str, frozenset[Any]]
    _numbers_of: Callable[[Any], tuple[Any, ...]]
    _words_of: Callable[[Any], tuple[Any, ...]]
    _least: tuple[int, ...]
    _most: tuple[int, ...]
    _choices: tuple[frozenset[Any], ...]

    def check(self, values: Any) -> None:
        """Whether `values` has only what is allowed.

        Raises:
            UserError: it does not; names field, value, and what is allowed.
        """
        if not isinstance(values, self.kind):
            raise UserError(f"is no {self.kind.__name__}", cure="make one of its fields", value=values)
        numbers, words = self._numbers_of(values), self._words_of(values)
        if {*map(type, numbers)} == _INT:
            inside = all(map(operator.ge, numbers, self._least)) and all(map(operator.le, numbers, self._most))
            if inside and all(map(_is_one, self._choices, words)):
                return
        self._refuse(values)

    def _refuse(self, values: Any) -> None:
        """Name the first field that is wrong; none is where a number comes from NumPy."""
        for name, (least, most) in self.numbers.items():
            value = getattr(values, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
                cure = f"give a whole number from {least:,} to {most:,}"
                raise UserError("is no such number", cure=cure, field=f"{self.kind.__name__}.{name}", value=value)
        for name, choices in self.words.items():
            value = getattr(values, name)
            if not _is_one(choices, value):
                known = ", ".join(sorted(map(repr, choices)))
                raise UserError(
                    "is not known", cure=f"take one of {known}", field=f"{self.kind.__name__}.{name}", value=value
                )


def _is_one(choices: frozenset[Any], value: Any) -> bool:
    try:
        return value in choices
    except TypeError:  # a list, say, which has no hash
        return False


def _allowed(kind: type, numbers: Mapping[str, tuple[int, int]]) -> Allowed:
    """What is allowed for a class: of choices and flags what their types say, of numbers what is given here."""
    words = {name: _choices(hint) for name, hint in get_type_hints(kind).items() if _choices(hint)}
    return Allowed(
        kind=kind,
        numbers=numbers,
        words=words,
        _numbers_of=operator.attrgetter(*numbers),
        _words_of=operator.attrgetter(*words),
        _least=tuple(least for least, _ in numbers.values()),
        _most=tuple(most for _, most in numbers.values()),
        _choices=tuple(words.values()),
    )


def _choices(hint: Any) -> frozenset[Any]:
    """What a type lets one choose from; nothing where it is no choice."""
    if hint is bool:
        return frozenset((True, False))
    return frozenset(get_args(hint)) if get_origin(hint) is Literal else frozenset()


STRATEGY = _allowed(
    Strategy,
    {
        **dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor", "expert"), _SIZE),
        **dict.fromkeys(("micro_batch", "chunks", "tensor_chunks"), _SIZE),
        "bucket_bytes": (0, 10**12),
    },
)
JOB = _allowed(Job, dict.fromkeys(("sequence", "global_batch"), _SIZE))
MODEL = _allowed(
    Model,
    {
        "layers": (1, 100_000),  # they are gone through one by one
        **dict.fromkeys(("hidden", "heads", "vocab_rows", "max_sequence", "kv_heads", "head_dim"), _SIZE),
        **dict.fromkeys(("mlp_width", "dense_mlp_width", "experts_per_token", "moe_every"), _SIZE),
        **dict.fromkeys(("experts", "shared_experts"), _COUNT),
    },
)
SOFTWARE = _allowed(
    Software,
    {
        **dict.fromkeys(("residual_bytes", "gradient_bytes", "reduce_bytes", "gather_bytes"), (1, 8)),
        **dict.fromkeys(("sent_bytes", "weight_bytes"), (1, 8)),
        "master_bytes": (0, 8),
    },
)
