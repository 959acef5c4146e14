"""The months' state machine: what single failures cost, reckoned by hand, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.simulate.failure_model import (
    DAY_S,
    Checkpoints,
    Duration,
    FailureClass,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
)
from phalanx.simulate.failure_simulation import RunsOutcome, simulate, simulate_histories
from phalanx.simulate.run_state import COUNTS, PARTS, PLANNED_STOP, History, draw, draw_lemons, laid_out

HOUR_S = 3600.0
STOPS, SLOW, OUT, FATAL = range(4)
CLASSES = Failures(
    (
        FailureClass("stops", 0.1),
        FailureClass("slow", 0.1, "slow", slowdown=2.0),
        FailureClass("out", 0.1, "taken out"),
        FailureClass("fatal", 0.1, survives=False),
    )
)
# Four hosts watched for ten hours; a checkpoint after each 900 s of training takes 100 s; detection 20 s, restart 80 s.
SCENARIO = FailureScenario(
    Work(4, days=10 * HOUR_S / DAY_S),
    CLASSES,
    Recovery(detection_s=20, restart_s=80, find_slow_s=600),
    Checkpoints(interval_s=900, stall_s=100),
)


def history(*events: tuple[float, int, int, float], is_fixed: bool = False) -> History:
    """One run with these events: seconds, host, class, seconds of repair."""
    times_s, hosts, classes, repairs_s = (np.array(column) for column in zip(*events, strict=True))
    count = len(events)
    flat = History(
        times_s.astype(float),
        hosts.astype(np.int64),
        classes.astype(np.int64),
        repairs_s.astype(float),
        np.ones(count),
        np.zeros(count),
        np.zeros(count, dtype=bool),
        is_fixed,
    )
    return laid_out(1, np.zeros(count, dtype=np.int64), flat)


def parts_of(
    scenario: FailureScenario, *events: tuple[float, int, int, float], is_fixed: bool = False
) -> dict[str, float]:
    """Where the time of the one run goes, without what is 0, and how often things happened."""
    outcome = simulate_histories(scenario, [history(*events, is_fixed=is_fixed)])
    parts = dict(zip(PARTS, outcome.samples.parts_s[0].tolist(), strict=True))
    counts = dict(zip(COUNTS, outcome.samples.counts[0].tolist(), strict=True))
    assert sum(parts.values()) == pytest.approx(float(outcome.samples.wall_s[0]), rel=1e-12)
    assert min(parts.values()) > -1e-9
    return {name: value for name, value in (parts | counts).items() if value > 1e-9}


def with_pool(scenario: FailureScenario = SCENARIO, **pool: Any) -> FailureScenario:
    return replace(scenario, pool=Pool(**pool))


# A full period is 1000 s, 900 of them training; ten hours are 36 of them.
CASES = {
    "nothing happens": (SCENARIO, [], {"training": 36 * 900, "saving": 3600}),
    # At 5450 s there are five checkpoints and 450 s after the last: 450 are lost, 100 pass, 30450 s remain: 30 periods
    # and 450 s.
    "a restart in place": (
        SCENARIO,
        [(5450, 0, STOPS, 0)],
        {"training": 5 * 900 + 30 * 900 + 450, "saving": 3500, "made again": 450, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1},
    ),
    # While a checkpoint is being made, all of its interval is lost.
    "a failure during a checkpoint": (
        SCENARIO,
        [(950, 0, STOPS, 0)],
        {"training": 34 * 900 + 900, "saving": 50 + 3400 + 50, "made again": 900, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1},
    ),
    "a spare takes the place": (
        with_pool(spares=1),
        [(5450, 0, STOPS, HOUR_S)],
        {"training": 5 * 900 + 30 * 900 + 450, "saving": 3500, "made again": 450, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1, "hosts lost": 1},
    ),
    # It waits for the repair, 20 s of which are the detection.
    "no spare": (
        SCENARIO,
        [(5000, 0, STOPS, 2000)],
        {"training": 5 * 900 + 28 * 900 + 900, "saving": 3300 + 20, "detection": 20, "restart": 80}
        | {"waiting for hosts": 1980, "failures": 1, "restarts": 1, "hosts lost": 1},
    ),
    "a cold host comes": (
        with_pool(cold=1, provision_s=500),
        [(5000, 0, STOPS, 20 * HOUR_S)],
        {"training": 5 * 900 + 30 * 900 + 420, "saving": 3500, "detection": 20, "restart": 80}
        | {"waiting for hosts": 480, "failures": 1, "restarts": 1, "hosts lost": 1},
    ),
    # Three quarters of the pace, where a period takes 1300 s; at 15,400 s all are there, after 7 periods and 1200 s.
    "fewer hosts, then all again": (
        with_pool(when_missing="shrink"),
        [(5000, 0, STOPS, 10_400)],
        {"training": 4500 + 7 * 900 + 1200 * 0.75 + 20 * 900 + 420, "saving": 500 + 700 + 100 + 2000}
        | {"fewer hosts": 7 * 300 + 300, "detection": 20, "restart": 160, "failures": 1, "restarts": 2}
        | {"hosts lost": 1, "resizes": 2},
    ),
    # A second failure during the restart begins it anew; nothing more is lost.
    "again while restarting": (
        SCENARIO,
        [(5450, 0, STOPS, 0), (5500, 1, STOPS, 0)],
        {"training": 5 * 900 + 30 * 900 + 400, "saving": 3500, "made again": 450, "detection": 40, "restart": 110}
        | {"failures": 2, "restarts": 2},
    ),
    # Snapshots in memory each 100 s of training that cost nothing: 50 s are lost, and the period goes on at 400 s.
    "memory of other hosts": (
        replace(SCENARIO, checkpoints=Checkpoints(900, 100, memory_interval_s=100)),
        [(5450, 0, STOPS, 0)],
        {"training": 4500 + 400 + 500 + 29 * 900 + 850, "saving": 500 + 100 + 2900, "made again": 50}
        | {"detection": 20, "restart": 80, "failures": 1, "restarts": 1},
    ),
    "memory is lost with the hosts": (
        replace(SCENARIO, checkpoints=Checkpoints(900, 100, memory_interval_s=100)),
        [(5450, 0, FATAL, 0)],
        {"training": 5 * 900 + 30 * 900 + 450, "saving": 3500, "made again": 450, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1},
    ),
    # 450 s after the fifth, which is durable only after 500 s.
    "the newest is not durable yet": (
        replace(SCENARIO, checkpoints=Checkpoints(900, 100, persist_s=500)),
        [(5450, 0, STOPS, 0)],
        {"training": 4 * 900 + 30 * 900 + 450, "saving": 3500, "made again": 1350, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1},
    ),
    "the newest is durable": (
        replace(SCENARIO, checkpoints=Checkpoints(900, 100, persist_s=400)),
        [(5450, 0, STOPS, 0)],
        {"training": 5 * 900 + 30 * 900 + 450, "saving": 3500, "made again": 450, "detection": 20, "restart": 80}
        | {"failures": 1, "restarts": 1},
    ),
    # Slow for 600 s, of which 300 are lost; then it saves, and restarts with the spare; 30,000 + 220 s remain.
    "a slow host is found": (
        with_pool(spares=1),
        [(5000, 0, SLOW, HOUR_S)],
        {"training": 4500 + 300 + 30 * 900 + 220, "saving": 500 + 100 + 3000, "slow hosts": 300, "restart": 80}
        | {"restarts": 1, "hosts found slow": 1},
    ),
    "a slow host stays until there is another": (
        with_pool(cold=1, provision_s=400),
        [(5000, 0, SLOW, HOUR_S)],
        {"training": 4500 + 500 + 29 * 900 + 820, "saving": 500 + 100 + 2900, "slow hosts": 500, "restart": 80}
        | {"restarts": 1, "hosts found slow": 1},
    ),
    # As a trace has it: bad for 400 s, and good again before it is found.
    "a slow host gets well": (
        SCENARIO,
        [(5000, 0, SLOW, 400)],
        {"training": 4500 + 200 + 700 + 29 * 900 + 800, "slow hosts": 200, "saving": 500 + 100 + 2900},
    ),
    "an operator wants a host out": (
        with_pool(spares=1),
        [(5450, 0, OUT, HOUR_S)],
        {"training": 4500 + 450 + 30 * 900 + 370, "saving": 500 + 100 + 3000, "restart": 80, "restarts": 1},
    ),
    "an operator wants a host out, and there is no other": (
        SCENARIO,
        [(5450, 0, OUT, HOUR_S)],
        {"training": 36 * 900, "saving": 3600},
    ),
    "planned work": (
        replace(SCENARIO, recovery=replace(SCENARIO.recovery, planned_s=1000)),
        [(5450, PLANNED_STOP, PLANNED_STOP, 1000)],
        {"training": 4500 + 450 + 29 * 900 + 370, "saving": 500 + 100 + 2900, "planned": 1000, "restart": 80}
        | {"restarts": 1, "planned stops": 1},
    ),
    "without saving first": (
        replace(SCENARIO, recovery=replace(SCENARIO.recovery, planned_s=1000, saves_first=False)),
        [(5450, PLANNED_STOP, PLANNED_STOP, 1000)],
        {"training": 4500 + 29 * 900 + 470, "saving": 500 + 2900, "made again": 450, "planned": 1000, "restart": 80}
        | {"restarts": 1, "planned stops": 1},
    ),
    "a spare fails": (
        with_pool(spares=1),
        [(5000, 4, STOPS, HOUR_S)],
        {"training": 36 * 900, "saving": 3600, "hosts lost": 1},
    ),
    "a scheduler's queue": (
        replace(SCENARIO, recovery=replace(SCENARIO.recovery, queue_s=200, load_s=20)),
        [(5450, 0, STOPS, 0)],
        {"training": 5 * 900 + 30 * 900 + 230, "saving": 3500, "made again": 450, "detection": 20, "restart": 100}
        | {"queue": 200, "failures": 1, "restarts": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_one_failure_costs(name: str) -> None:
    scenario, events, expected = CASES[name]
    events = events or [(1e9, 0, STOPS, 0)]
    assert parts_of(scenario, *events, is_fixed="gets well" in name) == pytest.approx(expected, abs=1e-6)


def test_a_goal_is_reached_at_the_second() -> None:
    """10,000 s of training are eleven intervals and 100 s, so eleven checkpoints; one failure costs 450 + 100 s."""
    scenario = replace(SCENARIO, work=Work(4, step_s=10, steps=1000, days=30, price_per_device_hour=2))
    quiet = simulate_histories(scenario, [history((1e9, 0, STOPS, 0))])
    assert quiet.days.mean * DAY_S == pytest.approx(10_000 + 1100)
    assert quiet.finished == 1 and quiet.steps.mean == pytest.approx(1000)
    hit = simulate_histories(scenario, [history((5450, 0, STOPS, 0))])
    assert hit.days.mean * DAY_S == pytest.approx(11_100 + 550)
    assert hit.cost.mean == pytest.approx(2 * 32 * 11_650 / 3600)
    never = replace(scenario, work=replace(scenario.work, days=0.1))
    assert simulate_histories(never, [history((1e9, 0, STOPS, 0))]).finished == 0


def test_a_host_that_fails_often_is_replaced_for_good() -> None:
    failures = replace(CLASSES, evict_after=2, replace_s=5000)
    events = [(float(t), 0, STOPS, 0.0) for t in range(5000, 30_000, 1000)]
    outcome = simulate_histories(replace(SCENARIO, failures=failures), [history(*events)])
    counts = dict(zip(COUNTS, outcome.samples.counts[0].tolist(), strict=True))
    # At 6 ks it goes for 5 ks, in which it cannot fail; and again after two more: 12, 18 and 24 ks.
    assert counts["lemons replaced"] == 4 and counts["hosts lost"] == 4
    assert outcome.shares["waiting for hosts"].mean * 36_000 == pytest.approx(4 * (5000 - 20))


def test_lemons_keep_the_mean_rate_and_cause_their_share() -> None:
    failures = Failures((FailureClass("f", 0.02),), lemon_share=0.05, lemon_times=20)
    scenario = FailureScenario(Work(200, days=100), failures)
    lemons = draw_lemons(0.05, 50, 200, np.random.default_rng(1))
    drawn = draw(scenario, lemons, 0, 100 * DAY_S, np.random.default_rng(2))
    hits = np.isfinite(drawn.times_s)
    assert hits.sum() / (50 * 200 * 100) == pytest.approx(0.02, rel=0.1)
    runs, columns = np.nonzero(hits)
    by_lemons = lemons[runs, drawn.hosts[runs, columns]].mean()
    assert by_lemons == pytest.approx(0.05 * 20 / (0.05 * 20 + 0.95), abs=0.03)
    assert (np.diff(np.where(hits, drawn.times_s, 1e18), axis=1) >= 0).all()


def test_replacing_lemons_makes_failures_rarer() -> None:
    kept = Failures((FailureClass("f", 0.02),), lemon_share=0.02, lemon_times=30)
    scenario = FailureScenario(Work(200, days=60), kept, pool=Pool(spares=4))
    replaced = replace(scenario, failures=replace(kept, evict_after=3))
    before, after = simulate(scenario, 20).counts["failures"], simulate(replaced, 20).counts["failures"]
    assert after.high < before.low and after.mean < 0.8 * before.mean


def test_idle_hosts_may_fail_less_often() -> None:
    scenario = FailureScenario(
        Work(8, days=100), Failures((FailureClass("f", 0.01, repair=Duration.fixed(60)),)), pool=Pool(92)
    )
    lost = simulate(scenario, 20).counts["hosts lost"].mean
    idle = (
        simulate(replace(scenario, failures=replace(scenario.failures, idle_ratio=0.0)), 20).counts["hosts lost"].mean
    )
    assert lost == pytest.approx(100, rel=0.15) and idle == pytest.approx(8, rel=0.35)


durations = st.one_of(
    st.floats(0, 1e6).map(Duration.fixed),
    st.floats(0, 1e6).map(Duration.exponential),
    st.tuples(st.floats(1, 1e5), st.floats(1, 50)).map(lambda p: Duration.lognormal(p[0], p[0] * p[1])),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=4).map(lambda v: Duration.observed(tuple(v))),
)
classes = st.builds(
    FailureClass,
    name=st.just("x"),
    per_host_day=st.floats(0, 1),
    effect=st.sampled_from(["stops", "slow", "taken out"]),
    repair=durations,
    detection_s=st.none() | st.floats(0, 1e5),
    slowdown=st.floats(1, 50),
    survives=st.booleans(),
)
times = st.floats(0, 1e5)


@st.composite
def scenarios(draw_from: st.DrawFn) -> FailureScenario:
    """Anything that is accepted, however odd, on a few hosts."""
    hosts = draw_from(st.integers(1, 6))
    interval_s = draw_from(st.floats(1, 1e5))
    ratio = st.floats(0, 1)
    return FailureScenario(
        Work(hosts, step_s=5, steps=draw_from(st.sampled_from([0, 1, 10_000])), days=draw_from(st.floats(0.01, 4))),
        Failures(
            tuple(draw_from(st.lists(classes, max_size=3))),
            lemon_share=draw_from(ratio),
            lemon_times=draw_from(st.floats(1, 10)),
            evict_after=draw_from(st.integers(0, 3)),
            idle_ratio=draw_from(ratio),
        ),
        draw_from(
            st.builds(
                Recovery,
                *[times] * 6,
                spread=st.sampled_from([0.0, 0.5, 3.0]),
                saves_first=st.booleans(),
                planned_per_day=st.floats(0, 2),
                planned_s=times,
            )
        ),
        Checkpoints(
            interval_s,
            draw_from(st.floats(0, 1e4)),
            interval_s * draw_from(ratio),
            draw_from(st.sampled_from([0.0, interval_s / 7, interval_s])),
            draw_from(st.floats(0, 100)),
        ),
        draw_from(
            st.builds(
                Pool,
                spares=st.integers(0, 3),
                cold=st.integers(0, 3),
                provision_s=st.sampled_from([0.0, 900.0, 1e6]),
                when_missing=st.sampled_from(["wait", "shrink"]),
                shrink_by=st.integers(1, 5),
                smallest_hosts=st.integers(0, hosts),
                patience_s=times,
            )
        ),
    )


def check(outcome: RunsOutcome) -> None:
    runs = outcome.samples
    assert np.allclose(runs.parts_s.sum(axis=1), runs.wall_s, rtol=1e-9, atol=1e-6)
    assert (runs.parts_s > -1e-6).all() and (runs.counts >= 0).all()
    assert (runs.wall_s <= outcome.scenario.work.days * DAY_S * (1 + 1e-12)).all()
    assert 0 <= outcome.ettr.least <= outcome.ettr.most <= 1 + 1e-9
    assert outcome.ettr.low <= outcome.ettr.mean <= outcome.ettr.high
    done = runs.parts_s[runs.finished, PARTS.index("training")]
    assert np.allclose(done, outcome.scenario.work.goal_s, rtol=1e-9)


@given(scenario=scenarios(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_time_is_accounted_for_whatever_happens(scenario: FailureScenario, seed: int) -> None:
    check(simulate(scenario, runs=4, seed=seed))


@given(scenario=scenarios(), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_runs_do_not_disturb_each_other(scenario: FailureScenario, seed: int) -> None:
    """A run among others is exactly the run alone."""
    random = np.random.default_rng(seed)
    days_s = scenario.work.days * DAY_S
    drawn = draw(scenario, draw_lemons(0.2, 3, scenario.all_hosts, random), 0, days_s, random)
    together = simulate_histories(scenario, [drawn])
    check(together)
    rows = [
        History(*(getattr(drawn, name)[n : n + 1] for name in list(History.__annotations__)[:-1])) for n in range(3)
    ]
    alone = simulate_histories(scenario, rows)
    np.testing.assert_array_equal(together.samples.parts_s, alone.samples.parts_s)
    np.testing.assert_array_equal(together.samples.counts, alone.samples.counts)


def test_the_same_seed_gives_the_same_and_another_does_not() -> None:
    scenario = FailureScenario(
        Work(64, days=20), Failures((FailureClass("f", 0.05, repair=Duration.exponential(HOUR_S)),))
    )
    first, again, other = simulate(scenario, 20, 5), simulate(scenario, 20, 5), simulate(scenario, 20, 6)
    np.testing.assert_array_equal(first.samples.parts_s, again.samples.parts_s)
    assert (first.samples.parts_s != other.samples.parts_s).any()
