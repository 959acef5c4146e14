"""What keeps a layout from being faster, in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from phalanx.plan.search.result import memory_bytes
from phalanx.plan.types import Prediction

# The longest path that a part begins with names it.
_NAMES = {
    "compute": "computing",
    "compute/recompute": "computing again in backward passes",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "exchange between experts",
    "pipeline": "sends between stages",
    "pipeline/bubble": "pipeline bubble",
    "data": "data-parallel tail",
    "optimizer": "optimizer",
    "norms": "gradient norm and synchronisation",
    "loader": "data loader",
    "stragglers": "waiting for the slowest rank",
}
_FULL = 0.85


@dataclass(frozen=True)
class Limit:
    """One thing that limits a layout.

    Attributes:
        words: such as ``data-parallel tail 0.48 s of 6.34 s``.
        seconds: of a step; 0 for memory.
        share: of the step, or of the memory that may be filled.
    """

    words: str
    seconds: float
    share: float


def limits_of(prediction: Prediction, limit_bytes: float, count: int = 3) -> tuple[Limit, ...]:
    """The `count` largest parts of a step besides computing, and memory where little is left of it; largest first."""
    seconds: dict[str, float] = defaultdict(float)
    for part in prediction.parts:
        seconds[_name(part.path)] += part.seconds
    seconds.pop(_NAMES["compute"], None)
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    parts = [
        Limit(f"{name} {value:.3g} s of {prediction.step_s:.3g} s", value, value / prediction.step_s)
        for name, value in largest
        if value > 0
    ]
    return (*parts, *_memory(prediction, limit_bytes))


def _memory(prediction: Prediction, limit_bytes: float) -> tuple[Limit, ...]:
    used = memory_bytes(prediction)
    if used < _FULL * limit_bytes:
        return ()
    return (Limit(f"memory {used / 2**30:.3g} of {limit_bytes / 2**30:.3g} GiB", 0.0, used / limit_bytes),)


def _name(path: str) -> str:
    pieces = path.split("/")
    heads = ["/".join(pieces[:length]) for length in range(len(pieces), 0, -1)]
    return next((_NAMES[head] for head in heads if head in _NAMES), pieces[0])
