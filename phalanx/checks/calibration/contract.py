"""What is asked of the processes that measure, and what they answer. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

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
