"""Offsets of hosts' clocks: whatever clocks, networks and schedulers do, the truth lies within the stated error."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_runs import span, write_run

from phalanx.telemetry.host_clocks import WANDER_PER_S, ClockEstimate, ClockExchange, ClockTracker

S = 10**9
BEGIN_NS = 1_700_000_000 * S


@dataclass(frozen=True)
class Simulated:
    """A host's clock: true time (that of the reference) in nanoseconds since BEGIN_NS to the host's Unix time.

    Its rate is `drift` and swings by as much and as fast as `WANDER_PER_S` allows: the sum of all is never beyond it.
    """

    offset_ns: int
    drift: float
    period_s: float = 0.0
    kink_s: float = math.inf  # from here on it runs faster by `kink`
    kink: float = 0.0

    def ahead_ns(self, true_ns: float) -> float:
        seconds = true_ns / S
        swing_s = 0.0
        if self.period_s:
            # rate: w P / 2 pi sin(2 pi t / P), whose steepest slope is w
            turns = 2 * math.pi / self.period_s
            swing_s = WANDER_PER_S / turns**2 * (1 - math.cos(turns * seconds))
        return self.offset_ns + (self.drift * seconds + swing_s + self.kink * max(0.0, seconds - self.kink_s)) * S

    def reads(self, true_ns: int) -> int:
        return BEGIN_NS + true_ns + math.floor(self.ahead_ns(true_ns))


@dataclass(frozen=True)
class Network:
    """Seconds that messages take: unequal ways, and now and then one of them much longer."""

    out_s: float
    back_s: float
    jitter_s: float
    stalls: float = 0.1

    def round(self, clock: Simulated, at_ns: int, count: int, chance: random.Random) -> list[ClockExchange]:
        found, now_ns = [], at_ns

        def passes(base_s: float) -> int:
            stall_s = chance.expovariate(1 / 0.02) if chance.random() < self.stalls else 0.0
            return round((base_s + chance.expovariate(1 / self.jitter_s) + stall_s) * S)

        for _ in range(count):
            sent = now_ns
            heard = sent + passes(self.out_s)
            answered = heard + round(chance.expovariate(1 / 2e-5) * S)
            returned = answered + passes(self.back_s)
            found.append(ClockExchange(clock.reads(sent), BEGIN_NS + heard, BEGIN_NS + answered, clock.reads(returned)))
            now_ns = returned
        return found


def estimates(
    clock: Simulated, network: Network, times_s: list[float], chance: random.Random
) -> list[tuple[int, ClockEstimate]]:
    """Each with the true time at which its round began."""
    tracker = ClockTracker()
    return [(round(time_s * S), tracker.add(network.round(clock, round(time_s * S), 12, chance))) for time_s in times_s]


clocks = st.builds(
    Simulated,
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-2e-4, 2e-4),
    period_s=st.sampled_from([0.0, 7.0, 60.0, 400.0, 3000.0]),
)
networks = st.builds(
    Network, out_s=st.floats(1e-5, 5e-3), back_s=st.floats(1e-5, 5e-3), jitter_s=st.sampled_from([1e-6, 1e-4, 3e-3])
)
rounds = st.lists(st.floats(0.5, 120.0), min_size=1, max_size=20).map(
    lambda gaps: [sum(gaps[:count]) for count in range(len(gaps) + 1)]
)


def true_offset_ns(clock: Simulated, host_ns: int) -> float:
    """How far the clock is ahead when it shows `host_ns`: by iteration, since its own time is what is given."""
    true_ns = host_ns - BEGIN_NS - clock.offset_ns
    for _ in range(6):
        true_ns = host_ns - BEGIN_NS - clock.ahead_ns(true_ns)
    return clock.ahead_ns(true_ns)


@given(clock=clocks, network=networks, times_s=rounds, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_offset_and_drift_lie_within_the_stated_error(
    clock: Simulated, network: Network, times_s: list[float], seed: int
) -> None:
    for _, found in estimates(clock, network, times_s, random.Random(seed)):
        assert abs(found.offset_ns - true_offset_ns(clock, found.at_ns)) <= found.error_ns
        assert found.bend_ns == 0.0
        later_ns = found.at_ns + 90 * S
        offset_ns, error_ns = found.at(later_ns)
        assert abs(offset_ns - true_offset_ns(clock, later_ns)) <= error_ns + 2


def test_the_error_is_half_the_least_round_trip_and_rounds_make_it_smaller() -> None:
    clock, network = Simulated(5 * S, 2e-5), Network(40e-6, 60e-6, 5e-6)
    found = [one for _, one in estimates(clock, network, [60.0 * number for number in range(20)], random.Random(1))]
    first, last = found[0], found[-1]
    assert first.round_trip_ns / 4 < first.error_ns <= first.round_trip_ns / 2 + 200
    assert last.error_ns < 60_000 and last.offset_ns == pytest.approx(5 * S + 2e-5 * 1140 * S, abs=60_000)
    assert last.drift_ns_per_s == pytest.approx(20_000, abs=5_000) and last.drift_error_ns_per_s < 5_000
    assert first.drift_ns_per_s == 0.0 and first.drift_error_ns_per_s == 1e6


def test_one_good_exchange_among_bad_ones_is_enough() -> None:
    """Ways that are long but for one message each: the bounds come from different exchanges."""
    ahead_ns = 7_000_000
    slow_back = ClockExchange(ahead_ns, 10_000, 11_000, 9_000_000 + ahead_ns)
    slow_out = ClockExchange(9_100_000 + ahead_ns, 15_000_000, 15_001_000, 15_021_000 + ahead_ns)
    found = ClockTracker().add([slow_back, slow_out])
    assert abs(found.offset_ns - ahead_ns) <= found.error_ns < 25_000


@given(
    clock=clocks.map(lambda one: Simulated(one.offset_ns, one.drift, 0.0, 130.0, 3e-4)),
    seed=st.integers(0, 2**32),
    points=st.lists(st.integers(-50, 500), min_size=5, max_size=5),
)
@settings(max_examples=25, deadline=None)
def test_spans_are_aligned_within_the_error_also_where_a_clock_is_slewed(
    clock: Simulated, seed: int, points: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An NTP daemon makes the clock run 300 ppm faster in the middle of a minute: the minute's error says so."""
    folder = tmp_path_factory.mktemp("run")
    chance = random.Random(seed)
    found = estimates(clock, Network(5e-5, 2e-4, 2e-5), [0.0, 1.0, 5.0, 20.0, 80.0, 140.0, 200.0, 260.0], chance)
    assert [one.bend_ns > 0 for _, one in found] == [False] * 5 + [True] + [False] * 2
    lines = [{"host": "host1", "attempt": 0, "reference": "host0"} | asdict(one) for _, one in found]
    rows = []
    for step, at_s in enumerate([*points, 131, 139]):
        start_ns, end_ns = (clock.reads(round(time_s * S)) for time_s in (at_s, at_s + 0.5))
        rows.append(span(2, step, "step", 0, 0) | {"start_ns": start_ns, "end_ns": end_ns})
    trace = write_run(folder, rows)
    (folder / "telemetry" / "clocks").mkdir()
    (folder / "telemetry" / "clocks" / "host1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    aligned = trace.sql("select step, start_ns, end_ns, error_ns from aligned_spans order by step").to_pylist()
    for row, at_s in zip(aligned, [*points, 131, 139], strict=True):
        assert abs(row["start_ns"] - BEGIN_NS - at_s * S) <= row["error_ns"] + 2
        assert abs(row["end_ns"] - BEGIN_NS - round((at_s + 0.5) * S)) <= row["error_ns"] + 200_000
        assert row["error_ns"] < 20e6


def test_what_a_clock_that_was_set_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="before they were sent"):
        ClockTracker().add([ClockExchange(0, 100, 110, 5000), ClockExchange(6000, 10**9, 10**9 + 10, 6100)])
    with pytest.raises(ValueError, match="no exchange"):
        ClockTracker().add([])
