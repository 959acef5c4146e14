"""Senders as fluid: how their rate follows marks and delays. Arrays hold one entry for each class of equal senders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.network.congestion.settings import Control, Dcqcn, Settings, Swift

Floats = NDArray[np.float64]

_LEAST = 1e-3
"""No sender goes below this share of its full rate (adapters have such a floor)."""


class Cuts:
    """How often a marking probability makes senders slow down (Zhu et al. 2016, equation 11).

    Attributes:
        cuts: probability of at least one mark in a notification interval.
        mean_mark: probability of at least one mark while the mean is brought up to date.
        log_free: of the probability that a packet is not marked.
    """

    def __init__(self, marked: Floats, rate: Floats, control: Dcqcn) -> None:
        # Far below any mark that counts, but not zero, so that quotients keep their limit.
        self.log_free = np.log1p(-np.minimum(np.maximum(marked, 1e-15), 1 - 1e-12))
        self.cuts = -np.expm1(control.notification_s * rate * self.log_free)
        self.mean_mark = -np.expm1(control.alpha_timer_s * rate * self.log_free)


class Rises:
    """How often senders speed up between cuts (the same equation).

    Attributes:
        by_bytes, by_time: increases for each packet sent, by the byte counter and by the timer.
        active_bytes, active_time: those of them that come after fast recovery.
    """

    def __init__(self, log_free: Floats, rate: Floats, control: Dcqcn, mtu_bytes: float) -> None:
        counter = control.increase_counter_bytes / mtu_bytes
        timer = control.increase_timer_s * rate
        # Beyond e^700 there is no number, and no increase either.
        self.by_bytes = -np.expm1(log_free) / np.expm1(np.minimum(-counter * log_free, 700.0))
        self.by_time = -np.expm1(log_free) / np.expm1(np.minimum(-timer * log_free, 700.0))
        self.active_bytes = self.by_bytes * np.exp(control.fast_recovery * counter * log_free)
        self.active_time = self.by_time * np.exp(control.fast_recovery * timer * log_free)


def target_delay_s(swift: Swift, switches: int, window: Floats) -> Floats:
    """The round trip that Swift aims at: longer for small windows, of which there are many on a full link."""
    extra = swift.flow_slope_s * (np.maximum(window, 1e-9) ** -0.5 - swift.flow_high**-0.5)
    aim: Floats = np.minimum(np.maximum(extra, 0.0), swift.flow_range_s)
    return swift.base_target_s + switches * swift.hop_target_s + aim


class Senders:
    """Senders that begin at full rate, as RDMA does, each under its own kind of control; rates in packets inside.

    - ``dcqcn``: the fluid equations of Zhu et al. 2015, section 5: rate, target rate, running mean of marks.
    - ``swift``: algorithm 1 of Kumar et al. 2020: a window shrinks or grows per round trip; rate is window over delay.
    - ``mixed``: Swift's window, which marks cut too, by DCQCN's rule; it grows by Swift's.
    - ``none``: full rate.
    """

    def __init__(self, control: Sequence[Control], line_rate: Floats, adapter_rate: float, settings: Settings) -> None:
        self._settings = settings
        kinds = np.asarray(control)
        self._by_rate, self._by_window = kinds == "dcqcn", (kinds == "swift") | (kinds == "mixed")
        self._cut_windows = (kinds == "mixed").astype(float)
        self._line = line_rate / settings.mtu_bytes
        self._increase = settings.dcqcn.increase_ratio * adapter_rate / settings.mtu_bytes
        self._paced, self._target = self._line.copy(), self._line.copy()
        self._mean = np.ones_like(self._line)
        self._delay = np.full_like(self._line, settings.round_trip_s)
        self._window = self._line * settings.round_trip_s

    @property
    def rate(self) -> Floats:
        """What each would send now, bytes per second."""
        return self._packets() * self._settings.mtu_bytes

    def advance(self, marked: Floats, delay_s: Floats, step_s: float) -> None:
        """One step of Euler's method, after news of marks (probability) and round trips as they were one trip ago."""
        rate, control = self._packets(), self._settings.dcqcn
        down = Cuts(marked, rate, control)
        cuts = step_s * down.cuts / control.notification_s
        self._mean = self._mean + step_s * control.gain / control.alpha_timer_s * (down.mean_mark - self._mean)
        if self._by_window.any():
            self._advance_windows(delay_s, step_s, self._mean * cuts / 2)
        if self._by_rate.any():
            self._advance_rates(Rises(down.log_free, rate, control, self._settings.mtu_bytes), rate, cuts, step_s)

    def _packets(self) -> Floats:
        windowed = np.minimum(self._window / self._delay, self._line)
        return np.where(self._by_rate, self._paced, np.where(self._by_window, windowed, self._line))

    def _advance_rates(self, up: Rises, rate: Floats, cuts: Floats, step_s: float) -> None:
        gap = self._target - self._paced
        rises = step_s * rate * (up.by_bytes + up.by_time)
        grows = step_s * self._increase * rate * (up.active_bytes + up.active_time)
        least = _LEAST * self._line
        self._target = np.minimum(np.maximum(self._target + grows - gap * cuts, least), self._line)
        changed = self._paced + gap * rises / 2 - rate * self._mean * cuts / 2
        self._paced = np.minimum(np.maximum(changed, least), self._line)

    def _advance_windows(self, delay_s: Floats, step_s: float, marks_cut: Floats) -> None:
        swift, rounds = self._settings.swift, step_s / delay_s
        target = target_delay_s(swift, self._settings.switches, self._window)
        late = swift.decrease_ratio * (delay_s - target) / delay_s
        shrinks = self._window * np.log1p(-np.minimum(np.maximum(late, 0.0), swift.largest_decrease_ratio))
        grows = swift.increase * np.minimum(self._window, 1.0)
        changed = self._window * (1 - self._cut_windows * marks_cut) + rounds * np.where(late > 0, shrinks, grows)
        most = self._line * np.maximum(delay_s, target)
        self._window = np.minimum(np.maximum(changed, _LEAST), most)
        self._delay = delay_s
