"""A pipeline's step one action after the other, as the tables have it; and random costs to run it with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import Action, Table, make_table
from phalanx.plan.pipeline.step_time import StageCosts

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Case:
    """One step to time."""

    schedule: Schedule
    ranks: int
    chunks: int
    micro_batches: int
    costs: StageCosts


@dataclass
class Events:
    """When each action of a table begins and ends, and when its rank is free again."""

    table: Table
    begins: dict[Action, float]
    ends: dict[Action, float]

    @property
    def span(self) -> float:
        return max(self.ends.values())


def sending(table: Table, action: Action, costs: StageCosts) -> float:
    """How long what `action` makes is on its way."""
    stage, kind, _ = action
    other = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= other < table.placement.stages:
        return 0.0
    if table.placement.rank_of(other) == table.placement.rank_of(stage):
        return 0.0
    return float(costs.send_s[min(stage, other)])


def duration(action: Action, costs: StageCosts) -> float:
    parts = {
        "F": costs.forward_s,
        "B": costs.backward_s,
        "I": costs.backward_input_s,
        "W": costs.backward_weight_s,
    }
    return float(parts[action.kind][action.stage])


def simulate(case: Case, table: Table | None = None) -> Events:
    """Each rank in turn does its actions as far as it can, those of `table` instead of its own."""
    table = table or make_table(case.schedule, case.ranks, case.chunks, case.micro_batches)
    events = Events(table, {}, {})
    free = defaultdict(float)
    left = {rank: list(row) for rank, row in enumerate(table.actions)}
    while any(left.values()):
        for rank, row in left.items():
            while row and (ready := _ready(table, row[0], case.costs, events.ends)) is not None:
                action = row.pop(0)
                events.begins[action] = max(free[rank], ready)
                events.ends[action] = events.begins[action] + duration(action, case.costs)
                sent = sending(table, action, case.costs)
                free[rank] = events.ends[action] + (sent if case.costs.blocking else 0.0)
    return events


def _ready(table: Table, action: Action, costs: StageCosts, ends: dict[Action, float]) -> float | None:
    """When what `action` needs is on its rank; None while it has not been made."""
    stage, kind, micro_batch = action
    if kind == "F":
        needed = Action(stage - 1, "F", micro_batch) if stage else None
    elif kind == "W":
        needed = Action(stage, "I", micro_batch)
    elif stage == table.placement.stages - 1:
        needed = Action(stage, "F", micro_batch)
    else:
        needed = Action(stage + 1, kind, micro_batch)
    if needed is None:
        return 0.0
    travel = sending(table, needed, costs) if needed.stage != stage else 0.0
    return ends[needed] + travel if needed in ends else None


@st.composite
def cases(draw: st.DrawFn, schedules: tuple[Schedule, ...] = SCHEDULES, most_ranks: int = 8) -> Case:
    """Steps of all schedules: stages alike, nearly alike, of whole numbers, of any length; messages of any length."""
    schedule = draw(st.sampled_from(schedules))
    ranks = draw(st.integers(1, most_ranks))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or draw(st.integers(1, 4))
    micro_batches = draw(_counts(schedule, ranks))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from(["none", "little", "whole", "wide"]))
    scale = draw(st.sampled_from([1.0, 3e-3]))
    stages = ranks * chunks

    def some(count: int) -> np.ndarray:
        values = {
            "none": lambda: np.full(count, random.uniform(0.5, 2.0)),
            "little": lambda: random.uniform(0.5, 2.0) * random.uniform(0.97, 1.03, count),
            "whole": lambda: random.integers(1, 4, count).astype(float),
            "wide": lambda: np.exp(1.5 * random.standard_normal(count)),
        }
        return scale * values[spread]()

    sends = draw(st.sampled_from([0.0, 0.03, 0.3, 2.0])) * some(stages - 1)
    costs = StageCosts(some(stages), some(stages), some(stages), some(stages), sends, draw(st.booleans()))
    return Case(schedule, ranks, chunks, micro_batches, costs)


@st.composite
def _counts(draw: st.DrawFn, schedule: Schedule, ranks: int) -> int:
    """Micro-batches that fit: some a few rounds of an odd length, some many rounds."""
    if not schedule.startswith("interleaved"):
        return draw(st.integers(ranks, 8 * ranks))
    rounds = draw(st.integers(1, 8))
    return rounds * draw(st.integers(ranks, max(ranks, (ranks * (rounds + 1) - 1) // rounds)))
