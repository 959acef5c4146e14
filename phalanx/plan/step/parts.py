"""The parts of a step's time, as seen from the pipeline rank that computes longest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from phalanx.plan.step.layers import Costs
from phalanx.plan.step.marks import Marks
from phalanx.plan.step.stages import Share, held_by
from phalanx.plan.types import Part
from phalanx.plan.work.operations import Passes


def computed_s(share: Share, costs: Costs, micro_batches: int) -> dict[str, float]:
    """Exposed seconds by path of all passes on a rank."""
    return _summed(((cost.exposed, times) for cost, times in held_by(share, costs)), micro_batches)


def hidden_s(share: Share, costs: Costs, micro_batches: int) -> dict[str, float]:
    """Seconds by path that the passes on a rank cover."""
    return _summed(((cost.hidden, times) for cost, times in held_by(share, costs)), micro_batches)


def _summed(pieces: Iterable[tuple[Mapping[str, Passes], int]], micro_batches: int) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for by_path, times in pieces:
        for path, passes in by_path.items():
            total[path] += micro_batches * times * float(passes.total)
    return total


def parts(seconds: Mapping[str, float], marks: Marks) -> tuple[Part, ...]:
    """Parts with their marks, those without any time left out."""
    return tuple([Part(path, float(value), *marks.of(path)) for path, value in seconds.items() if value])
