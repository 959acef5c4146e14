"""Time of fused attention on a device."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from phalanx.plan.hardware.either import LogCurve
from phalanx.plan.types import Mark


@dataclass(frozen=True)
class FusedAttention:
    """Rates of fused attention kernels over the length of a sequence, for each measured head size.

    Attributes:
        head_dims: measured head sizes, ascending; between them straight over logarithms, outside as the nearest.
        forward: flops per second over queries, for each of `head_dims`.
        backward: likewise.
        launch_s: from start to end of a kernel that does nothing.
    """

    head_dims: tuple[int, ...]
    forward: tuple[LogCurve, ...]
    backward: tuple[LogCurve, ...]
    launch_s: float
    mark: Mark
    source: str

    def seconds(self, flops: Any, queries: Any, head_dim: int, backward: bool = False) -> Any:
        """Time of `flops` of one pass over `queries` positions."""
        curves = self.backward if backward else self.forward
        lower, part = self._between(head_dim)
        rate = curves[lower].at(queries)
        if part:
            rate = rate ** (1 - part) * curves[lower + 1].at(queries) ** part
        return self.launch_s + flops / rate

    def _between(self, head_dim: int) -> tuple[int, float]:
        """The measured head size below, and how far towards the next one, over logarithms."""
        sizes = self.head_dims
        lower = max(0, bisect_right(sizes, head_dim) - 1)
        if head_dim <= sizes[0] or lower == len(sizes) - 1:
            return lower, 0.0
        return lower, math.log(head_dim / sizes[lower]) / math.log(sizes[lower + 1] / sizes[lower])
