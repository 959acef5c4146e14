r"""A link that more flows want than it carries, and the flows that only share a switch port with those: a fluid model.

    sender h --\                    /-- hot link, N flows -->
                ToR --- port --- switch
    sender v --/                    \-- cold link, V flows -->

Each port carries one flow for the hot and one (a bystander) for the cold link. Queues are first in, first out: what
leaves a queue has the mix of what waits in it. A switch marks packets by the length of the queue that they join (ECN),
and pauses a port whose packets take up too much of its buffer (PFC): then bystanders stand still too (head-of-line
blocking). All ports are alike, so one is computed, and N and V enter as factors: the model is as large for 2 flows as
for 2,000. Arrays hold one entry for each case.

Senders are fluid, too: their rate follows marks and delays, one entry for each class of equal senders. Of many hot
links, `HotLinkTable` computes each distinct one a single time, side by side with the others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.network_settings import CongestionSettings, Control, Dcqcn, Ecn, Swift

Floats = NDArray[np.float64]

FINE_S, COARSE_S = 4e-6, 12e-6
"""Steps while everything begins at once, and after that: about a third of a round trip, and one."""
_FINE_SPAN_S = 4.5e-3
SPAN_S = 60e-3
_SAMPLES = 200


@dataclass(frozen=True)
class Cases:
    """What is computed side by side; all of equal length."""

    control: Sequence[Control]  # how the senders of each case find their rate
    hot_flows: Floats  # on the hot link, N
    cold_flows: Floats  # on the cold one, V
    line_rate: Floats  # of each flow, bytes per second
    capacity: Floats  # of hot and cold link
    port_rate: Floats  # of the ports before them
    hot_links: Floats  # that a switch has at a time; they share its buffer

    def only(self, case: int) -> Cases:
        """One of them."""
        arrays = (self.hot_flows, self.cold_flows, self.line_rate, self.capacity, self.port_rate, self.hot_links)
        return Cases([self.control[case]], *(array[case : case + 1] for array in arrays))

    @property
    def fair(self) -> Floats:
        """Max-min fair rate of hot flows and of bystanders, (2, cases)."""
        flows = np.stack([self.hot_flows, self.cold_flows])
        rates: Floats = np.minimum(self.line_rate, self.capacity / flows)
        return rates


@dataclass(frozen=True)
class QueueTrace:
    """How it went; the last axis of arrays is time, in equal steps of `sample_s`."""

    cases: Cases
    sample_s: float
    delivered_bytes: Floats  # by one hot flow and by one bystander so far, (2, cases, times)
    queue_bytes: Floats  # at the hot link, (cases, times)
    paused_ratio: Floats  # of the time in which ports stood still, (cases, times)
    marked_ratio: Floats  # of the hot flows' packets, (cases, times)
    sent_bytes: Floats  # by one hot flow and one bystander in all; what was not delivered is in `left_bytes`, queues
    left_bytes: Floats

    def only(self, case: int) -> QueueTrace:
        """What happened in one case."""
        one = slice(case, case + 1)
        return QueueTrace(
            self.cases.only(case),
            self.sample_s,
            self.delivered_bytes[:, one],
            self.queue_bytes[one],
            self.paused_ratio[one],
            self.marked_ratio[one],
            self.sent_bytes[:, one],
            self.left_bytes[:, one],
        )

    def efficiency(self, duration_s: Floats | float) -> Floats:
        """Delivered in `duration_s`, of what max-min fair rates would deliver, (2, cases)."""
        duration = np.broadcast_to(np.asarray(duration_s, dtype=float), self.queue_bytes.shape[:1])
        found = np.stack([_grown(curves, duration, self.sample_s) for curves in self.delivered_bytes])
        part: Floats = np.minimum(found / (self.cases.fair * np.maximum(duration, 1e-12)), 1.0)
        return part

    def mean_queue_s(self, duration_s: Floats | float) -> Floats:
        """How long a packet waits at the hot link, on average over `duration_s`."""
        duration = np.broadcast_to(np.asarray(duration_s, dtype=float), self.queue_bytes.shape[:1])
        area = np.cumsum(self.queue_bytes, axis=-1) * self.sample_s
        mean: Floats = _grown(area, duration, self.sample_s) / np.maximum(duration, 1e-12)
        return mean / self.cases.capacity

    def paused_s(self, duration_s: Floats | float) -> Floats:
        """How long ports before the hot link stand still within `duration_s`."""
        duration = np.broadcast_to(np.asarray(duration_s, dtype=float), self.queue_bytes.shape[:1])
        return _grown(np.cumsum(self.paused_ratio, axis=-1) * self.sample_s, duration, self.sample_s)

    def settled(self, values: Floats) -> Floats:
        """The mean of a series over the last quarter of the time."""
        return np.asarray(values[..., values.shape[-1] * 3 // 4 :].mean(axis=-1))


def run_hot_spot(cases: Cases, settings: CongestionSettings, adapter_rate: float, span_s: float = SPAN_S) -> QueueTrace:
    """Let all flows start at full rate at the same moment, and see, until nothing changes any more.

    Args:
        adapter_rate: bytes per second of the senders' adapters, which scales DCQCN's increase.
    """
    line = np.stack([cases.line_rate, cases.line_rate])
    state = _State(cases, settings, Senders(cases.control, line, adapter_rate, settings))
    sample_s = COARSE_S * max(1, round(min(span_s, SPAN_S) / COARSE_S / _SAMPLES))
    series: list[tuple[Floats, ...]] = []
    fine_span_s = span_s if "none" in cases.control else _FINE_SPAN_S  # pauses alone never come to rest
    while len(series) * sample_s < span_s and not _is_settled(series):
        series.append(state.advance(sample_s, FINE_S if len(series) * sample_s < fine_span_s else COARSE_S))
    delivered, queues, pauses, marks = (np.stack(values, axis=-1) for values in zip(*series, strict=True))
    return QueueTrace(cases, sample_s, delivered, queues, pauses, marks, state.sent, state.waiting())


_WINDOW = 12  # samples whose means are compared with those of as many before them: queues chatter a little for ever


def _is_settled(series: Sequence[tuple[Floats, ...]]) -> bool:
    if len(series) <= 3 * _WINDOW:
        return False
    delivered = [series[-1 - back * _WINDOW][0] for back in range(4)]
    latest, *before = [now - then for now, then in itertools.pairwise(delivered)]
    if not all(np.allclose(latest, other, rtol=1e-4) for other in before):
        return False
    return all(_is_steady([one[kind] for one in series[-3 * _WINDOW :]]) for kind in (1, 2, 3))


def _is_steady(values: Sequence[Floats]) -> bool:
    first, second, third = np.stack(values).reshape(3, _WINDOW, -1).mean(axis=1)
    return all(np.allclose(third, other, rtol=3e-3, atol=2e-3) for other in (first, second))


class _State:
    """Queues, pauses, and what is under way back to the senders."""

    def __init__(self, cases: Cases, settings: CongestionSettings, sender: Senders) -> None:
        self.cases, self.settings, self.sender = cases, settings, sender
        shape = (2, len(cases.hot_flows))
        self.flows = np.stack([cases.hot_flows, cases.cold_flows])
        self.at_port, self.at_link = np.zeros(shape), np.zeros(shape)  # of one flow each
        self.sent, self.delivered = np.zeros(shape), np.zeros(shape)
        self.port_paused = np.zeros(shape[1], dtype=bool)
        self.sender_paused = np.zeros(shape, dtype=bool)
        self.marked = np.zeros(shape)
        self.under_way: deque[tuple[Floats, Floats]] = deque()

    def advance(self, sample_s: float, step_s: float) -> tuple[Floats, ...]:
        """Go on by `sample_s`: delivered so far, queue of the hot link, share of the time that was pauses, marks."""
        steps = round(sample_s / step_s)
        paused = np.zeros(len(self.port_paused))
        for _ in range(steps):
            arriving = self.sender.rate * ~self.sender_paused * step_s
            self.sent += arriving
            at_port = self.at_port + arriving
            room = self.cases.port_rate * ~self.port_paused * step_s
            moved = at_port * _share(room, at_port.sum(axis=0))
            self.at_port = at_port - moved
            at_link = self.at_link + moved
            gone = at_link * _share(self.cases.capacity * step_s, at_link * self.flows)
            self.at_link = at_link - gone
            self.delivered += gone
            self._pause()
            # Marks and delays of now reach the senders a round trip later; until then they know of none.
            cases, ecn = self.cases, self.settings.ecn
            port_s = self.at_port.sum(axis=0) / cases.port_rate
            link_s = self.at_link * self.flows / cases.capacity
            self.marked = 1 - (1 - _marks(port_s, ecn)) * (1 - _marks(link_s, ecn))
            self.under_way.append((self.marked, self.settings.round_trip_s + port_s + link_s))
            lag = max(1, round(self.settings.round_trip_s / step_s))
            while len(self.under_way) > lag:
                marked, delay_s = self.under_way.popleft()
                self.sender.advance(marked, delay_s, step_s)
            paused += self.port_paused
        return self.delivered.copy(), self.at_link[0] * self.flows[0], paused / steps, self.marked[0].copy()

    def waiting(self) -> Floats:
        return self.at_port + self.at_link

    def _pause(self) -> None:
        """Pause what takes up too much of a buffer; what is below the lower mark goes on."""
        pfc, links = self.settings.pfc, self.cases.hot_links
        used = links * (self.at_link * self.flows).sum(axis=0)
        limit = pfc.threshold_ratio * np.maximum(pfc.buffer_bytes - used, 0.0)
        self.port_paused = _hysteresis(self.port_paused, self.at_link.sum(axis=0), limit, pfc.resume_ratio)
        used = links * self.at_port.sum(axis=0)
        limit = pfc.threshold_ratio * np.maximum(pfc.buffer_bytes - used, 0.0)
        self.sender_paused = _hysteresis(self.sender_paused, self.at_port, limit, pfc.resume_ratio)


def _grown(curves: Floats, duration_s: Floats, sample_s: float) -> Floats:
    """Values of curves that grow from zero, (cases, times), after `duration_s`; beyond their end at the last pace.

    That is the pace of the last quarter.
    """
    times = sample_s * np.arange(curves.shape[-1] + 1)
    quarter = len(times) * 3 // 4
    pace = (curves[:, -1] - curves[:, quarter - 1]) / (times[-1] - times[quarter])
    beyond = curves[:, -1] + pace * np.maximum(duration_s - times[-1], 0.0)
    within = [np.interp(end, times, np.r_[0.0, curve]) for end, curve in zip(duration_s, curves, strict=True)]
    return np.where(duration_s < times[-1], within, beyond)


def _share(room: Floats, waiting: Floats) -> Floats:
    part: Floats = np.minimum(1.0, room / np.maximum(waiting, 1e-9))
    return part


def _marks(queue_s: Floats, ecn: Ecn) -> Floats:
    """Probability that a packet is marked which joins a queue that takes so long to drain."""
    rising = ecn.mark_ratio * (queue_s - ecn.low_s) / (ecn.high_s - ecn.low_s)
    return np.where(queue_s > ecn.high_s, 1.0, np.clip(rising, 0.0, 1.0))


def _hysteresis(paused: NDArray[np.bool_], held: Floats, limit: Floats, resume: float) -> NDArray[np.bool_]:
    return np.where(paused, held > resume * limit, held > limit)


_LEAST = 1e-3  # no sender goes below this share of its full rate (adapters have such a floor)


class Cuts:
    """How often a marking probability makes senders slow down (Zhu et al. 2016, equation 11)."""

    def __init__(self, marked: Floats, rate: Floats, control: Dcqcn) -> None:
        # Of the probability that a packet is not marked. The least mark is far below any that counts, but not zero, so
        # that quotients keep their limit.
        self.log_free = np.log1p(-np.minimum(np.maximum(marked, 1e-15), 1 - 1e-12))
        # Probability of at least one mark in a notification interval.
        self.cuts = -np.expm1(control.notification_s * rate * self.log_free)
        # Probability of at least one mark while the mean is brought up to date.
        self.mean_mark = -np.expm1(control.alpha_timer_s * rate * self.log_free)


class Rises:
    """How often senders speed up between cuts (the same equation)."""

    def __init__(self, log_free: Floats, rate: Floats, control: Dcqcn, mtu_bytes: float) -> None:
        counter = control.increase_counter_bytes / mtu_bytes
        timer = control.increase_timer_s * rate
        # Increases for each packet sent, by the byte counter and by the timer. Beyond e^700 there is no number, and no
        # increase either.
        self.by_bytes = -np.expm1(log_free) / np.expm1(np.minimum(-counter * log_free, 700.0))
        self.by_time = -np.expm1(log_free) / np.expm1(np.minimum(-timer * log_free, 700.0))
        # Those of them that come after fast recovery.
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

    def __init__(
        self, control: Sequence[Control], line_rate: Floats, adapter_rate: float, settings: CongestionSettings
    ) -> None:
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


@dataclass(frozen=True)
class HotLink:
    """A link that is asked for more than it carries."""

    control: Control
    paths: int  # that cross it
    line_rate: float  # of each, bytes per second, while nothing holds it back
    capacity: float
    hot_links: int  # of the same switch

    @classmethod
    def of(cls, control: Control, paths: float, overload: float, capacity: float, hot_links: float) -> HotLink:
        """Rounded to what makes a difference, so that alike links are computed once."""
        count = max(2, round(paths))
        return cls(control, count, float(f"{overload * capacity / count:.3g}"), capacity, max(1, round(hot_links)))


@dataclass(frozen=True)
class QueueEffect:
    """What congestion control does to a burst over a hot link."""

    efficiency: float = 1.0  # delivered, of what fair rates would deliver
    bystander: float = 1.0  # the same of flows that share only a port
    queue_s: float = 0.0  # mean wait at the link
    paused_s: float = 0.0  # time in which ports before it stood still

    @property
    def stretch(self) -> float:
        """How much longer the burst takes than with fair rates."""
        return 1 / max(self.efficiency, 1e-6)


NO_EFFECT = QueueEffect()


class HotLinkTable:
    """Traces of hot links."""

    def __init__(self, links: Collection[HotLink], settings: CongestionSettings, adapter_rate: float) -> None:
        # Each kind of control for itself: some settle long before others.
        self._traces: dict[HotLink, QueueTrace] = {}
        for control in dict.fromkeys(link.control for link in links):
            alike = [link for link in links if link.control == control]
            together = _run(alike, settings, adapter_rate)
            self._traces.update((link, together.only(place)) for place, link in enumerate(alike))

    def effect(self, link: HotLink, burst_s: float) -> QueueEffect:
        """What happens within a burst that fair rates would deliver in `burst_s`."""
        trace = self._traces[link]
        hot, bystander = trace.efficiency(burst_s)[:, 0]
        return QueueEffect(
            efficiency=float(hot),
            bystander=float(bystander),
            queue_s=float(trace.mean_queue_s(burst_s)[0]),
            paused_s=float(trace.paused_s(burst_s)[0]),
        )

    def trace(self, link: HotLink) -> QueueTrace:
        """How it went, over time."""
        return self._traces[link]


def _run(links: list[HotLink], settings: CongestionSettings, adapter_rate: float) -> QueueTrace:
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
