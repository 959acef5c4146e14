"""The best interval and the best number of spares are those that trying all of them gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.interval import daly, young
from phalanx.core.errors import UserError
from phalanx.simulate.failure_formulas import closed_form
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
)
from phalanx.simulate.failure_simulation import (
    best_interval,
    best_spares,
    play_intervals,
    play_spares,
    with_interval,
    with_spares,
)

FAILURES = Failures((FailureClass("f", 0.05, repair=Duration.exponential(6 * HOUR_S)),))
SCENARIO = FailureScenario(
    Work(100, step_s=10, days=10), FAILURES, Recovery(60, 240), Checkpoints(600, 20), Pool(spares=3)
)


@given(
    rate=st.floats(1e-4, 5),
    stall_s=st.floats(0, 500),
    persist_s=st.floats(0, 500),
    memory_s=st.sampled_from([0.0, 30.0]),
    step_s=st.sampled_from([5.0, 60.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_best_interval_is_the_best_of_all(
    rate: float, stall_s: float, persist_s: float, memory_s: float, step_s: float
) -> None:
    failures = Failures((FailureClass("f", rate / 2), FailureClass("g", rate / 2, survives=False)))
    checkpoints = Checkpoints(3600, stall_s, persist_s, memory_s)
    scenario = FailureScenario(Work(10, step_s=step_s, days=2), failures, checkpoints=checkpoints)
    best_s = best_interval(scenario)
    assert best_s >= max(persist_s, memory_s) * (1 - 1e-9) and best_s == pytest.approx(step_s * round(best_s / step_s))
    tries = [k * step_s for k in range(1, int(2 * DAY_S / step_s), 41) if k * step_s >= max(persist_s, memory_s)]
    highest = max(closed_form(with_interval(scenario, s)).running for s in tries)
    assert closed_form(with_interval(scenario, best_s)).running >= highest - 1e-12


def test_the_best_interval_is_near_young_and_daly() -> None:
    best_s = best_interval(SCENARIO)
    mtbf_s = DAY_S / 5
    assert best_s == pytest.approx(daly(20, mtbf_s), abs=10)
    assert best_s == pytest.approx(young(20, mtbf_s), rel=0.05)
    form = closed_form(SCENARIO)
    assert form.daly_s == daly(20, mtbf_s) and form.young_s == young(20, mtbf_s)


def test_without_failures_no_checkpoint_is_best() -> None:
    quiet = replace(SCENARIO, failures=Failures(()))
    assert best_interval(quiet) == 10 * DAY_S


def test_the_best_number_of_spares_is_the_best_of_all() -> None:
    def goodput(spares: int) -> float:
        return closed_form(with_spares(SCENARIO, spares)).ettr * 100 / (100 + spares)

    for scenario in (SCENARIO, replace(SCENARIO, pool=Pool(when_missing="shrink", shrink_by=4))):
        best = best_spares(scenario)
        tried = [closed_form(with_spares(scenario, n)).ettr * 100 / (100 + n) for n in range(40)]
        assert best == tried.index(max(tried))
    assert best_spares(replace(SCENARIO, failures=Failures(()))) == 0


def test_the_same_failures_tell_small_differences_apart() -> None:
    """With one set of failures for all, the difference is known far better than each of the two."""
    choices = play_intervals(SCENARIO, [600, 1200, 4800], runs=30, seed=2)
    assert [choice.value for choice in choices] == [600, 1200, 4800]
    same, longer, longest = choices
    assert same.gain.mean == same.gain.low == same.gain.high == 0
    assert longest.gain.high < longer.gain.low
    ettr = longer.outcome.ettr
    assert longer.gain.high - longer.gain.low < 0.5 * (ettr.high - ettr.low)
    form = closed_form(with_interval(SCENARIO, 4800)).running - closed_form(SCENARIO).running
    assert longest.gain.mean == pytest.approx(form, rel=0.2)


def test_spares_against_the_same_failures() -> None:
    none, some, many = play_spares(SCENARIO, [0, best_spares(SCENARIO), 40], runs=10, seed=2)
    assert none.gain.high < 0 < some.gain.high and some.gain.mean > many.gain.mean
    # Hosts that only wait fail too, but nothing else differs: with enough of them no more hosts change anything.
    enough = play_spares(with_spares(SCENARIO, 40), [50], runs=3, seed=2)[0].outcome
    assert enough.shares["waiting for hosts"].most == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to try"):
        play_intervals(SCENARIO, [])
    with pytest.raises(UserError, match="spares"):
        play_spares(SCENARIO, [-1])
    with pytest.raises(UserError, match="interval_s"):
        play_intervals(SCENARIO, [0.0])
