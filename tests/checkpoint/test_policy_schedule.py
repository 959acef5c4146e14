"""When a snapshot and when a durable checkpoint is due, and how storage that is too slow for that spaces them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.snapshot_schedule import (
    FREE,
    MEMORY_ONLY,
    Moment,
    SnapshotSchedule,
    StoragePace,
    durable_due,
)

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
    clock_s = iter([0.0, *[100.0] * 9])
    schedule = SnapshotSchedule(config, AutoInterval(config), decides=True, clock=lambda: next(clock_s))
    schedule.begin(5)
    assert schedule.vote(5, FREE) == MEMORY_ONLY
    assert not schedule.decide(5, MEMORY_ONLY).take


def test_snapshots_between_durable_ones() -> None:
    config = CheckpointConfig(every_steps=6, memory_every_steps=4)
    schedule = SnapshotSchedule(config, AutoInterval(config), decides=True, clock=lambda: 0.0)
    schedule.begin(0)
    taken = []
    for step in range(1, 13):
        if schedule.needs_agreement(step):
            assert schedule.decide(step, FREE).take
            taken.append((step, schedule.decide(step, FREE).persist))
            schedule.note_taken(step, persist=taken[-1][1])
    assert taken == [(4, False), (6, True), (8, False), (12, True)]


@given(every=st.integers(1, 50), busy_share=st.floats(0, 0.9), seed=st.integers(0, 10**6))
def test_no_interval_is_lost_however_busy(every: int, busy_share: float, seed: int) -> None:
    draw = random.Random(seed)
    busy = {step for step in range(1, 400) if draw.random() < busy_share}
    begun = taken(CheckpointConfig(every_steps=every), 399, busy=busy)
    for multiple in range(every, 400, every):
        free = next((step for step in range(multiple, 400) if step not in busy), None)
        assert free is None or free in begun


class Disk:
    """Training in steps of a length, on a clock of its own, with storage that takes its time for a checkpoint.

    Args:
        persist_s: of the checkpoint of that number.
    """

    def __init__(self, config: CheckpointConfig, step_s: float, persist_s: Callable[[int], float]) -> None:
        self._now_s, self._step_s, self._persist_s = 0.0, step_s, persist_s
        self.schedule = SnapshotSchedule(config, AutoInterval(config), decides=True, clock=lambda: self._now_s)
        self.schedule.begin(0)
        self._until_s = self._began_s = 0.0
        self._is_busy = False
        self.begun: list[int] = []
        self.told: list[str] = []

    def train(self, steps: int) -> list[int]:
        """Steps whose checkpoints became durable, or were begun."""
        for step in range(1, steps + 1):
            self._now_s += self._step_s
            if self._is_busy and self._now_s >= self._until_s:
                self._is_busy = False
                self.schedule.note_durable(0.0, self._until_s - self._began_s)
                self.told += filter(None, [self.schedule.pace.new_explanation()])
            if not self.schedule.needs_agreement(step):
                continue
            state = MEMORY_ONLY if self._is_busy else FREE
            if self.schedule.decide(step, self.schedule.vote(step, state)).persist:
                self.schedule.note_taken(step, persist=True)
                self._is_busy, self._began_s = True, self._now_s
                self._until_s = self._now_s + self._persist_s(len(self.begun))
                self.begun.append(step)
        return self.begun


@given(
    every=st.integers(1, 30),
    memory=st.integers(0, 5),
    persist_steps=st.floats(0.1, 200),
    jitter=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_durable_steps_are_even_however_slow_storage_is(
    every: int, memory: int, persist_steps: float, jitter: float, seed: int
) -> None:
    draw = random.Random(seed)
    took = [persist_steps * (1 + jitter * draw.random() / 10) for _ in range(3000)]
    config = CheckpointConfig(every_steps=every, memory_every_steps=memory)
    begun = Disk(config, 0.25, lambda number: 0.25 * took[number]).train(2000)
    spacings = [later - earlier for earlier, later in pairwise(begun)]
    least, most = max(min(took), 1), max(took)
    assert begun[0] == every
    assert all(spacing >= least for spacing in spacings), "one is written at a time"
    if spacings:
        assert max(spacings) - min(spacings) <= every + (most - least), "even within one due interval"
        assert max(spacings) <= max(every, math.ceil(most) + every), "none is left out for which there was time"
    # Nothing drifts: what is due at a multiple is not put off by what came late before it.
    if most <= 1:
        assert begun == list(range(every, 2001, every))
    assert begun[-1] > 2000 - max(every, math.ceil(most)) - every, "the last one is not left out"


def test_what_storage_keeps_up_with_is_said_once() -> None:
    config = CheckpointConfig(every_steps=5)
    disk = Disk(config, 0.22, lambda number: 4.1)
    begun = disk.train(200)
    assert [later - earlier for earlier, later in pairwise(begun)] == [19] * (len(begun) - 1)
    line = "a checkpoint takes 4.1s; every_steps = 5 asks for one every 1.1s: about every 19th step becomes durable"
    assert disk.told == [line] == [disk.schedule.pace.explanation]


def test_a_last_step_that_is_tried_again_is_one() -> None:
    pace = StoragePace(CheckpointConfig(every_steps=5))
    for clock_s in range(5):
        pace.note_begun(Moment(3, float(clock_s)))
        pace.note_durable(1.0)
    assert pace.new_explanation() == pace.explanation == ""


def test_it_is_said_again_when_storage_becomes_much_slower_and_not_when_it_keeps_up() -> None:
    config = CheckpointConfig(every_steps=5)
    took_s = [0.5] * 10 + [4.0] * 10 + [16.0] * 10
    disk = Disk(config, 0.2, lambda number: took_s[number] if number < len(took_s) else 0.5)
    begun = disk.train(4000)
    assert [line.partition(";")[0] for line in disk.told] == ["a checkpoint takes 4.0s", "a checkpoint takes 16.0s"]
    assert disk.schedule.pace.explanation == ""
    assert begun[-200:] == list(range(4000 - 199 * 5, 4001, 5))


def test_seconds_that_storage_does_not_keep_up_with() -> None:
    disk = Disk(CheckpointConfig(every_steps=0, every_s=2.0), 0.5, lambda number: 9.9)
    disk.train(200)
    [line] = disk.told
    assert line == "a checkpoint takes 9.9s; every_s = 2 asks for one every 2.0s: about every 20th step becomes durable"


@pytest.mark.parametrize("settings", [{"every_steps": 0}, {"every_steps": 0, "auto": True}, {"every_steps": 5}])
def test_nothing_is_said_where_nothing_is_late(settings: dict[str, Any]) -> None:
    disk = Disk(CheckpointConfig(**settings), 0.2, lambda number: 0.9)
    disk.train(500)
    assert disk.told == [] and disk.schedule.pace.explanation == ""
