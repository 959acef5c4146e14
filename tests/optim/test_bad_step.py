"""The bad-step judge against a reference in NumPy, and its counters, limits and state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.config import BadStepConfig


def judge(judge: BadStepJudge, loss: float, norm: float = 1.0) -> bool:
    verdict = judge.judge(torch.tensor(loss), torch.tensor(norm))
    assert verdict.dtype == torch.float32 and verdict.shape == ()
    return bool(verdict.item())


class Reference:
    """The policy, written plainly."""

    def __init__(self, config: BadStepConfig) -> None:
        self.config = config
        self.seen: list[np.ndarray] = []

    def judge(self, loss: float, norm: float) -> bool:
        values = np.array([loss, norm], dtype=np.float64)
        if not np.isfinite(values).all():
            return True
        recent, limit = np.array(self.seen[-self.config.history :]), np.full(2, np.inf)
        if len(recent) >= self.config.min_history and self.config.sigma:
            mean, std = recent.mean(0), recent.std(0, ddof=1)
            limit = mean + self.config.sigma * np.maximum(std, 0.01 * np.abs(mean))
        self.seen.append(np.minimum(values, limit))
        return bool((values > limit).any())


numbers = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0]), st.integers(-64, 640).map(lambda n: n / 64)
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(numbers, numbers), max_size=40),
    st.integers(2, 9),
    st.sampled_from([0.0, 1.7, 3.3]),
)
def test_verdicts_are_the_references(steps: list[tuple[float, float]], history: int, sigma: float) -> None:
    config = BadStepConfig(history=history, min_history=min(4, history), sigma=sigma)
    mine, reference = BadStepJudge(config), Reference(config)
    skipped = in_a_row = 0
    for loss, norm in steps:
        bad = reference.judge(np.float32(loss).item(), np.float32(norm).item())
        assert judge(mine, loss, norm) == bad
        skipped, in_a_row = skipped + bad, in_a_row + 1 if bad else 0
        assert (mine.skipped.item(), mine.state_tensors()["in_a_row"].item()) == (skipped, in_a_row)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_without_a_target_is_left_out_and_nothing_is_learnt_of_it(enabled: bool) -> None:
    mine = BadStepJudge(BadStepConfig(enabled=enabled, history=4, min_history=2))
    yes = torch.tensor(True)
    for loss in (3.0, 3.1, 9.0):
        judge(mine, loss)
    before = {name: tensor.clone() for name, tensor in mine.state_tensors().items()}
    for loss, norm in ((math.nan, 0.0), (2.0, 1.0), (99.0, 1.0)):
        assert mine.judge(torch.tensor(loss), torch.tensor(norm), yes).item() == 1.0
    assert mine.judge(torch.tensor(3.0), torch.tensor(1.0), ~yes).item() == 0.0
    assert before["in_a_row"] == before["skipped"] == enabled
    assert int(mine.untrained) == 3
    after = BadStepJudge(BadStepConfig(enabled=enabled, history=4, min_history=2))
    after.load_state_tensors(before)
    judge(after, 3.0)
    assert all(torch.equal(after.state_tensors()[name], tensor) for name, tensor in mine.state_tensors().items())


def test_a_spike_is_bad_and_a_fall_is_not() -> None:
    mine = BadStepJudge(BadStepConfig(history=16, min_history=8))
    assert not any(judge(mine, 3.0 + 0.1 * (i % 2)) for i in range(12))
    assert judge(mine, 9.0)
    assert judge(mine, 3.0, norm=50.0)
    assert not judge(mine, 0.1)


def test_a_lasting_change_of_level_is_taken_after_a_few_steps() -> None:
    """A run at twice nanoGPT's rate once stood still for good: its gradients had grown, and no step was let through."""
    mine = BadStepJudge(BadStepConfig())
    generator = np.random.default_rng(0)
    for value in generator.normal(1.0, 0.1, 300):
        judge(mine, 2.0, norm=value)
    verdicts = [judge(mine, 2.0, norm=value) for value in generator.normal(4.0, 0.1, 40)]
    assert verdicts[0]
    assert sum(verdicts) < mine._config.max_in_a_row
    assert not any(verdicts[10:])


def test_a_run_that_explodes_is_stopped() -> None:
    mine = BadStepJudge(BadStepConfig())
    for value in np.random.default_rng(0).normal(1.0, 0.1, 300):
        judge(mine, 2.0, norm=value)
    for power in range(10):
        assert judge(mine, 2.0, norm=10.0 * 3.0**power)
    assert mine.hopeless


def test_off_judges_nothing_bad() -> None:
    mine = BadStepJudge(BadStepConfig(enabled=False))
    assert not judge(mine, math.nan)
    assert mine.skipped.item() == 0
    mine.raise_if_hopeless()


def test_too_many_in_a_row_stop_the_run_even_if_the_next_is_good() -> None:
    mine = BadStepJudge(BadStepConfig(max_in_a_row=3))
    for _ in range(2):
        judge(mine, math.nan)
    mine.raise_if_hopeless()
    judge(mine, math.nan)
    judge(mine, 1.0)
    with pytest.raises(UserError, match="3 updates in a row were skipped"):
        mine.raise_if_hopeless()


def test_state_moves_to_another_judge() -> None:
    config = BadStepConfig(history=6, min_history=3)
    first, second = BadStepJudge(config), BadStepJudge(config)
    generator = np.random.default_rng(0)
    for value in generator.normal(3, 0.1, 9):
        judge(first, value)
    second.load_state_tensors({n: t.clone() for n, t in first.state_tensors().items()})
    for value in [*generator.normal(3, 0.2, 20), 4.0, math.nan]:
        assert judge(first, value) == judge(second, value)
    for name, tensor in first.state_tensors().items():
        assert torch.equal(tensor, second.state_tensors()[name])


def test_state_of_another_length_is_refused() -> None:
    state = BadStepJudge(BadStepConfig(history=64)).state_tensors()
    with pytest.raises(UserError, match=r"bad_step\.history"):
        BadStepJudge(BadStepConfig(history=128)).load_state_tensors(state)
