"""The ``auto`` interval as measurements come: it settles, does not flap, and outlives a restart."""

from __future__ import annotations

import json
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval, adapted

AUTO = CheckpointConfig(auto=True, every_steps=0, mtbf_hours=8.0)


def run(interval: AutoInterval, checkpoints: int, *, stall_s: float, persist_s: float, noise: float = 0.0) -> list[int]:
    draw = random.Random(1)

    def about(value: float) -> float:
        return value * (1 + draw.uniform(-noise, noise))

    steps = []
    for _ in range(checkpoints):
        interval.note_step(about(0.5))
        interval.note_stall(about(stall_s))
        interval.note_durable(about(persist_s))
        steps.append(interval.steps)
    return steps


def test_nothing_without_auto() -> None:
    interval = AutoInterval(CheckpointConfig())
    assert run(interval, 3, stall_s=1.0, persist_s=1.0) == [0, 0, 0]
    assert interval.explanation == ""


def test_the_first_is_taken_early_to_measure() -> None:
    interval = AutoInterval(AUTO)
    assert interval.steps == 0
    interval.note_step(0.5)
    assert interval.steps == 120
    assert interval.explanation == "the first after 120 steps (about 1m00s), to measure what one costs"


def test_it_does_not_flap() -> None:
    steps = run(AutoInterval(AUTO), 200, stall_s=1.0, persist_s=20.0, noise=0.3)[15:]
    assert sum(a != b for a, b in pairwise(steps)) <= 2


def test_it_follows_when_storage_becomes_slow_but_not_at_once() -> None:
    interval = AutoInterval(AUTO)
    before = run(interval, 20, stall_s=0.03, persist_s=10.0)[-1]
    after = run(interval, 40, stall_s=0.03, persist_s=200.0)
    assert before < 100
    assert abs(after[-1] - 400) <= 100
    changes = [b / a for a, b in pairwise([before, *after])]
    assert max(changes) <= 2.0
    assert interval.explanation.startswith(f"every {after[-1]} steps")
    assert interval.expected_durable_s == 200.03


def test_it_outlives_a_restart_and_counts_failures_only() -> None:
    config = AUTO.model_copy(update={"mtbf_hours": 0.0})
    interval = AutoInterval(config)
    steps = run(interval, 30, stall_s=5.0, persist_s=20.0)[-1]
    state = json.loads(json.dumps(interval.to_json()))
    assert AutoInterval(config, state=state).steps == steps
    again = AutoInterval(config, state=state, failed=True)
    assert again.to_json()["failures"] == 1
    assert "1 seen" in again.explanation
    assert again.steps < steps


@given(now=st.integers(1, 10**6), wanted=st.integers(1, 10**6))
def test_a_change_is_bounded_and_goes_the_right_way(now: int, wanted: int) -> None:
    new = adapted(now, wanted)
    assert new >= 1
    assert now / 2 - 1 < new <= 2 * now
    assert min(now, wanted) <= new <= max(now, wanted)


@given(now=st.integers(1, 10**6), wanted=st.integers(1, 10**6))
def test_it_comes_near(now: int, wanted: int) -> None:
    for _ in range(40):
        now = adapted(now, wanted)
    assert now == wanted or max(now / wanted, wanted / now) < 1.25
