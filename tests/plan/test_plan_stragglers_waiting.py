"""Order statistics against published constants and draws; their sum over a step against the exact recurrence."""

from __future__ import annotations

import time

import numpy as np
import pytest

from phalanx.parallel.config import Schedule
from phalanx.plan.overheads import Spread, most_of_normals, pipeline_loss, pipeline_sigma, slowest, waiting
from phalanx.plan.pipeline import grid as grids
from phalanx.plan.pipeline.grid import round_length
from phalanx.plan.pipeline.step_time import _row_by_row, even_span

HARTER = {
    1: 0.0,
    2: 0.56419,
    3: 0.84628,
    5: 1.16296,
    10: 1.53875,
    20: 1.86748,
    50: 2.24907,
    100: 2.50759,
    1000: 3.24144,
}
"""Expected largest of n standard normal numbers (Harter 1961); 1,000: as tabulated since."""


def test_means_are_the_published_ones() -> None:
    for draws, mean in HARTER.items():
        assert float(most_of_normals(draws).mean) == pytest.approx(mean, abs=2e-5)


def test_spreads_are_the_published_ones() -> None:
    """Variances of the largest of 2, 3, 5 and 10: 1 - 1/π, 0.55947, 0.44753, 0.34434 (Teichroew 1956)."""
    for draws, variance in {1: 1.0, 2: 1 - 1 / np.pi, 3: 0.55947, 5: 0.44753, 10: 0.34434}.items():
        assert float(most_of_normals(draws).sigma) ** 2 == pytest.approx(variance, abs=2e-5)


def test_many_at_once_are_each_on_its_own() -> None:
    draws = np.array([[1, 7, 64], [129, 5_000, 100_000]])
    found = most_of_normals(draws)
    assert np.shape(found.mean) == np.shape(found.sigma) == (2, 3)
    for place in np.ndindex(2, 3):
        assert np.asarray(found.mean)[place] == pytest.approx(float(most_of_normals(int(draws[place])).mean))
    assert np.all(np.diff(np.asarray(found.mean).ravel()) > 0)
    assert np.all(np.diff(np.asarray(found.sigma).ravel()) < 0)


@pytest.mark.parametrize(
    "spread",
    [
        Spread(lasting_sigma=0.01),
        Spread(slow_share=0.005, slow_excess=0.1),
        Spread(lasting_sigma=0.01, slow_share=0.005, slow_excess=0.1),
        Spread(lasting_sigma=0.02, slow_share=0.2, slow_excess=0.05),
    ],
)
def test_the_slowest_rank_is_that_of_draws(spread: Spread) -> None:
    random = np.random.default_rng(1)
    draws, sigma = 4000, spread.lasting_sigma
    for hosts in (1, 8, 100):
        times = random.lognormal(-(sigma**2) / 2, sigma, (draws, hosts, 8))
        times *= 1 + spread.slow_excess * (random.random((draws, hosts, 1)) < spread.slow_share)
        drawn, found = times.max(axis=(1, 2)), slowest(spread, 8 * hosts, 8)
        assert found.mean == pytest.approx(drawn.mean(), abs=4 * drawn.std() / np.sqrt(draws) + 2e-5)
        assert found.sigma == pytest.approx(drawn.std(), rel=0.15, abs=1e-5)


def test_slow_hosts_count_unless_they_are_screened_out() -> None:
    spread = Spread(slow_share=0.005, slow_excess=0.1)
    assert slowest(spread, 12_288, 8).mean == pytest.approx(1.1, abs=1e-4)
    assert slowest(spread, 8, 8).mean == pytest.approx(1.0005)
    assert slowest(spread.screened(), 12_288, 8).mean == 1


def test_what_varies_averages_out_and_what_lasts_does_not() -> None:
    def mean(spread: Spread, count: int) -> float:
        return float(waiting(spread, "1f1b", 1, 1, count, 64, 64, 8, 10.0).mean_s)

    varies, lasts = Spread(pass_sigma=0.02), Spread(lasting_sigma=0.02)
    assert mean(varies, 100) == pytest.approx(mean(varies, 1) / 10)
    assert mean(lasts, 100) == pytest.approx(mean(lasts, 1))


def test_ranks_side_by_side_wait_as_draws_do() -> None:
    """Data parallel alone: the largest of 48 sums of 16 passes."""
    random = np.random.default_rng(2)
    spread = Spread(pass_sigma=0.05)
    steps = random.lognormal(-(0.05**2) / 2, 0.05, (4000, 48, 16)).sum(axis=2).max(axis=1)
    found = waiting(spread, "1f1b", 1, 1, 16, 48, 48, 8, 16.0)
    assert found.mean_s == pytest.approx(steps.mean() - 16, rel=0.03)
    assert found.step_sigma_s == pytest.approx(steps.std(), rel=0.1)
    assert found.run_sigma_s == 0


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "rounds"),
    [
        ("1f1b", 1, 1, 12),
        ("1f1b", 2, 1, 16),
        ("1f1b", 4, 1, 4),
        ("1f1b", 8, 1, 16),
        ("interleaved_1f1b", 2, 2, 8),
        ("interleaved_1f1b", 4, 4, 4),
        ("interleaved_1f1b", 8, 6, 2),
        ("interleaved_zero_bubble", 4, 1, 16),
        ("interleaved_zero_bubble", 8, 2, 4),
        ("zbv", 4, 2, 4),
        ("zbv", 8, 2, 8),
    ],
)
def test_a_pipeline_with_varying_passes_takes_what_the_recurrence_says(
    schedule: Schedule, ranks: int, chunks: int, rounds: int
) -> None:
    """In standard deviations of one rank's micro-batch; 200 steps, whose mean is uncertain by 0.07 of their spread."""
    count, draws, sigma = rounds * ranks, 200, 0.01
    spans, even = _random_steps(schedule, ranks, chunks, count, sigma, draws)
    loss, spread = (spans.mean() - even) / (3 * sigma), spans.std() / (3 * sigma)
    found = float(pipeline_loss(schedule, ranks, chunks, count))
    assert found == pytest.approx(loss, rel=0.1, abs=max(1.0, 0.3 * spread))
    assert float(pipeline_sigma(schedule, ranks)) * np.sqrt(count) == pytest.approx(spread, rel=0.35)


def _random_steps(
    schedule: Schedule, ranks: int, chunks: int, count: int, sigma: float, draws: int
) -> tuple[np.ndarray, float]:
    """Steps in which a rank's micro-batch takes 3 with a standard deviation of 3 `sigma`; and an even one."""
    per_round = round_length(schedule, ranks, chunks, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "_enough_rounds", lambda *_: 1 << 40)
        grid = grids._make_grid.__wrapped__(schedule, ranks, chunks, per_round, count // per_round)
    parts = np.array([1.0, 1.0, 1.0] if grid.orders.splits else [1.0, 2.0, 0.0])
    one = sigma * 3 / np.sqrt((parts**2).sum() / chunks)
    means = np.append(np.repeat(parts / chunks, ranks * chunks), 0.0)[grid.head.codes][:, None]
    logs = np.log1p(one**2)
    random = np.random.default_rng(7)
    times = means * np.exp(random.normal(-logs / 2, np.sqrt(logs), (len(means), draws)))
    spans = _spans(grid, times)
    return spans, float(_spans(grid, means)[0])


def _spans(grid: grids.Grid, times: np.ndarray) -> np.ndarray:
    ranks, draws = grid.orders.ranks, times.shape[1]
    none = np.zeros((ranks, draws))
    work = np.cumsum(times.reshape(-1, ranks, draws), axis=0).reshape(-1, draws)
    slack = np.concatenate([none, work])[grid.head.sources] + times - work
    ends = work + _row_by_row(none, grid.head.sources, slack, ranks)
    return ends[grid.ends].max(axis=0)


def test_random_steps_without_spread_are_even_ones() -> None:
    """The tests' own steps are those of the planner."""
    spans, even = _random_steps("interleaved_1f1b", 4, 2, 8, 0.0, 2)
    assert spans == pytest.approx([even] * 2)
    assert even == pytest.approx(even_span("interleaved_1f1b", 4, 2, 8, 0.5, 1.0))


def test_hundreds_of_thousands_of_layouts_and_one_are_fast() -> None:
    spread = Spread(0.01, 0.01, 0.005, 0.1)
    many = np.full(300_000, 8)
    waiting(spread, "1f1b", 8, 1, 32, 192, 12_288, 8, 5.0)  # makes the tables
    begin = time.process_time()
    found = waiting(spread, "interleaved_1f1b", many, 6, 4 * many, 24 * many, 1536 * many, 8, 5.0)
    assert time.process_time() - begin < 1
    begin = time.process_time()
    for _ in range(50):
        waiting(spread, "interleaved_1f1b", 8, 6, 32, 192, 12_288, 8, 5.0)
    assert (time.process_time() - begin) / 50 < 2e-3  # 30 µs where nothing else runs
    assert np.all(np.asarray(found.mean_s) > 0)
