"""How far a host's clock is ahead of a reference, and how fast that changes: bounds from exchanges, pure.

In one exchange a host notes when it asked (by its clock), the reference when it heard and answered (by its own),
and the host when it has the answer. What travels arrives after it was sent, so the offset (host ahead of reference) is
at least ``sent - heard`` and at most ``returned - answered``, however unequal the two ways are: half the round trip,
less what the reference took, is the error. Of many exchanges in a row, the closest bounds count (those of the least
round trip, for each way on its own).

A line that lies within the bounds of all rounds gives the drift. Clocks are not quite linear: a rate may change by
`WANDER_PER_S` each second, which errors allow for; where a clock bends by more (one that NTP slews), the next round
shows it, and the estimate says by how much (`ClockEstimate.bend_ns`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

WANDER_PER_S = 5e-8
"""Change of a host's rate each second that needs no notice: 3 ppm a minute: warming up and NTP daemons."""

MOST_DRIFT = 1e-3
"""Rates of two hosts differ by no more: quartz by 0.02 %, and 0.05 % while NTP slews one of them."""

_ROUNDS = 16
_READ_NS = 2  # clocks are read in whole nanoseconds


class ClockExchange(NamedTuple):
    """Four readings of one exchange, nanoseconds: the first and the last by the host's clock, the others by the
    reference's."""

    sent_ns: int
    heard_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Both ways, without the time that the reference took."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.heard_ns)


@dataclass(frozen=True)
class ClockEstimate:
    """What one round says, as a line of ``clocks/HOST.jsonl`` has it.

    Attributes:
        at_ns: Unix time by the host's clock.
        offset_ns: how far it is ahead of the reference.
        error_ns: the offset is off by no more than this, at `at_ns`.
        drift_ns_per_s: how much the offset grows in a second; 0.0 after a first round and after a bend.
        drift_error_ns_per_s: the drift is off by no more than this.
        bend_ns: by how much the clock has left the line of earlier rounds, beyond what errors allow for; 0.0: it has
            not.
        round_trip_ns: the least of the round.
        exchanges: how many there were in the round.
    """

    at_ns: int
    offset_ns: int
    error_ns: float
    drift_ns_per_s: float
    drift_error_ns_per_s: float
    bend_ns: float
    round_trip_ns: int
    exchanges: int

    def at(self, time_ns: int) -> tuple[float, float]:
        """Offset and its error at another time of the host, in nanoseconds."""
        after_s = (time_ns - self.at_ns) / 1e9
        error_ns = self.error_ns + abs(after_s) * self.drift_error_ns_per_s + _wander_ns(after_s)
        return self.offset_ns + after_s * self.drift_ns_per_s, error_ns


class _Bounds(NamedTuple):
    """The offset at a time of the host lies between these, in nanoseconds."""

    at_ns: int
    low_ns: float
    high_ns: float


class ClockTracker:
    """The clock of one host against its reference, from round to round."""

    def __init__(self) -> None:
        self._rounds: deque[_Bounds] = deque(maxlen=_ROUNDS)
        self._base_ns: int | None = None  # offsets are kept as differences from it, which floats hold exactly
        self.estimate: ClockEstimate | None = None

    def add(self, exchanges: Sequence[ClockExchange]) -> ClockEstimate:
        """What is known after one more round of exchanges, made within milliseconds.

        Raises:
            ValueError: there is none, or they contradict each other: a clock was set meanwhile.
        """
        measured = self._bounds(exchanges)
        bounds, bend_ns = self._with_earlier(measured)
        if bend_ns:  # nothing is known of the rate any more
            self._rounds.clear()
        self._rounds.append(bounds)
        drift, drift_error = self._drift()
        base_ns = self._base_ns or 0
        self.estimate = ClockEstimate(
            at_ns=bounds.at_ns,
            offset_ns=base_ns + round((bounds.low_ns + bounds.high_ns) / 2),
            error_ns=(bounds.high_ns - bounds.low_ns) / 2 + _READ_NS,
            drift_ns_per_s=drift * 1e9,
            drift_error_ns_per_s=drift_error * 1e9,
            bend_ns=bend_ns,
            round_trip_ns=min(one.round_trip_ns for one in exchanges),
            exchanges=len(exchanges),
        )
        return self.estimate

    def _bounds(self, exchanges: Sequence[ClockExchange]) -> _Bounds:
        if not exchanges:
            raise ValueError("no exchange")
        best = min(exchanges, key=lambda one: one.round_trip_ns)
        at_ns = best.returned_ns
        if self._base_ns is None:
            self._base_ns = best.returned_ns - best.answered_ns
        # A bound of another instant of the round holds at `at_ns` but for the drift meanwhile.
        low_ns = max(
            one.sent_ns - one.heard_ns - self._base_ns - MOST_DRIFT * abs(at_ns - one.sent_ns) for one in exchanges
        )
        high_ns = min(
            one.returned_ns - one.answered_ns - self._base_ns + MOST_DRIFT * abs(at_ns - one.returned_ns)
            for one in exchanges
        )
        if low_ns > high_ns + 2 * _READ_NS:
            raise ValueError(f"answers came {low_ns - high_ns:.0f} ns before they were sent")
        return _Bounds(at_ns, min(low_ns, high_ns), max(low_ns, high_ns))

    def _with_earlier(self, measured: _Bounds) -> tuple[_Bounds, float]:
        """The bounds, closer where those of earlier rounds are; and by how much they miss each other."""
        if self.estimate is None:
            return measured, 0.0
        offset_ns, error_ns = self.estimate.at(measured.at_ns)
        expected_ns = offset_ns - (self._base_ns or 0)
        low_ns = max(measured.low_ns, expected_ns - error_ns)
        high_ns = min(measured.high_ns, expected_ns + error_ns)
        if low_ns <= high_ns:
            return _Bounds(measured.at_ns, low_ns, high_ns), 0.0
        bend_ns = max(abs(measured.high_ns - expected_ns), abs(measured.low_ns - expected_ns)) + error_ns
        return measured, bend_ns

    def _drift(self) -> tuple[float, float]:
        """The middle of all rates now that fit the rounds, and how far from it they go."""
        while True:
            low, high = -MOST_DRIFT, MOST_DRIFT
            now_ns = self._rounds[-1].at_ns
            for first, second in combinations(self._rounds, 2):
                between_ns = second.at_ns - first.at_ns
                if between_ns > 0:
                    may_change = WANDER_PER_S * (now_ns - first.at_ns) / 1e9
                    low = max(low, (second.low_ns - first.high_ns) / between_ns - may_change)
                    high = min(high, (second.high_ns - first.low_ns) / between_ns + may_change)
            if low <= high or len(self._rounds) < 2:
                return (low + high) / 2, abs(high - low) / 2
            self._rounds.popleft()  # no line fits: the clock has bent since


def _wander_ns(seconds: float) -> float:
    return WANDER_PER_S * seconds * seconds / 2 * 1e9
