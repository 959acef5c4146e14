"""What a search finds is what predicting every single layout finds, with few predictions."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_costs import GPT3, FakeCosts, FakeScores

from phalanx.plan.report.report_model import limits_of
from phalanx.plan.search.constraints import CHOICES, SearchTarget, parse
from phalanx.plan.search.frontier import CostModel, scored
from phalanx.plan.search.search import SearchResult, memory_bytes, search
from phalanx.plan.search.space import NUMERIC, layouts
from phalanx.plan.types import Job, Model, Part, Prediction, Strategy

MODEL = Model(layers=4, hidden=512, heads=8, vocab_rows=1024, max_sequence=4096)
FIELDS = (*NUMERIC, *CHOICES)


def job_of(batch: int = 32, model: Model = MODEL) -> Job:
    return Job(model, 4096, batch)


def every(job: Job, machine: SearchTarget, words: list[str], fake: FakeCosts) -> list[Prediction]:
    """Each layout predicted, fitting or not."""
    space = layouts(job, machine, parse(words))
    found = [space.strategy(index, int(row)) for index, group in enumerate(space.groups) for row in group.rows]
    return [fake.predict(strategy) for strategy in found]


def steps(predictions: Any) -> list[float]:
    return [prediction.step_s for prediction in predictions]


@settings(max_examples=15, deadline=None)
@given(
    devices=st.sampled_from([1, 4, 6, 8]),
    batch=st.sampled_from([4, 6, 8]),
    memory=st.sampled_from([1.0, 3.0, 6.0, 30.0]),
    slack=st.sampled_from([0.0, 0.02, 0.3]),
    top=st.integers(1, 40),
    words=st.sampled_from([[], ["pipeline<=2"], ["recompute=full", "micro_batch<=2"], ["zero=0,1", "schedule=1f1b"]]),
)
def test_the_best_are_those_of_brute_force(
    devices: int, batch: int, memory: float, slack: float, top: int, words: list[str]
) -> None:
    job, machine = job_of(batch), SearchTarget(devices, 8, memory)
    fake = FakeCosts(job, slack)
    all_of_them = every(job, machine, words, fake)
    limit = parse(words).memory_bytes(memory)
    fitting = sorted(
        (one for one in all_of_them if memory_bytes(one) <= limit), key=lambda one: (one.step_s, memory_bytes(one))
    )
    if not fitting:
        return
    result = search(job, machine, fake.costs, parse(words), top, effort=10_000)
    assert (
        result.proven and result.all_proven and result.candidates == len(all_of_them) and result.fitting >= len(fitting)
    )
    assert steps(result.best) == pytest.approx(steps(fitting[:top]), rel=1e-12)
    assert [memory_bytes(one) for one in result.best] == pytest.approx(
        [memory_bytes(one) for one in fitting[:top]], rel=1e-12
    )
    assert result.unlimited.step_s == pytest.approx(min(steps(all_of_them)))
    check_front(result, fitting)
    check_shapes(result, fitting, top)
    check_choices(result, all_of_them, limit)


def check_front(result: SearchResult, fitting: list[Prediction]) -> None:
    """No layout is both leaner and as fast as one of the front; and each fiftieth of memory has its fastest."""
    assert steps(result.pareto) == sorted(steps(result.pareto))
    leanest = min(memory_bytes(one) for one in fitting)
    step = min(result.limit_bytes, max(memory_bytes(one) for one in fitting)) / 40
    for one in result.pareto:
        assert not [
            other
            for other in fitting
            if other.step_s < one.step_s * (1 - 1e-12) and memory_bytes(other) <= memory_bytes(one)
        ]
        assert not [
            other
            for other in fitting
            if other.step_s <= one.step_s and memory_bytes(other) < memory_bytes(one) * (1 - 1e-12)
        ]
    assert result.pareto[0].step_s == pytest.approx(result.best[0].step_s)
    assert memory_bytes(result.pareto[-1]) <= leanest + step


def check_shapes(result: SearchResult, fitting: list[Prediction], top: int) -> None:
    """The best of each way to share the devices."""
    best: dict[Any, float] = {}
    for one in fitting:
        s = one.strategy
        best.setdefault((s.pipeline, s.data, s.context, s.tensor), one.step_s)
    assert steps(result.shapes) == pytest.approx(sorted(best.values())[:top])


def check_choices(result: SearchResult, all_of_them: list[Prediction], limit: float) -> None:
    """The best for each value, everything else free; and what changes alone differs in little else."""
    best = result.best[0].strategy
    assert {one.choice for one in result.sensitivities} == {
        name for name in FIELDS if name != "replicate" and len({value(one, name) for one in all_of_them}) > 1
    }
    for sensitivity in result.sensitivities:
        assert sensitivity.value == getattr(best, sensitivity.choice)
        for outcome in sensitivity.outcomes:
            having = [one for one in all_of_them if value(one, sensitivity.choice) == outcome.value]
            fits = [one.step_s for one in having if memory_bytes(one) <= limit]
            assert (outcome.best.step_s if outcome.best else math.inf) == pytest.approx(min(fits, default=math.inf))
            assert outcome.least_bytes <= min(memory_bytes(one) for one in having) * (1 + 1e-12)
            if outcome.alone:
                assert value(outcome.alone, sensitivity.choice) == outcome.value
            if outcome.value == sensitivity.value:
                assert outcome.alone and outcome.alone.strategy == best


def value(prediction: Prediction, name: str) -> Any:
    return getattr(prediction.strategy, name)


def test_changing_one_choice_alone_leaves_the_others() -> None:
    job = job_of(64)
    result = search(job, SearchTarget(16, 8, 30.0), FakeCosts(job).costs)
    best = result.best[0].strategy
    for name in ("micro_batch", "recompute", "tensor_overlap"):
        sensitivity = next(one for one in result.sensitivities if one.choice == name)
        for outcome in sensitivity.outcomes:
            if outcome.alone:
                assert replace(outcome.alone.strategy, **{name: getattr(best, name)}) == best


def test_175_billion_are_searched_with_few_predictions() -> None:
    job = Job(GPT3, 2048, 1536)
    fake = FakeCosts(job, slack=0.01)
    result = search(job, SearchTarget(12_288, 8, 0.2), fake.costs)
    assert result.candidates >= 300_000 and 0 < result.fitting < result.candidates
    assert result.proven and result.predicted == len(fake.predicted) < result.candidates / 50
    assert len(set(map(repr, fake.predicted))) == len(fake.predicted)
    assert result.removed[-1].of == "layouts" and result.removed[-1].left == result.fitting
    assert result.sensitivities[0].spread_s >= result.sensitivities[-1].spread_s
    assert np.isfinite(result.seconds)


def test_a_limited_search_says_what_is_not_certain() -> None:
    job = job_of(64)
    exact = search(job, SearchTarget(16, 8, 6.0), FakeCosts(job, slack=0.4).costs)
    limited = search(job, SearchTarget(16, 8, 6.0), FakeCosts(job, slack=0.4).costs, max_predictions=20)
    assert exact.proven and not limited.proven and limited.predicted == 20
    assert limited.best[0].step_s >= exact.best[0].step_s >= limited.lower_s


def test_little_effort_leaves_intervals_that_hold() -> None:
    job = job_of(64)
    exact = search(job, SearchTarget(16, 8, 6.0), FakeCosts(job, slack=0.3).costs, effort=10_000)
    quick = search(job, SearchTarget(16, 8, 6.0), FakeCosts(job, slack=0.3).costs, effort=2)
    assert quick.proven and not quick.all_proven and exact.all_proven and quick.predicted < exact.predicted
    assert steps(quick.best) == steps(exact.best)
    outcomes = {(one.choice, outcome.value): outcome for one in exact.sensitivities for outcome in one.outcomes}
    for one in quick.sensitivities:
        for found in one.outcomes:
            true = outcomes[one.choice, found.value].best
            if true is not None:
                assert found.lower_s <= true.step_s * (1 + 1e-12)
                assert found.best is None or found.best.step_s >= true.step_s * (1 - 1e-12)


def test_several_processes_score_as_one_does() -> None:
    job = job_of(64)
    space, costs = layouts(job, SearchTarget(16, 8, 6.0), parse([])), FakeCosts(job).costs
    alone, shared = scored(space, costs, 1), scored(space, costs, 3)
    for name in ("lower_s", "memory_bytes", "group", "row"):
        assert np.array_equal(getattr(alone, name), getattr(shared, name))
    assert not multiprocessing.active_children()


def test_what_fails_in_another_process_is_raised() -> None:
    job = job_of(64)
    space, mine = layouts(job, SearchTarget(16, 8, 6.0), parse([])), os.getpid()

    def score(strategy: Strategy) -> FakeScores:
        if os.getpid() != mine:
            raise ZeroDivisionError("only there")
        return FakeCosts(job).score(strategy)

    with pytest.raises(RuntimeError, match="only there"):
        scored(space, CostModel(score, FakeCosts(job).predict), 2)


def test_nothing_is_proven_by_bounds_that_do_not_hold() -> None:
    job = job_of()
    result = search(job, SearchTarget(4, 8, 30.0), FakeCosts(job, slack=-0.1).costs)
    assert not result.proven and not result.all_proven and result.best


def test_limits_name_the_largest_parts() -> None:
    job = job_of()
    base = FakeCosts(job).predict(Strategy())
    parts = {"compute/mlp": 5.0, "data/reduce": 0.48, "data/gather": 0.02, "pipeline/bubble": 0.9, "odd/part": 0.1}
    made = tuple(Part(path, seconds, "assumed", "") for path, seconds in parts.items())
    prediction = replace(base, parts=made, step_s=6.5, memory=(replace(base.memory[0], parameters=78 * 2.0**30),))
    words = [limit.words for limit in limits_of(prediction, 80 * 2**30)]
    assert words == [
        "pipeline bubble 0.9 s of 6.5 s",
        "data-parallel tail 0.5 s of 6.5 s",
        "odd 0.1 s of 6.5 s",
        "memory 78 of 80 GiB",
    ]
    assert len(limits_of(prediction, 200e9)) == 3


def test_searching_needs_no_torch() -> None:
    code = "import sys, phalanx.plan.search.search; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
