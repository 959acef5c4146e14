"""Many hot links at once: each distinct one is computed a single time, side by side with the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from phalanx.plan.network.congestion.hot_spot import Cases, Trace, run_hot_spot
from phalanx.plan.network.congestion.settings import Control, Settings


@dataclass(frozen=True)
class HotLink:
    """A link that is asked for more than it carries.

    Attributes:
        paths: that cross it.
        line_rate: of each, bytes per second, while nothing holds it back.
        hot_links: of the same switch.
    """

    control: Control
    paths: int
    line_rate: float
    capacity: float
    hot_links: int

    @classmethod
    def of(cls, control: Control, paths: float, overload: float, capacity: float, hot_links: float) -> HotLink:
        """Rounded to what makes a difference, so that alike links are computed once."""
        count = max(2, round(paths))
        return cls(control, count, float(f"{overload * capacity / count:.3g}"), capacity, max(1, round(hot_links)))


@dataclass(frozen=True)
class Effect:
    """What congestion control does to a burst over a hot link.

    Attributes:
        efficiency: delivered, of what fair rates would deliver; `bystander`: the same of flows that share only a port.
        queue_s: mean wait at the link.
        paused_s: time in which ports before it stood still.
    """

    efficiency: float = 1.0
    bystander: float = 1.0
    queue_s: float = 0.0
    paused_s: float = 0.0

    @property
    def stretch(self) -> float:
        """How much longer the burst takes than with fair rates."""
        return 1 / max(self.efficiency, 1e-6)


NO_EFFECT = Effect()


class Table:
    """Traces of hot links."""

    def __init__(self, links: Collection[HotLink], settings: Settings, adapter_rate: float) -> None:
        # Each kind of control for itself: some settle long before others.
        self._traces: dict[HotLink, Trace] = {}
        for control in dict.fromkeys(link.control for link in links):
            alike = [link for link in links if link.control == control]
            together = _run(alike, settings, adapter_rate)
            self._traces.update((link, together.only(place)) for place, link in enumerate(alike))

    def effect(self, link: HotLink, burst_s: float) -> Effect:
        """What happens within a burst that fair rates would deliver in `burst_s`."""
        trace = self._traces[link]
        hot, bystander = trace.efficiency(burst_s)[:, 0]
        return Effect(
            efficiency=float(hot),
            bystander=float(bystander),
            queue_s=float(trace.mean_queue_s(burst_s)[0]),
            paused_s=float(trace.paused_s(burst_s)[0]),
        )

    def trace(self, link: HotLink) -> Trace:
        """How it went, over time."""
        return self._traces[link]


def _run(links: list[HotLink], settings: Settings, adapter_rate: float) -> Trace:
    """Bystanders' links are one flow less full than the hot one, as the next fullest links of a fabric are."""
    paths = np.array([float(link.paths) for link in links])
    capacity = np.array([link.capacity for link in links])
    line = np.array([link.line_rate for link in links])
    cases = Cases(
        control=[link.control for link in links],
        hot_flows=paths,
        cold_flows=np.maximum(paths - 1, 1),
        line_rate=line,
        capacity=capacity,
        port_rate=np.maximum(capacity, 2 * np.minimum(line, capacity)),
        hot_links=np.array([float(link.hot_links) for link in links]),
    )
    return run_hot_spot(cases, settings, adapter_rate)
