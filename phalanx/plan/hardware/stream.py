"""Time of kernels that only move bytes: norms, additions, casts, optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.plan.hardware.either import LogCurve, functions
from phalanx.plan.types import Mark, Precision


@dataclass(frozen=True)
class Stream:
    """Bytes over the achieved bandwidth of memory, after a time that every kernel takes.

    Attributes:
        bytes_per_s: achieved by large kernels.
        launch_s: from start to end of a kernel that moves nothing.
        rates: achieved over bytes, where that was measured: what fits into a cache is faster.
        ratios: by name of a kernel and its pass: how many times longer it takes than its bytes say, where measured;
            those of 16-bit numbers end in ``_half``.
    """

    bytes_per_s: float
    launch_s: float
    mark: Mark
    source: str
    rates: LogCurve | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, num_bytes: Any) -> Any:
        """Time to move `num_bytes`, read and written ones together."""
        if self.rates is None:
            return self.launch_s + num_bytes / self.bytes_per_s
        return self.launch_s + num_bytes / self.rates.at(functions(num_bytes).largest(num_bytes, 1.0))

    def ratio(self, kernel: str, precision: Precision = "fp32") -> float:
        """How many times longer `kernel` takes than its bytes say; 1 where that was not measured.

        Args:
            precision: of what it moves; where only that of fp32 is known, that.
        """
        names = [kernel, kernel.replace("_compiled", "")]  # one that was not compiled for want of the other
        for name in names:
            for ending in ("_half", "") if precision != "fp32" else ("",):
                if f"{name}{ending}" in self.ratios:
                    return self.ratios[f"{name}{ending}"]
        return 1.0
