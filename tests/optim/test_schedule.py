"""Learning rate and batch size at their corners."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.optim.config import BatchWarmupConfig, ScheduleConfig
from phalanx.optim.schedule import batch_size, lr_factor, samples_before, steps_for_samples


def test_warmup_is_linear_and_ends_at_one() -> None:
    config = ScheduleConfig(warmup_steps=4)
    assert [lr_factor(config, step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_nanogpts() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=10, min_ratio=0.1)
    for step in (10, 37, 99, 110):
        done = (step - 10) / 100
        assert lr_factor(config, step, 110) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def test_linear_goes_straight_to_the_least() -> None:
    config = ScheduleConfig(kind="linear", warmup_steps=0, min_ratio=0.0)
    assert [lr_factor(config, step, 4) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_wsd_is_stable_then_decays(shape: str, middle: float) -> None:
    config = ScheduleConfig(kind="wsd", warmup_steps=10, min_ratio=0.0, decay_fraction=0.2, decay_shape=shape)  # type: ignore[arg-type]
    assert {lr_factor(config, step, 100) for step in range(9, 81)} == {1.0}
    assert lr_factor(config, 90, 100) == pytest.approx(middle)
    assert lr_factor(config, 100, 100) == 0.0


def test_constant_stays_and_a_run_of_one_step_works() -> None:
    assert lr_factor(ScheduleConfig(kind="constant", warmup_steps=0), 10**9, 10) == 1.0
    assert lr_factor(ScheduleConfig(), 0, 1) == 1.0


def test_warmup_by_share_of_the_run() -> None:
    assert lr_factor(ScheduleConfig(warmup_fraction=0.1), 4, 100) == 0.5


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"warmup_steps = 20: does not fit a run of 10 steps"):
        lr_factor(ScheduleConfig(warmup_steps=20), 0, 10)
    with pytest.raises(UserError, match="decay of 5 steps"):
        lr_factor(ScheduleConfig(kind="wsd", warmup_steps=6, decay_fraction=0.5), 0, 10)


@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    st.integers(1, 500),
    st.floats(0, 0.5),
    st.floats(0, 1),
    st.integers(0, 600),
)
def test_factors_lie_between_zero_and_one_and_fall_after_the_warmup(
    kind: str, total: int, warmup: float, least: float, step: int
) -> None:
    config = ScheduleConfig(kind=kind, warmup_fraction=warmup, min_ratio=least, decay_fraction=0.3)  # type: ignore[arg-type]
    now, then = lr_factor(config, step, total), lr_factor(config, step + 1, total)
    assert 0 <= now <= 1
    if step >= round(warmup * total):
        assert now >= then - 1e-12 and then >= least - 1e-12


def test_the_batch_grows_by_steps() -> None:
    config = BatchWarmupConfig(start=8, increment=8, every_steps=2)
    assert [batch_size(config, step, 20) for step in range(6)] == [8, 8, 16, 16, 20, 20]


def test_the_batch_grows_by_samples() -> None:
    config = BatchWarmupConfig(start=4, increment=4, every_samples=10)
    assert [batch_size(config, step, 12) for step in range(7)] == [4, 4, 4, 8, 8, 12, 12]


def test_without_warmup_the_batch_is_full() -> None:
    assert batch_size(BatchWarmupConfig(), 0, 12) == 12
    assert steps_for_samples(BatchWarmupConfig(), 25, 12) == 3
    assert batch_size(BatchWarmupConfig(start=12, increment=1, every_steps=5), 0, 12) == 12


def test_a_start_above_the_full_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch_warmup.start = 16: is more than the full batch of 12"):
        batch_size(BatchWarmupConfig(start=16, increment=1, every_steps=5), 0, 12)


@given(
    st.integers(0, 40), st.integers(1, 16), st.integers(1, 7), st.booleans(), st.integers(0, 60), st.integers(0, 900)
)
def test_sums_agree_with_counting(start: int, inc: int, every: int, by_steps: bool, step: int, samples: int) -> None:
    growth = {"every_steps": every} if by_steps else {"every_samples": every * 9}
    config = BatchWarmupConfig(start=start, increment=inc, **growth) if start else BatchWarmupConfig()
    sizes = [batch_size(config, s, 40) for s in range(1000)]
    assert samples_before(config, step, 40) == sum(sizes[:step])
    needed = steps_for_samples(config, samples, 40)
    assert sum(sizes[:needed]) >= samples
    assert needed == 0 or sum(sizes[: needed - 1]) < samples
