"""The messages of the processes that measure, how large their cases are, and which fit into a device's memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from phalanx.core.errors import UserError

Precision = Literal["bf16", "fp32"]
Kind = Literal["cpu", "cuda"]

ATTENTION_HEADS = 6
HEAD_DIM = 64
"""Heads of the attention that is measured, and the size of those whose rotation is."""

TINY = (1, 8, 32)
"""Sequences, their length and the width of a layer that only the host has work with."""
LAYERS = ((8, 128, 128), (2, 256, 384))
"""Of those whose kernels several threads share."""


@dataclass(frozen=True)
class Task:
    """What one rank is to measure, together with the others, who measure the same at the same time.

    Attributes:
        meet: file where the ranks meet.
        threads: for arithmetic; a GPU's rank needs them for nothing that is measured.
        cpus: hardware threads that it is bound to; empty: all that it may use.
        device: GPUs are numbered as ranks.
        precisions: of matrix products and attention; empty: fp32, and bf16 where it is fast.
        quick: a few small sizes, seen twice: to see that it works.
        parent: process without which it is of no use.
        started_unix_s: when the process was started.
    """

    meet: str
    rank: int
    ranks: int
    threads: int
    cpus: tuple[int, ...]
    device: Kind
    precisions: tuple[Precision, ...]
    quick: bool
    parent: int
    started_unix_s: float

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The task that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "cpus": tuple(values["cpus"]), "precisions": tuple(values["precisions"])})


@dataclass(frozen=True)
class Timing:
    """One thing that was measured.

    Attributes:
        what: such as ``product`` or ``all_reduce``.
        sizes: by name, such as ``tokens``; the meaning is the measuring module's.
        precision: of the operands.
        seconds: of one call, median over rounds.
        spread: distance of the quartiles over the median, ratio.
    """

    what: str
    sizes: Mapping[str, float]
    precision: Precision
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What one rank found.

    Attributes:
        timings: in the order in which they were measured.
        numbers: what is no time, such as ``memory_bytes``.
        texts: such as the device's name.
    """

    timings: tuple[Timing, ...]
    numbers: Mapping[str, float]
    texts: Mapping[str, str]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The answer that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            values = json.loads(text)
            timings = tuple(Timing(**timing) for timing in values["timings"])
            return cls(timings, dict(values["numbers"]), dict(values["texts"]))
        except (TypeError, KeyError) as error:
            raise ValueError(f"no answer: {error}") from error


def together(answers: Sequence[Answer]) -> Answer:
    """One answer of several ranks, which measured the same in the same order: the mean of their times."""
    first = answers[0]
    timings = tuple(
        Timing(
            same[0].what,
            same[0].sizes,
            same[0].precision,
            sum(timing.seconds for timing in same) / len(same),
            max(timing.spread for timing in same),
        )
        for same in zip(*(answer.timings for answer in answers), strict=True)
    )
    return Answer(timings, first.numbers, first.texts)


_SHARE = 0.8
"""Of the memory that is free; the rest is the allocator's, and for what libraries take for themselves."""

# Bytes held at once for each element, in fp32: results, gradients and what is kept for backward passes, of all cases.
_ATTENDED_BYTES = 24
_STREAMED_BYTES = 160  # as written, and compiled
_UPDATED_BYTES = 48
_HEAD_WEIGHT_BYTES = 16
_LOGITS_BYTES = 12
_MESSAGE_BYTES = 8  # for each byte of it
_POOL_BYTES = 6  # one block in fp32 and one in bf16


@dataclass(frozen=True)
class Scale:
    """How large the cases are.

    Attributes:
        pool: elements of the block that operands are taken from; the largest operand fits.
        tokens, widths: of products, all with all.
        attended: tokens of attention, in sequences of each of `queries`, or one where that is longer.
        shapes: tokens and width of what only waits for memory.
        heads: tokens, width and vocabulary of the loss head.
        updated: widths of layers whose parameters are updated.
    """

    rounds: int
    pool: int
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    attended: int
    queries: tuple[int, ...]
    head_dims: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int, int], ...]
    updated: tuple[int, ...]
    messages: tuple[int, ...]


_CPU = Scale(
    rounds=5,
    pool=24 << 20,
    tokens=(128, 512, 2048),
    widths=(128, 384, 1024, 2048),
    attended=2048,
    queries=(64, 128, 256, 512, 1024, 2048),
    head_dims=(32, 64, 128),
    shapes=((256, 128), (512, 384), (2048, 384), (2048, 1024), (2048, 2048)),
    heads=((1024, 256, 256), (1024, 256, 4096), (1024, 512, 8192), (512, 256, 32768)),
    updated=(128, 384, 768),
    messages=(256, 8192, 131072, 1 << 20, 8 << 20, 32 << 20),
)
_GPU = Scale(
    rounds=7,
    pool=512 << 20,
    tokens=(512, 2048, 8192),
    widths=(1024, 2048, 4096, 12288),
    attended=16384,
    queries=(256, 512, 1024, 2048, 4096, 8192, 16384),
    head_dims=(64, 128),
    shapes=((1024, 1024), (4096, 2048), (8192, 4096), (8192, 12288)),
    heads=((4096, 2048, 32768), (4096, 4096, 131072)),
    updated=(1024, 4096),
    messages=(512, 8192, 131072, 2 << 20, 32 << 20, 512 << 20),
)
_QUICK = Scale(
    rounds=2,
    pool=1 << 20,
    tokens=(64, 256),
    widths=(64, 256),
    attended=256,
    queries=(64, 256),
    head_dims=(64,),
    shapes=((64, 64), (256, 256)),
    heads=((256, 64, 1024),),
    updated=(64,),
    messages=(1024, 1 << 20),
)


def choose_scale(kind: str, *, quick: bool) -> Scale:
    """The sizes for a kind of device, whatever its memory."""
    return _QUICK if quick else _GPU if kind == "cuda" else _CPU


def needed_bytes(scale: Scale) -> int:
    """About how much memory the cases take at once: those of one kind after the other, beside the pools."""
    return _POOL_BYTES * scale.pool + max(_phases(scale))


def _operands(scale: Scale) -> tuple[int, ...]:
    """Elements of the largest operand of each kind of cases."""
    widest = max(scale.widths)
    return (
        max(max(scale.tokens), widest) * widest,
        max(scale.attended, *scale.queries) * 3 * ATTENTION_HEADS * max(scale.head_dims),
        max(tokens * 3 * max(width, HEAD_DIM) for tokens, width in scale.shapes),
        max(max(tokens, width) * words for tokens, width, words in scale.heads),
    )


def _phases(scale: Scale) -> tuple[int, ...]:
    """Bytes of the cases that exist at the same time."""
    sequences = [max(scale.attended, length) * size for length in scale.queries for size in scale.head_dims]
    attended = _ATTENDED_BYTES * 3 * ATTENTION_HEADS * sum(sequences)
    streamed = _STREAMED_BYTES * sum(tokens * width for tokens, width in scale.shapes)
    heads = [words * (_LOGITS_BYTES * tokens + _HEAD_WEIGHT_BYTES * width) for tokens, width, words in scale.heads]
    return (
        4 * (max(scale.tokens) + max(scale.widths)) * max(scale.widths),
        attended + streamed + max(heads),
        _UPDATED_BYTES * sum(12 * width**2 for width in scale.updated),
        _MESSAGE_BYTES * sum(scale.messages),
    )


def fitting(scale: Scale, available_bytes: int) -> Scale:
    """`scale` without its largest cases, as far as memory asks for it.

    Args:
        available_bytes: that are free on the device.

    Raises:
        UserError: not even the smallest case of each kind fits.
    """
    limit_bytes = int(_SHARE * available_bytes)
    while needed_bytes(scale) > limit_bytes:
        # Without the entry that saves most, or with a smaller pool; none: there is but one entry of each kind.
        shorter: list[dict[str, Any]] = [{name: _without_largest(getattr(scale, name))} for name in _LISTS]
        choices = [replace(scale, **kept) for kept in shorter if all(kept.values())]
        smaller = min((replace(each, pool=max(_operands(each))) for each in (*choices, scale)), key=_burden)
        if _burden(smaller) >= _burden(scale):
            raise UserError(
                f"measuring takes {needed_bytes(scale) / _SHARE / 1e9:.1f} GB of the device's memory "
                f"and {available_bytes / 1e9:.1f} GB are free",
                cure="end other work on it, or give --quick",
            )
        scale = smaller
    return scale


_LISTS = ("tokens", "widths", "queries", "head_dims", "shapes", "heads", "updated", "messages")


def _burden(scale: Scale) -> tuple[int, int]:
    """What is to be made smaller: where several kinds bind alike, leaving out of one saves nothing by itself."""
    return needed_bytes(scale), sum(_phases(scale)) + _POOL_BYTES * sum(_operands(scale))


def _without_largest(entries: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(entries, key=lambda entry: entry if isinstance(entry, int) else math.prod(entry)))[:-1]
