"""Where congestion control comes to rest: rates, queues and marks in closed form or by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.simulate.congestion import Cuts, Rises, target_delay_s
from phalanx.simulate.network_settings import Settings


@dataclass(frozen=True)
class FixedPoint:
    """What a link with equal senders comes to rest at.

    Attributes:
        marked: probability that a packet is marked.
        queue_bytes: waiting; infinite where marks of all that the switch may mark at random are not enough.
    """

    marked: float
    queue_bytes: float


def dcqcn_rest(senders: int, capacity: float, adapter_rate: float, settings: Settings) -> FixedPoint:
    """The only fixed point of DCQCN's fluid equations (Zhu et al. 2016, theorem 1), by bisection on the marks.

    All senders have the same rate; the mean of marks, the distance to the target rate and the marks follow.
    """
    control, mtu = settings.dcqcn, settings.mtu_bytes
    rate = np.array([capacity / senders / mtu])
    increase = control.increase_ratio * adapter_rate / mtu

    def excess(log_marked: float) -> float:
        """Slowing down less speeding up."""
        down = Cuts(np.array([np.exp(log_marked)]), rate, control)
        up = Rises(down.log_free, rate, control, mtu)
        cuts = down.cuts / control.notification_s
        gap = down.mean_mark * cuts / (up.by_bytes + up.by_time)
        return float((gap * cuts - increase * rate * (up.active_bytes + up.active_time))[0])

    marked = float(np.exp(_root(excess, np.log(1e-12), np.log(0.999))))
    return FixedPoint(marked, _queue_bytes(marked, capacity, settings))


def swift_rest(senders: int, capacity: float, settings: Settings) -> FixedPoint:
    """Where Swift's delay is its target: ``d = target(C d/(N packets))``; the queue is what is above the round trip."""

    def excess(delay_s: float) -> float:
        window = np.array([capacity * delay_s / (senders * settings.mtu_bytes)])
        return delay_s - float(target_delay_s(settings.swift, settings.switches, window)[0])

    delay_s = _root(excess, settings.round_trip_s, 1.0)
    return FixedPoint(0.0, capacity * max(0.0, delay_s - settings.round_trip_s))


def _queue_bytes(marked: float, capacity: float, settings: Settings) -> float:
    """The queue at which so many packets are marked."""
    ecn = settings.ecn
    if marked > ecn.mark_ratio:
        return float("inf")
    return capacity * (ecn.low_s + marked / ecn.mark_ratio * (ecn.high_s - ecn.low_s))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function is zero."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
