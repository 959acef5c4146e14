"""Bounds: never above the exact time, and near it for models; closed forms; fewer micro-batches than ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_simulation import SCHEDULES, Case, simulate

from phalanx.core.errors import UserError
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import Table, _rank_actions, placement_of
from phalanx.plan.pipeline.bounds import StagePasses, lower_bound
from phalanx.plan.pipeline.step_time import StageCosts, evaluate, evaluate_few, even_span

SPLITS = ("interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Ends:
    """A layout whose stages are alike but for the first and the last: F, I and W of the middle, the first, the last."""

    schedule: Schedule
    ranks: int
    chunks: int
    micro_batches: int
    passes: tuple[tuple[float, float, float], ...]
    send_s: float
    blocking: bool

    @property
    def bound(self) -> float:
        return float(
            lower_bound(
                self.schedule,
                self.ranks,
                self.chunks,
                self.micro_batches,
                *(
                    StagePasses(f, i, w) if self.schedule in SPLITS else StagePasses(f, i + w)
                    for f, i, w in self.passes
                ),
                self.send_s,
                blocking=self.blocking,
            )
        )

    @property
    def exact(self) -> float:
        """Infinite where it cannot be."""
        stages = self.ranks * self.chunks
        middle, first, last = (np.array(passes) for passes in self.passes)
        parts = np.tile(middle, (stages, 1))
        parts[0] += first - middle
        parts[-1] += last - middle
        forward, by_input, weights = parts.T
        sends = np.full(stages - 1, self.send_s)
        costs = StageCosts(forward, by_input + weights, by_input, weights, sends, self.blocking)
        try:
            return evaluate(self.schedule, self.ranks, self.chunks, self.micro_batches, costs).span_s
        except UserError:
            return float("inf")


@st.composite
def any_ends(draw: st.DrawFn) -> Ends:
    """Any three kinds of stages."""
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 9))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 5))
    seconds = st.floats(0.01, 3.0)
    three = st.tuples(seconds, seconds, seconds)
    middle, first, last = draw(st.tuples(three, three, three))
    passes = (middle, middle if ranks * chunks == 1 else first, last)
    send = draw(st.sampled_from([0.0, 0.05, 0.4, 2.0]))
    return Ends(schedule, ranks, chunks, draw(st.integers(1, 6 * ranks)), passes, send, draw(st.booleans()))


@st.composite
def models(draw: st.DrawFn) -> Ends:
    """What GPT models look like: 96 layers, an embedding and a loss head, messages of at most a tenth of a pass."""
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(2, 12))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 6))
    layer = 96 / ranks / chunks
    backward = draw(st.floats(0.95, 1.3))
    weights = draw(st.floats(0.8, 1.05))
    embedding, head = draw(st.floats(0, 0.2)), draw(st.floats(0, 1.5))
    passes = (
        (layer, backward * layer, weights * layer),
        (layer + embedding, backward * layer + 2 * embedding, weights * layer),
        (layer + head, backward * (layer + head), weights * (layer + head)),
    )
    rounds = draw(st.integers(2 if schedule == "zbv" else 1, 24))
    send = layer * draw(st.sampled_from([0.0, 0.01, 0.1]))
    return Ends(schedule, ranks, chunks, rounds * ranks, passes, send, draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(any_ends())
def test_it_is_never_above_the_exact_time(ends: Ends) -> None:
    assert ends.bound <= ends.exact * (1 + 1e-10)
    assert np.isfinite(ends.bound) == np.isfinite(ends.exact)


@settings(max_examples=100, deadline=None)
@given(models())
def test_it_is_near_the_exact_time_for_models(ends: Ends) -> None:
    most = {"1f1b": 0.012, "interleaved_1f1b": 0.025, "interleaved_zero_bubble": 0.05, "zbv": 0.03}
    assert ends.exact * (1 - most[ends.schedule]) <= ends.bound <= ends.exact * (1 + 1e-10)


@settings(max_examples=100, deadline=None)
@given(any_ends().filter(lambda ends: ends.schedule != "zbv"))
def test_alike_stages_with_free_messages_have_a_closed_form(ends: Ends) -> None:
    """Which the bound meets."""
    alike = Ends(ends.schedule, ends.ranks, ends.chunks, ends.micro_batches, ends.passes[:1] * 3, 0.0, ends.blocking)
    if np.isfinite(alike.exact):
        f, i, w = alike.passes[0]
        parts = (f, i, w) if alike.schedule in SPLITS else (f, i + w)
        span = even_span(alike.schedule, alike.ranks, alike.chunks, alike.micro_batches, *parts)
        assert span == pytest.approx(alike.exact, rel=1e-10)
        assert alike.bound == pytest.approx(span, rel=1e-10)


def test_the_closed_form_is_that_of_the_papers() -> None:
    """Share of the useful time: (p - 1) / (v m) in arXiv 2104.04473; a third of it in 2401.10241 where F = I = W."""
    counts = np.array([8, 16, 64])
    assert even_span("1f1b", 8, 1, counts, 1.0, 2.0) / (3 * counts) - 1 == pytest.approx(7 / counts)
    assert even_span("interleaved_1f1b", 8, 4, counts, 1.0, 2.0) / (12 * counts) - 1 == pytest.approx(7 / counts / 4)
    assert even_span("interleaved_zero_bubble", 8, 1, counts, 1.0, 1.0, 1.0) - 3 * counts == pytest.approx([7] * 3)


def test_arrays_give_what_their_elements_give() -> None:
    ranks, counts = np.array([[1], [2], [4], [8]]), np.array([8, 16, 20])
    layer = StagePasses(1.0 / ranks, 2.0 / ranks)
    table = lower_bound("interleaved_1f1b", ranks, 2, counts, layer, StagePasses(1.1 / ranks, 2.1 / ranks), layer, 0.01)
    assert table.shape == (4, 3)
    for row, rank in enumerate((1, 2, 4, 8)):
        for column, count in enumerate((8, 16, 20)):
            one, first = StagePasses(1.0 / rank, 2.0 / rank), StagePasses(1.1 / rank, 2.1 / rank)
            assert table[row, column] == lower_bound("interleaved_1f1b", rank, 2, count, one, first, one, 0.01)


def test_layouts_that_cannot_be_take_for_ever() -> None:
    one = StagePasses(1.0, 2.0)
    assert lower_bound("1f1b", 4, np.array([1, 2]), 8, one, one, one).tolist() == [33.0, np.inf]
    assert lower_bound("1f1b", 4, 1, np.array([3, 4]), one, one, one).tolist() == [np.inf, 21.0]
    assert lower_bound("zbv", 2, np.array([1, 3]), 8, one, one, one).tolist() == [np.inf, np.inf]
    assert np.isfinite(lower_bound("interleaved_1f1b", 4, 2, np.array([8, 9, 10]), one, one, one)).tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hundreds_of_thousands_take_less_than_a_second_or_two(schedule: Schedule) -> None:
    random = np.random.default_rng(0)
    ranks = random.integers(1, 65, 300_000)
    counts = ranks * random.integers(1, 200, 300_000)
    forward = random.uniform(0.1, 1, 300_000)
    middle, last = StagePasses(forward, 2 * forward), StagePasses(1.3 * forward, 2.6 * forward)
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule, 6)
    begin = time.process_time()
    bounds = lower_bound(schedule, ranks, chunks, counts, middle, middle, last, 0.05 * forward)
    assert time.process_time() - begin < 2  # 0.05 to 0.2 s where nothing else runs
    assert np.isfinite(bounds).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, p - 1))), st.integers(0, 2**32 - 1))
def test_fewer_micro_batches_than_ranks_are_exact_too(sizes: tuple[int, int], seed: int) -> None:
    ranks, count = sizes
    random = np.random.default_rng(seed)
    some = [random.uniform(0.1, 1, ranks) for _ in range(4)]
    costs = StageCosts(*some, random.uniform(0, 0.3, ranks - 1), bool(random.integers(2)))
    placement = placement_of("1f1b", ranks, 1)
    lists = tuple(tuple(_rank_actions("1f1b", placement, rank, count)) for rank in range(ranks))
    table = Table("1f1b", placement, count, lists)
    events = simulate(Case("1f1b", ranks, 1, count, costs), table)
    step = evaluate_few(ranks, count, costs)
    assert step.span_s == pytest.approx(events.span)
    assert step.end_s == pytest.approx([events.ends[row[-1]] for row in lists])
    assert step.busy_s + step.bubble_s + step.imbalance_s + step.sends_s == pytest.approx([step.span_s] * ranks)
    assert step.in_flight[:, 0].tolist() == [min(count, ranks - rank) for rank in range(ranks)]
