"""Played months against what is known exactly, and closed forms against what was published."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.simulate.failure_formulas import binomial, closed_form, meta_ettr, mttf_s, standby
from phalanx.simulate.failure_model import (
    DAY_S,
    HOUR_S,
    Checkpoints,
    Duration,
    FailureClass,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
    load_failures,
)
from phalanx.simulate.failure_simulation import Estimate, simulate

TABLES = Path(__file__).parents[3] / "shared" / "tables"
RSC1, RSC2 = 6.5e-3, 2.34e-3


def agrees(estimate: Estimate, value: float, sigmas: float = 4.5) -> bool:
    """Whether the mean lies where it should, but for one time in 100,000."""
    return abs(estimate.mean - value) <= sigmas * (estimate.high - estimate.mean) / 1.96


def daly_wall_s(work_s: float, interval_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """How long it takes to do `work_s` of training (Daly 2006, equation 20)."""
    each = math.exp(restart_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    return mtbf_s * each * work_s / interval_s


# Stall, restart and interval; seconds, with one failure in 10,000 s.
@pytest.mark.parametrize(
    ("interval_s", "stall_s", "restart_s"),
    [(1400, 100, 0), (1400, 100, 600), (5000, 0, 300), (200, 50, 3000), (30_000, 1000, 100), (60, 5, 1)],
)
def test_time_to_finish_is_dalys_exact_expectation(interval_s: float, stall_s: float, restart_s: float) -> None:
    rate = DAY_S / 10_000
    intervals, runs = 20, 1000
    scenario = FailureScenario(
        Work(1, step_s=1, steps=int(intervals * interval_s), days=3000),
        Failures((FailureClass("f", rate),)),
        Recovery(0, restart_s),
        Checkpoints(interval_s, stall_s),
    )
    outcome = simulate(scenario, runs, seed=3)
    # The last interval ends with the work, without a checkpoint.
    each_s = daly_wall_s(interval_s, interval_s, stall_s, restart_s, 10_000)
    last_s = daly_wall_s(interval_s, interval_s, 0, restart_s, 10_000)
    assert outcome.finished == 1
    assert agrees(outcome.days, ((intervals - 1) * each_s + last_s) / DAY_S)


REPAIRS = [
    Duration.fixed(2 * HOUR_S),
    Duration.exponential(2 * HOUR_S),
    Duration.lognormal(HOUR_S, 4 * HOUR_S),
    Duration.observed((0.5 * HOUR_S, 3.5 * HOUR_S)),
]


@pytest.mark.slow
@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.kind)
def test_waiting_for_hosts_is_binomial_whatever_the_repairs(repair: Duration) -> None:
    """Hosts fail and are repaired, each on its own: how many are away is binomial (Palm, Takács)."""
    failures = Failures((FailureClass("f", 0.5, repair=repair),))
    scenario = FailureScenario(Work(8, days=60), failures, Recovery(0, 0), Checkpoints(600, 0), Pool(spares=1))
    away = 0.5 * repair.mean_s / DAY_S
    p = away / (1 + away)
    waiting = 1 - (1 - p) ** 9 - 9 * p * (1 - p) ** 8
    outcome = simulate(scenario, 100, seed=1)
    # It begins with all hosts there; the sixty days forget that soon.
    assert outcome.shares["waiting for hosts"].mean == pytest.approx(waiting, rel=0.08)
    assert closed_form(scenario).enough_hosts == pytest.approx(1 - waiting)


@pytest.mark.slow
def test_fewer_hosts_are_the_mean_of_a_binomial() -> None:
    failures = Failures((FailureClass("f", 0.5, repair=Duration.exponential(4 * HOUR_S)),))
    pool = Pool(when_missing="shrink", smallest_hosts=1)
    scenario = FailureScenario(Work(10, days=60), failures, Recovery(0, 0), Checkpoints(600, 0), pool)
    outcome = simulate(scenario, 60, seed=1)
    there = 1 / (1 + 0.5 / 6)
    kept = 1 - outcome.shares["made again"].mean
    assert outcome.ettr.mean == pytest.approx(there * kept, abs=0.004)
    assert closed_form(scenario).capacity == pytest.approx(there)


@pytest.mark.slow
def test_slow_hosts_take_their_share_of_the_time() -> None:
    """Any of ten slow ones, each a tenth of the time: the job is at half its pace unless none is."""
    slow = FailureClass("s", 1.0, "slow", detection_s=HOUR_S, slowdown=2.0)
    scenario = FailureScenario(Work(10, days=60), Failures((slow,)), Recovery(0, 0), Checkpoints(600, 0))
    outcome = simulate(scenario, 60, seed=1)
    rate = 10 * HOUR_S / DAY_S  # a host that is slow already does not get slower
    assert outcome.shares["slow hosts"].mean == pytest.approx((1 - math.exp(-rate)) / 2, abs=0.01)
    assert closed_form(scenario).ettr == pytest.approx(outcome.ettr.mean, abs=0.01)


FULL = Failures(
    (
        FailureClass("host", 5e-3, repair=Duration.lognormal(20 * HOUR_S, 6 * DAY_S)),
        FailureClass("storage", 1e-3, survives=False),
        FailureClass("slow", 5e-4, "slow", Duration.fixed(DAY_S)),
        FailureClass("fan", 5e-4, "taken out", Duration.exponential(DAY_S)),
    )
)
MEMORY = Checkpoints(1800, 20, 100, memory_interval_s=60, memory_stall_s=0.5)
STORIES = {
    "plain": FailureScenario(Work(1000), FULL, Recovery(60, 300), Checkpoints(1800, 5), Pool(spares=40)),
    "memory": FailureScenario(Work(1000), FULL, Recovery(60, 300, 200, 20, 60), MEMORY, Pool(spares=30)),
    "shrinks": FailureScenario(
        Work(1000),
        FULL,
        Recovery(60, 300, spread=0.5, planned_per_day=0.9, planned_s=1800),
        replace(MEMORY, memory_interval_s=10.0),
        Pool(spares=4, when_missing="shrink", shrink_by=16, provision_s=900),
    ),
    # Where spares hardly last, it takes months until as many hosts are away as in the long run.
    "few spares": FailureScenario(Work(200, days=300), FULL, Recovery(60, 300), Checkpoints(600, 5), Pool(spares=4)),
    "small": FailureScenario(
        Work(8, days=300), FULL.scaled(0.05), Recovery(60, 300), Checkpoints(600, 5), Pool(spares=2)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_the_closed_form_agrees_with_played_months(name: str) -> None:
    outcome = simulate(STORIES[name], 20, seed=2)
    formula = closed_form(STORIES[name]).ettr
    assert formula == pytest.approx(outcome.ettr.mean, abs=0.008) or agrees(outcome.ettr, formula)
    assert formula == pytest.approx(outcome.ettr.mean, abs=0.03)


# What Meta published: GPUs, rate, seconds between checkpoints, ETTR; restarts take five minutes, there is no queue.
@pytest.mark.parametrize(
    ("gpus", "rate", "interval_s", "published"),
    [(16_384, RSC1, 3600, 0.7), (16_384, RSC1, 300, 0.93), (100_000, RSC1, 420, 0.5)],
)
def test_published_points_of_meta(gpus: int, rate: float, interval_s: float, published: float) -> None:
    assert meta_ettr(gpus // 8, rate, interval_s, 300) == pytest.approx(published, abs=0.03)


def test_a_published_point_that_does_not_reproduce() -> None:
    """100,000 GPUs at RSC-2's rate, 21 minutes: 0.5 is printed; with restarts of five minutes it is 0.69."""
    assert meta_ettr(12_500, RSC2, 21 * 60, 300) == pytest.approx(0.685, abs=0.005)
    # A queue of eighteen minutes, or restarts of fourteen, would give it.
    assert meta_ettr(12_500, RSC2, 21 * 60, 300, queue_s=1100) == pytest.approx(0.5, abs=0.01)
    assert meta_ettr(12_500, RSC2, 21 * 60, 847) == pytest.approx(0.5, abs=0.01)


def best_of_meta(hosts: int, rate: float, write_s: float, restart_s: float) -> float:
    """With Young's interval, the time of writing taken off."""
    interval_s = math.sqrt(2 * write_s * mttf_s(hosts, rate))
    return meta_ettr(hosts, rate, interval_s, restart_s, write_s=write_s)


def test_what_meta_says_is_needed() -> None:
    """0.9 at 12,000 GPUs needs failures of 1 in 1,000 host-days, or checkpoints written in about 10 s."""
    assert best_of_meta(1500, RSC1, 300, 300) < 0.75
    assert best_of_meta(1500, 1e-3, 300, 300) == pytest.approx(0.9, abs=0.03)
    assert best_of_meta(1500, RSC1, 10, 300) == pytest.approx(0.9, abs=0.03)
    # 0.9 at 100,000 with RSC-2's rate: two minutes between checkpoints and restarts of two minutes are enough.
    assert meta_ettr(12_500, RSC2, 120, 120) >= 0.9
    assert meta_ettr(12_500, RSC2, 420, 120) < 0.9 and meta_ettr(12_500, RSC2, 120, 300) < 0.9


def test_runs_of_thousands_of_gpus_exceed_nine_tenths_with_hourly_checkpoints() -> None:
    """Meta: runs of 2,048 to 4,096 GPUs and more than a day."""
    assert meta_ettr(256, RSC1, 3600, 300) > 0.9
    assert meta_ettr(512, RSC2, 3600, 300) > 0.9


@pytest.mark.slow
def test_metas_formula_is_within_five_per_cent_of_played_months_at_8000_gpus() -> None:
    failures = Failures((FailureClass("host", RSC1),))
    scenario = FailureScenario(Work(1000, days=14), failures, Recovery(0, 300), Checkpoints(3600, 0))
    ettr = simulate(scenario, 60, seed=4).ettr.mean
    assert meta_ettr(1000, RSC1, 3600, 300) == pytest.approx(ettr, rel=0.05)


@pytest.mark.skipif(not TABLES.exists(), reason="the published tables are not here")
def test_metas_table_of_times_to_failure() -> None:
    lines = [line for line in (TABLES / "meta_mttf.csv").read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert len(rows) > 8
    for row in rows:
        hosts = int(row["gpus"]) // 8
        assert mttf_s(hosts, RSC1) / HOUR_S == pytest.approx(float(row["mttf_h_rsc1_formula"]), abs=0.006)
        assert mttf_s(hosts, RSC2) / HOUR_S == pytest.approx(float(row["mttf_h_rsc2_formula"]), abs=0.006)


def test_projected_times_to_failure() -> None:
    assert mttf_s(2048, RSC1) / HOUR_S == pytest.approx(1.8, abs=0.01)
    assert mttf_s(16_384, RSC1) / HOUR_S == pytest.approx(0.23, abs=0.01)
    assert mttf_s(0, RSC1) == math.inf


def test_binomials() -> None:
    for count, ratio in [(0, 0.3), (1, 0.5), (7, 0.2), (40, 0.9), (5, 0.0), (5, 1.0)]:
        exact = [math.comb(count, k) * ratio**k * (1 - ratio) ** (count - k) for k in range(count + 1)]
        assert list(binomial(count, ratio)) == pytest.approx(exact, abs=1e-12)
    assert sum(binomial(100_000, 0.004)) == pytest.approx(1, abs=1e-9)
    assert len(list(binomial(100_000, 0.004))) < 1000


def test_warm_standby_of_byterobust() -> None:
    """The 99th percentile of a binomial; 4 for 1,024 where one in a thousand is needed before it is filled up."""
    assert standby(1024, 0.001) == 4
    assert standby(128, 0.01) == 4
    assert standby(10, 0.0) == 0 and standby(10, 1.0) == 10


@pytest.mark.slow
def test_megascale_and_llama_3_lose_less_than_a_tenth() -> None:
    """MegaScale: over 10,000 GPUs, some weeks, over 100 restarts; found in under 10 minutes, caught up in under 15."""
    recovery = Recovery(detection_s=480, restart_s=240, spread=0.5)
    megascale = FailureScenario(Work(1280), load_failures("llama3"), recovery, Checkpoints(1200, 10), Pool(spares=32))
    outcome = simulate(megascale, 30, seed=1)
    assert outcome.counts["restarts"].least > 100
    assert outcome.ettr.low > 0.9
    # What Llama 3's recoveries took was not published: with a few minutes each it is as they say.
    recovery = Recovery(60, 300, planned_per_day=47 / 54)
    llama = FailureScenario(
        Work(2048, days=54), load_failures("llama3"), recovery, Checkpoints(600, 5), Pool(spares=64)
    )
    outcome = simulate(llama, 20, seed=1)
    assert outcome.counts["failures"].mean == pytest.approx(419, rel=0.06)
    assert outcome.ettr.least > 0.9


@pytest.mark.slow
def test_byterobust_keeps_97_per_cent() -> None:
    """9,600 GPUs for three months: a step's loss at most, hosts standing by, failures found within seconds."""
    memory = Checkpoints(1800, 5, 60, memory_interval_s=15, memory_stall_s=0.13)  # "< 0.9 %" of each step
    recovery = Recovery(detection_s=60, restart_s=240, memory_load_s=30)
    outcome = simulate(
        FailureScenario(Work(1200, days=90), load_failures("llama3"), recovery, memory, Pool(spares=40)), 10
    )
    assert outcome.ettr.mean == pytest.approx(0.97, abs=0.01)
