"""When a snapshot and when a durable checkpoint is due."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.policy.due import Moment, durable_due, snapshot_due

BEGIN = Moment(0, 0.0)


def taken(config: CheckpointConfig, steps: int, *, busy: set[int] | None = None, auto_steps: int = 0) -> list[int]:
    """Steps, of a second each, at which durable checkpoints are begun where none can be in the steps `busy`."""
    last, begun = BEGIN, []
    for step in range(1, steps + 1):
        now = Moment(step, float(step))
        if durable_due(config, now, last, auto_steps) and step not in (busy or set()):
            last = now
            begun.append(step)
    return begun


def test_every_steps_is_as_it_was() -> None:
    config = CheckpointConfig(every_steps=7)
    assert taken(config, 30) == [step for step in range(1, 31) if config.due(step)] == [7, 14, 21, 28]


def test_one_that_could_not_be_taken_stays_due_and_the_next_keeps_its_place() -> None:
    assert taken(CheckpointConfig(every_steps=10), 30, busy={10, 11, 12}) == [13, 20, 30]


def test_seconds() -> None:
    assert taken(CheckpointConfig(every_steps=0, every_s=4.0), 12, busy={4}) == [5, 9]


def test_steps_and_seconds_count_side_by_side() -> None:
    assert taken(CheckpointConfig(every_steps=10, every_s=8.0), 20) == [8, 10, 18, 20]


def test_never() -> None:
    assert taken(CheckpointConfig(every_steps=0), 2000, auto_steps=3) == []


def test_auto_and_its_bounds() -> None:
    assert taken(CheckpointConfig(auto=True, every_steps=0), 20, auto_steps=6) == [6, 12, 18]
    assert taken(CheckpointConfig(auto=True, every_steps=8), 20, auto_steps=12) == [8, 16]
    assert taken(CheckpointConfig(auto=True, every_steps=0), 20) == []


def test_no_step_no_checkpoint() -> None:
    config = CheckpointConfig(every_steps=1, every_s=1.0, auto=True, memory_every_steps=1)
    assert not durable_due(config, Moment(5, 100.0), Moment(5, 0.0), 1)
    assert not snapshot_due(config, Moment(5, 100.0), Moment(5, 0.0), Moment(5, 0.0), 1)


def test_snapshots_between_durable_ones() -> None:
    config = CheckpointConfig(every_steps=6, memory_every_steps=4)
    last = last_durable = BEGIN
    told = []
    for step in range(1, 13):
        now = Moment(step, 0.0)
        durable = durable_due(config, now, last_durable)
        if snapshot_due(config, now, last, last_durable):
            last = now
            last_durable = now if durable else last_durable
            told.append((step, durable))
    assert told == [(4, False), (6, True), (8, False), (12, True)]


@given(every=st.integers(1, 50), busy_share=st.floats(0, 0.9), seed=st.integers(0, 10**6))
def test_no_interval_is_lost_however_busy(every: int, busy_share: float, seed: int) -> None:
    draw = random.Random(seed)
    busy = {step for step in range(1, 400) if draw.random() < busy_share}
    begun = taken(CheckpointConfig(every_steps=every), 399, busy=busy)
    for multiple in range(every, 400, every):
        free = next((step for step in range(multiple, 400) if step not in busy), None)
        assert free is None or free in begun
