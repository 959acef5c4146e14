"""What was measured, by name and size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.checks.calibration.contract import Answer, Precision, Timing, together


@dataclass(frozen=True)
class Found:
    """What ranks that measured at the same time found, the mean of them.

    Attributes:
        ranks: how many.
        threads: of each.
        apart_ratio: standard deviation of how much longer or shorter than the mean each rank took, ratio.
    """

    ranks: int
    threads: int
    answer: Answer
    apart_ratio: float

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Of products."""
        return tuple(dict.fromkeys(timing.precision for timing in self.all("product")))

    def all(self, what: str, precision: Precision | None = None) -> list[Timing]:
        """All timings of one kind, in the order in which they were made."""
        return [
            timing
            for timing in self.answer.timings
            if timing.what == what and (precision is None or timing.precision == precision)
        ]

    def kinds(self) -> list[str]:
        """What was measured at all."""
        return list(dict.fromkeys(timing.what for timing in self.answer.timings))


def found_of(answers: Sequence[Answer], threads: int) -> Found:
    """The mean of the answers of all ranks."""
    return Found(len(answers), threads, together(answers), _apart(answers))


def sizes_of(timings: Sequence[Timing], name: str) -> list[float]:
    """The different sizes of that name, ascending."""
    return sorted({timing.sizes[name] for timing in timings})


def at(timings: Sequence[Timing], sizes: Mapping[str, float]) -> Timing:
    """The one of those sizes.

    Raises:
        StopIteration: there is none.
    """
    return next(t for t in timings if all(t.sizes[name] == value for name, value in sizes.items()))


def _apart(answers: Sequence[Answer]) -> float:
    """How much ranks differ in what they computed alone: each by the median over all that was measured, since single
    timings differ by chance."""
    if len(answers) == 1:
        return 0.0
    alone = [i for i, timing in enumerate(answers[0].timings) if "ranks" not in timing.sizes]
    means = [statistics.fmean(answer.timings[i].seconds for answer in answers) for i in alone]
    typical = [
        statistics.median(answer.timings[i].seconds / mean for i, mean in zip(alone, means, strict=True))
        for answer in answers
    ]
    return statistics.stdev(typical)
