"""Times of collectives between the devices of one host, from measured curves over size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.plan.hardware.either import LogCurve
from phalanx.plan.types import Mark, Number

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class GroupCurves:
    """Times of one kind of collective over the bytes of the whole message, for each measured size of group."""

    ranks: tuple[int, ...]
    seconds: tuple[LogCurve, ...]
    mark: Mark
    source: str

    def at(self, num_bytes: Any, ranks: Any) -> Any:
        """Time for a group of `ranks`: as the next larger measured group, or the largest."""
        if isinstance(num_bytes, np.ndarray) or isinstance(ranks, np.ndarray):
            return self._at_arrays(np.asarray(num_bytes, float), np.asarray(ranks))
        if ranks <= 1:
            return 0.0
        for count, curve in zip(self.ranks, self.seconds, strict=True):
            if ranks <= count:
                return curve.at(num_bytes)
        return self.seconds[-1].at(num_bytes)

    def _at_arrays(self, num_bytes: Any, ranks: Any) -> Any:
        found = self.seconds[-1].at(num_bytes)
        for count, curve in reversed(list(zip(self.ranks, self.seconds, strict=True))[:-1]):
            found = np.where(ranks <= count, curve.at(num_bytes), found)
        return np.where(ranks <= 1, 0.0, found)


@dataclass(frozen=True)
class HostLinks:
    """What connects the devices of a host.

    Attributes:
        curves: one for each kind of collective; broadcast takes that of the all-gather.
        numbers: ``send_latency_s`` and ``send_bytes_per_s`` between two devices.
    """

    name: str
    curves: Mapping[str, GroupCurves]
    numbers: Mapping[str, Number]

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any) -> Any:
        """Time of a collective of a whole message of `num_bytes` among `ranks` devices of the host."""
        return self.curves[kind].at(num_bytes, ranks)

    def send_s(self, num_bytes: Any) -> Any:
        """Time to send `num_bytes` from one device to another."""
        return self.numbers["send_latency_s"].value + num_bytes / self.numbers["send_bytes_per_s"].value
