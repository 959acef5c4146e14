"""Whatever happens on each rank, all decide alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.snapshot_schedule import BUSY, FREE, MEMORY_ONLY, RENEWED, SnapshotSchedule

RANKS = 3
states = st.lists(st.sampled_from([FREE, FREE, MEMORY_ONLY, BUSY, RENEWED]), min_size=RANKS, max_size=RANKS)


@given(
    every_steps=st.integers(0, 4),
    memory_every_steps=st.integers(0, 3),
    every_s=st.sampled_from([0.0, 0.0, 2.5]),
    course=st.lists(st.tuples(states, st.floats(0.1, 3.0)), max_size=20),
)
def test_all_ranks_decide_alike(
    every_steps: int, memory_every_steps: int, every_s: float, course: list[tuple[list[int], float]]
) -> None:
    config = CheckpointConfig(every_steps=every_steps, memory_every_steps=memory_every_steps, every_s=every_s)
    clock = [0.0] * RANKS
    schedules = [
        SnapshotSchedule(config, AutoInterval(config), decides=rank == 0, clock=lambda rank=rank: clock[rank])  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    for schedule in schedules:
        schedule.begin(0)
    for step, (told, seconds) in enumerate(course, 1):
        for rank in range(RANKS):
            clock[rank] += seconds * (1 + rank)  # every rank has a clock of its own
        asks = {schedule.needs_agreement(step) for schedule in schedules}
        assert len(asks) == 1
        if not asks.pop():
            continue
        agreed = max(schedule.vote(step, state) for schedule, state in zip(schedules, told, strict=True))
        decisions = {schedule.decide(step, agreed)[:2] for schedule in schedules}
        [(take, persist)] = decisions
        assert take or not persist
        assert not take or max(told) <= MEMORY_ONLY
        assert not persist or max(told) == FREE
        if take:
            for schedule in schedules:
                schedule.note_taken(step, persist=persist)


def test_durable_ones_skipped_for_good_are_counted() -> None:
    config = CheckpointConfig(every_steps=10)
    schedule = SnapshotSchedule(config, AutoInterval(config), decides=True)
    schedule.begin(5)
    schedule.note_taken(10, persist=True)
    schedule.note_taken(43, persist=True)
    schedule.note_taken(50, persist=True)
    assert schedule.skipped == 2
