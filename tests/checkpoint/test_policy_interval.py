"""The ``auto`` interval against closed forms and against failures played out one by one."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import HOST_MTBF_S, IntervalCosts, JobFailures, choose, daly, lost_share, young

FREE = CheckpointConfig(auto=True, every_steps=0)
HOUR_S = 3600.0

# step, stall, persisting, restart, mean time between failures; seconds
CASES = [
    IntervalCosts(1.0, 0.03, 0.0, 0.0),
    IntervalCosts(0.5, 0.03, 5.0, 60.0),
    IntervalCosts(1.0, 2.0, 10.0, 300.0),
    IntervalCosts(10.0, 20.0, 60.0, 300.0),
    IntervalCosts(5.0, 300.0, 0.0, 600.0),
    IntervalCosts(15.0, 0.05, 45.0, 600.0),
]
MTBF_S = [0.5 * HOUR_S, 1.8 * HOUR_S, 7.9 * HOUR_S, 47.7 * 24 * HOUR_S]
TABLE = [(costs, mtbf_s) for costs in CASES for mtbf_s in MTBF_S]


def least_steps(costs: IntervalCosts) -> int:
    return max(math.ceil(costs.persist_s / costs.step_s), 1)


def candidates(costs: IntervalCosts, mtbf_s: float) -> list[int]:
    """Intervals to try, from the shortest possible to five times Young's optimum, 1 % apart."""
    most = max(5 * young(costs.stall_s, mtbf_s) / costs.step_s, 2 * least_steps(costs))
    tries = np.geomspace(least_steps(costs), most, math.ceil(math.log(most / least_steps(costs)) / 0.01) + 2)
    return sorted({round(steps) for steps in tries})


def lost_when_played(interval_s: float, costs: IntervalCosts, mtbf_s: float, uptimes_s: np.ndarray) -> float:
    """The share of time lost over many times of running, drawn at random, each ended by a failure.

    With `interval_s` 0: what is lost at least, with checkpoints that cost nothing and are taken all the time.
    """
    durable_s = np.maximum(uptimes_s - costs.persist_s, 0)
    useful_s = durable_s if interval_s == 0 else np.floor(durable_s / (interval_s + costs.stall_s)) * interval_s
    # A failure may also hit a restart, which then begins again: so long it takes on average until one succeeds.
    restarting_s = mtbf_s * math.expm1(costs.restart_s / mtbf_s)
    return 1 - float(useful_s.mean() / (uptimes_s.mean() + restarting_s))


@pytest.mark.parametrize(("costs", "mtbf_s"), TABLE)
def test_the_chosen_interval_loses_as_little_as_the_best_of_all_when_played_out(
    costs: IntervalCosts, mtbf_s: float
) -> None:
    uptimes_s = np.random.default_rng(7).exponential(mtbf_s, 20_000)
    chosen = choose(FREE, costs, JobFailures(given_s=mtbf_s))
    # What every interval loses alike (restarts, persisting) is left out, or it would hide a bad choice.
    at_least = lost_when_played(0, costs, mtbf_s, uptimes_s)
    tries_s = [steps * costs.step_s for steps in candidates(costs, mtbf_s)]
    best = min(lost_when_played(interval_s, costs, mtbf_s, uptimes_s) for interval_s in tries_s)
    ours = lost_when_played(chosen.seconds, costs, mtbf_s, uptimes_s)
    assert ours - at_least <= 1.05 * (best - at_least)
    assert chosen.lost_share == pytest.approx(ours, abs=0.01)


@pytest.mark.parametrize(("costs", "mtbf_s"), TABLE)
def test_the_chosen_interval_is_the_best_one(costs: IntervalCosts, mtbf_s: float) -> None:
    chosen = choose(FREE, costs, JobFailures(given_s=mtbf_s))
    losses = {s: lost_share(s * costs.step_s, costs, mtbf_s) for s in candidates(costs, mtbf_s)}
    best = min(losses, key=losses.__getitem__)
    assert abs(chosen.steps - best) <= max(0.05 * best, 1)


def test_what_is_expected_is_what_happens_step_by_step() -> None:
    """A run played out event by event, with nothing of the formulas in it."""
    draw = random.Random(3)
    costs, mtbf_s, steps = IntervalCosts(10.0, 4.0, 55.0, 120.0), 2000.0, 12
    clock_s, done, durable, goal = 0.0, 0, 0, 400_000
    failure_s = draw.expovariate(1 / mtbf_s)
    on_the_way: tuple[int, float] | None = None  # a snapshot's step, and when it will be durable
    while done < goal:
        end_s = clock_s + costs.step_s + (costs.stall_s if (done + 1) % steps == 0 else 0.0)
        if on_the_way is not None and on_the_way[1] <= min(end_s, failure_s):
            durable, on_the_way = on_the_way[0], None
        if failure_s < end_s:
            clock_s, done, on_the_way = failure_s, durable, None
            failure_s = clock_s + draw.expovariate(1 / mtbf_s)
            while failure_s < clock_s + costs.restart_s:  # again while restarting
                clock_s = failure_s
                failure_s = clock_s + draw.expovariate(1 / mtbf_s)
            clock_s += costs.restart_s
            continue
        clock_s, done = end_s, done + 1
        if done % steps == 0:
            on_the_way = (done, clock_s + costs.persist_s)
    lost = 1 - goal * costs.step_s / clock_s
    assert lost == pytest.approx(lost_share(steps * costs.step_s, costs, mtbf_s), rel=0.03)


def test_closed_forms() -> None:
    assert young(2.0, 3600.0) == 120.0
    # by hand: 120 · (1 + sqrt(2/7200)/3 + (2/7200)/9) - 2
    assert daly(2.0, 3600.0) == pytest.approx(120 * (1 + 1 / 180 + 1 / 32400) - 2)
    assert daly(10.0, 5.0) == 5.0
    assert lost_share(1.0, IntervalCosts(1.0, 1.0, 1.0, 1e9), 1.0) == 1.0


def test_the_published_rate_of_a_hundred_hosts() -> None:
    assert JobFailures(hosts=128).mtbf_s == pytest.approx(7.9 * HOUR_S, rel=0.15)


def test_failures_seen_weigh_more_and_more() -> None:
    mtbf_s = [JobFailures(4, n, n * HOUR_S).mtbf_s for n in (0, 1, 10, 1000)]
    assert mtbf_s == sorted(mtbf_s, reverse=True)
    assert mtbf_s[0] == HOST_MTBF_S / 4
    assert mtbf_s[-1] == pytest.approx(HOUR_S, rel=0.3)
    assert JobFailures(1, 0, 1e9).mtbf_s > 1e9


def test_persisting_is_a_lower_bound() -> None:
    chosen = choose(FREE, IntervalCosts(1.0, 0.001, 90.0), JobFailures(given_s=HOUR_S))
    assert chosen.steps == 90
    assert chosen.explanation.endswith("a shorter one would lose less, but persisting takes as long")


@pytest.mark.parametrize(
    ("bound", "text"), [({"every_steps": 40}, "every_steps = 40"), ({"every_s": 20}, "every_s = 20")]
)
def test_bounds_from_above(bound: dict[str, int], text: str) -> None:
    config = CheckpointConfig(**{"auto": True, "every_steps": 0} | bound)
    chosen = choose(config, IntervalCosts(0.5, 2.0, 90.0), JobFailures(given_s=HOUR_S))
    assert chosen.steps == 40
    assert chosen.explanation.endswith(f"; no longer because of {text}, though persisting takes longer")


def test_a_person_understands_why() -> None:
    chosen = choose(FREE, IntervalCosts(0.74, 2.0, 41.0, 300.0), JobFailures(given_s=7.9 * HOUR_S))
    assert chosen.explanation == (
        "every 454 steps (5m36s): stall 2.0s, persisting 41.0s, one failure per 7h54m (given); "
        "2.36% of the time is expected to be lost"
    )
    told = choose(
        FREE, IntervalCosts(0.74, 2.0, 41.0), JobFailures(hosts=16, seen=2, observed_s=9 * HOUR_S)
    ).explanation
    assert "(16 hosts at one per 47d16h each, 2 seen in 9h00m)" in told


seconds = st.floats(1e-3, 1e4)


@given(
    step_s=st.floats(0.01, 100), stall_s=seconds, persist_s=seconds, mtbf_s=st.floats(60, 1e8), factor=st.floats(1, 9)
)
def test_monotone(step_s: float, stall_s: float, persist_s: float, mtbf_s: float, factor: float) -> None:
    def steps(stall: float, persist: float, mtbf: float) -> int:
        return choose(FREE, IntervalCosts(step_s, stall, persist), JobFailures(given_s=mtbf)).steps

    here = steps(stall_s, persist_s, mtbf_s)
    assert here >= 1
    assert here * step_s >= persist_s / 1.01
    assert steps(stall_s, persist_s * factor, mtbf_s) >= here
    assert steps(stall_s, persist_s, mtbf_s * factor) >= here
    if stall_s * factor < mtbf_s:
        assert steps(stall_s * factor, persist_s, mtbf_s) >= here


def test_the_worked_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint_policy.md").read_text()
    [(code, printed)] = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == printed
