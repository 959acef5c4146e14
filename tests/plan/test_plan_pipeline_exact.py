"""`evaluate` against an event simulation of the same tables, for all schedules and any costs."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from pipeline_simulation import Case, Events, cases, duration, sending, simulate

from phalanx.core.errors import UserError
from phalanx.parallel.pipeline.schedules import Action, Table, make_table
from phalanx.parallel.pipeline.timeline import simulate as in_units
from phalanx.plan.pipeline import step_time as advance
from phalanx.plan.pipeline.step_time import StageCosts, StepTime, evaluate


def peak_live(table: Table, rank: int) -> int:
    """As the tests of `phalanx.parallel` count them: from a forward pass until all its gradients are made."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(itertools.accumulate((change[action.kind] for action in table.actions[rank]), initial=0))


def timed(case: Case) -> StepTime:
    return evaluate(case.schedule, case.ranks, case.chunks, case.micro_batches, case.costs)


def even(stages: int, send: float = 0.0, *, blocking: bool = False) -> StageCosts:
    """The costs of `parallel.pipeline.timeline`: a forward pass 1, a backward pass 2, half of it for the input."""
    ones = np.ones(stages)
    return StageCosts(ones, 2 * ones, ones, ones, np.full(stages - 1, send), blocking)


def close(ours: object, theirs: object, span: float) -> bool:
    return np.shape(ours) == np.shape(theirs) and np.allclose(ours, theirs, rtol=0, atol=1e-9 * span)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_times_are_those_of_the_events(case: Case) -> None:
    step, events = timed(case), simulate(case)
    table = events.table
    last = "W" if case.schedule in ("interleaved_zero_bubble", "zbv") else "B"
    stages = [table.placement.stages_of(rank) for rank in range(case.ranks)]

    def by_chunk(times: dict[Action, float], kind: str, micro_batch: int) -> list[list[float]]:
        return [[times[Action(stage, kind, micro_batch)] for stage in row] for row in stages]

    assert close(step.span_s, events.span, events.span)
    assert close(step.end_s, [events.ends[row[-1]] for row in table.actions], events.span)
    assert close(step.first_forward_begin_s, by_chunk(events.begins, "F", 0), events.span)
    assert close(step.last_backward_end_s, by_chunk(events.ends, last, case.micro_batches - 1), events.span)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_parts_add_up_and_are_what_they_say(case: Case) -> None:
    step, events = timed(case), simulate(case)
    table, costs = events.table, case.costs
    assert close(step.busy_s + step.bubble_s + step.imbalance_s + step.sends_s, [step.span_s] * case.ranks, step.span_s)
    assert close(step.busy_s, [sum(duration(a, costs) for a in row) for row in table.actions], step.span_s)
    assert close(step.sent_s, _messages(events, case), step.span_s)
    free = replace(costs, send_s=np.zeros_like(costs.send_s))
    alike = replace(free, **{name: np.full(len(part), part.mean()) for name, part in _parts(costs).items()})
    without = simulate(replace(case, costs=free)).span
    assert close(step.sends_s, [step.span_s - without] * case.ranks, step.span_s)
    waits = simulate(replace(case, costs=alike)).span - step.busy_s.mean()
    assert close(step.bubble_s, [waits] * case.ranks, step.span_s)


def _parts(costs: StageCosts) -> dict[str, np.ndarray]:
    names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
    return {name: getattr(costs, name) for name in names}


def _messages(events: Events, case: Case) -> list[float]:
    """Time of what a rank sends and of what it receives, which is the same."""
    return [sum(sending(events.table, action, case.costs) for action in row) for row in events.table.actions]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_activations_held_are_those_of_the_table(case: Case) -> None:
    step = timed(case)
    table = make_table(case.schedule, case.ranks, case.chunks, case.micro_batches)
    for rank in range(case.ranks):
        assert step.in_flight[rank].sum() == peak_live(table, rank)
        assert (step.in_flight[rank] >= 0).all()


@settings(max_examples=60, deadline=None)
@given(cases(most_ranks=5))
def test_both_ways_of_working_out_rows_agree(case: Case) -> None:
    slow = timed(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advance, "_WIDE", 1)
        wide = timed(case)
        patch.setattr(advance, "_WIDE", 10**9)
        narrow = timed(case)
    for step in (wide, narrow):
        assert close(step.end_s, slow.end_s, slow.span_s)
        assert close(step.last_backward_end_s, slow.last_backward_end_s, slow.span_s)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [
        ("1f1b", 4, 1),
        ("interleaved_1f1b", 4, 2),
        ("interleaved_1f1b", 3, 5),
        ("interleaved_zero_bubble", 4, 2),
        ("zbv", 4, 2),
    ],
)
def test_a_thousand_micro_batches_are_as_exact_as_a_few(schedule: str, ranks: int, chunks: int) -> None:
    random = np.random.default_rng(5)
    stages, count = ranks * chunks, 300 * ranks
    costs = StageCosts(*(random.uniform(0.9, 1.1, stages) for _ in range(4)), random.uniform(0, 0.2, stages - 1))
    for each in (costs, replace(costs, blocking=True)):
        case = Case(schedule, ranks, chunks, count, each)
        assert timed(case).span_s == pytest.approx(simulate(case).span, rel=1e-11)


@pytest.mark.parametrize(
    "case", [("1f1b", 1, 8), ("interleaved_1f1b", 2, 12), ("interleaved_zero_bubble", 3, 8), ("zbv", 2, 9)]
)
def test_units_are_those_of_the_timeline_that_people_see(case: tuple[str, int, int]) -> None:
    schedule, chunks, count = case
    table = make_table(schedule, 4, chunks, count)
    assert evaluate(schedule, 4, chunks, count, even(4 * chunks)).span_s == pytest.approx(in_units(table).length)


TRACE = {
    "one slow rank": ([0.5461, 0.2168, 0.2169, 0.2318], [0.8692, 0.3834, 0.3838, 0.3981], 45.600),
    "all healthy": ([0.2174, 0.2189, 0.2182, 0.2330], [0.3819, 0.3839, 0.3831, 0.3966], 21.989),
}
"""A job of 64 GPUs with 4 stages and 32 micro-batches: mean passes of each stage, and the mean time from the first to
the last over 44 steps, s. From trace AR of github.com/ByteDance-Seed/StragglerAnalysis (Apache-2.0), by
``benchmarks/plan_pipeline.py --timeline``."""


@pytest.mark.parametrize("pipeline", TRACE)
def test_a_real_job_takes_as_long(pipeline: str) -> None:
    forward, backward, measured = TRACE[pipeline]
    passes = np.array(forward), np.array(backward)
    for blocking in (False, True):
        costs = StageCosts(*passes, passes[1], passes[1], np.full(3, 1.14e-3), blocking)
        assert evaluate("1f1b", 4, 1, 32, costs).span_s == pytest.approx(measured, rel=0.003)


def test_one_rank_never_waits() -> None:
    step = evaluate("1f1b", 1, 1, 7, even(1))
    assert step.span_s == pytest.approx(21)
    assert step.busy_s == pytest.approx([21])
    assert abs(step.bubble_s[0]) + abs(step.imbalance_s[0]) + abs(step.sends_s[0]) < 1e-12
    assert step.in_flight.tolist() == [[1]]


def test_hidden_messages_delay_and_blocking_ones_take_time() -> None:
    """In a full pipeline a rank in the middle sends twice for each micro-batch, one at an end once."""
    free, hidden, blocking = (
        evaluate("1f1b", 4, 1, 100, costs).span_s for costs in (even(4), even(4, 0.1), even(4, 0.1, blocking=True))
    )
    assert free == pytest.approx(103 * 3)
    assert hidden == pytest.approx(
        free + 100 / 4 * 6 * 0.1, rel=2e-3
    )  # the round trip of 6 messages, every 4 micro-batches
    assert blocking == pytest.approx(free + 100 * 2 * 0.1, rel=3e-3)


def test_the_turn_of_a_v_sends_nothing() -> None:
    costs = even(8)
    there = replace(costs, send_s=np.where(np.arange(7) == 3, 5.0, 0.0))
    assert evaluate("zbv", 4, 2, 12, there).span_s == evaluate("zbv", 4, 2, 12, costs).span_s


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 4, 1, 3), "cannot keep 4 pipeline ranks busy"),
        (("1f1b", 4, 2, 8), "has 1 chunk on each rank"),
        (("zbv", 4, 1, 8), "has 2 chunks on each rank"),
        (("interleaved_1f1b", 4, 2, 9), "are not 2 equal rounds"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_their_cure(arguments: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        evaluate(*arguments, even(arguments[1] * arguments[2]))
    assert error.value.cure


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages and 2 boundaries, not of 4 stages"):
        evaluate("1f1b", 4, 1, 8, even(3))
    with pytest.raises(ValueError, match="costs of 4 stages and 5 boundaries, not of 4 stages"):
        evaluate("1f1b", 4, 1, 8, replace(even(4), send_s=np.zeros(5)))


def test_no_torch_comes_with_it() -> None:
    code = (
        "import sys, phalanx.plan.pipeline.step_time, phalanx.plan.pipeline.step_time; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
