"""What if: how long steps would take with other times, by replaying their graph.

The figures of the paper (arXiv 2505.05713, section 3) by their definitions there and in its artifact: the *ideal* time
of a pass is the mean of all of its operation, of a transfer the median; `slowdown` is how much longer steps take than
with ideal times, delays left out of both; a *part* of it (a stage, a column, an operation) keeps its recorded times
while all others are ideal; `contribution` is which share of what is lost goes away when a part becomes ideal.

Beside these, what is lost is split into shares that add up, by taking differences away one after the other:

    recorded --delays--> replayed --lengths--> even --workers--> alike --stages--> flat --transfers--> best

`even`: every pass of a worker takes that worker's mean; `alike`: the median of its stage, by three of four of the ranks
that a worker has; `flat`: with all stages as heavy as their mean; `best`: and all else is ideal. In that order, since
slow workers count into the paper's mean and must not count here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phalanx.detect.stragglers.job_places import JobPlaces
from phalanx.detect.stragglers.replay import Seconds
from phalanx.detect.stragglers.span_columns import BACKWARD, FORWARD, Flags, Numbers
from phalanx.detect.stragglers.step_graph import StepGraph

_AT_ONCE_CELLS = 1 << 24
"""Nodes times scenarios that are replayed at once: 128 MB, and as much again."""

_TOP_SHARE = 0.03
_MOST_COLUMNS = 64
_MOST_WORKERS = 16
"""Scenarios of columns and of single workers: of larger jobs those that compute longest."""


class Contribution(NamedTuple):
    """What a part does to the time of a step (seconds), and as shares of what is lost.

    Attributes:
        trem, tadd: the step with the part ideal, and with the part alone as recorded.
        rem, add: shares of what is lost that go away, and that the part alone brings.
    """

    trem: float
    tadd: float
    rem: float
    add: float


@dataclass(frozen=True)
class WhatIf:
    """Seconds by step, and by step and part.

    Attributes:
        steps: numbers.
        recorded_s: as it was; `replayed_s` without delays; `even_s`, `alike_s`, `flat_s`, `best_s`, `ideal_s`:
            see the module.
        by_stage_s, by_column_s, by_operation_s: all ideal but this part; NaN: not replayed.
        without_s: by worker, replayed with its passes as the median of its stage; NaN: not replayed.
        alone_s: by worker, as if its passes alone were longer than the median of their stage; NaN: not replayed.
        operations: names of `by_operation_s`.
    """

    steps: Numbers
    recorded_s: Seconds
    replayed_s: Seconds
    even_s: Seconds
    alike_s: Seconds
    flat_s: Seconds
    best_s: Seconds
    ideal_s: Seconds
    by_stage_s: Seconds
    by_column_s: Seconds
    by_operation_s: Seconds
    without_s: Seconds
    alone_s: Seconds
    operations: tuple[str, ...]

    @property
    def slowdown(self) -> float:
        """S of the paper."""
        return float(self.replayed_s.mean() / self.ideal_s.mean())

    @property
    def launch_slowdown(self) -> float:
        """What delays between operations cost: recorded over replayed."""
        return float(self.recorded_s.mean() / self.replayed_s.mean())

    def part_slowdowns(self, parts_s: Seconds) -> Seconds:
        """Of `by_stage_s` and its like: S of each part."""
        found: Seconds = parts_s.mean(axis=0) / self.ideal_s.mean()
        return found


class Replayer:
    """Replays of one graph."""

    def __init__(self, graph: StepGraph, places: JobPlaces) -> None:
        self.graph, self.places = graph, places
        operations = graph.operations
        self.durations = operations.duration_s
        self.stage = places.worker_stage[operations.worker]
        self.column = places.worker_column[operations.worker]
        self.ideal = self._ideal()
        is_pass = np.isin(operations.kind, (FORWARD, BACKWARD))
        own = operations.alike * places.workers + operations.worker
        means = _by_group(np.mean, self.durations, own, is_pass)
        self.even = np.where(is_pass, means, self.durations)
        of_stage = operations.alike * places.stages + self.stage
        usual = _by_group(np.mean, operations.usual_s, own, is_pass)
        medians = _stage_medians(usual, own, of_stage, is_pass)
        self.alike = np.where(is_pass, medians, self.durations)
        sums = np.bincount(self.stage[is_pass], self.alike[is_pass], places.stages)
        totals = sums / np.maximum(np.bincount(places.worker_stage, minlength=places.stages), 1)
        self.flat = np.where(is_pass, self.alike * (totals.mean() / np.maximum(totals, 1e-12))[self.stage], self.alike)
        self.is_pass = is_pass

    def step_times(self, scenarios: Sequence[Seconds]) -> Seconds:
        """Steps by scenarios, each of them durations of all operations."""
        at_once = max(1, _AT_ONCE_CELLS // max(1, self.graph.schedule.nodes))
        found = [
            self.graph.step_times(np.stack(scenarios[low : low + at_once], axis=1))
            for low in range(0, len(scenarios), at_once)
        ]
        return np.concatenate(found, axis=1) if found else np.zeros((len(self.graph.steps), 0))

    def what_if(self, slowest: Sequence[int] = (), without: Sequence[int] = ()) -> WhatIf:
        """All figures.

        Args:
            slowest: workers, the slowest first; where there are many columns, theirs are replayed.
            without: workers to replay without; the first ones.
        """
        graph, places = self.graph, self.places
        best = np.where(self.is_pass, self.flat, self.ideal)
        base = self.step_times([self.durations, self.even, self.alike, self.flat, best, self.ideal])
        names = graph.operations.names
        columns = list(range(places.columns))
        if len(columns) > _MOST_COLUMNS:
            columns = list(dict.fromkeys(int(places.worker_column[one]) for one in slowest))[:_MOST_COLUMNS]
        by_column = np.full((len(graph.steps), places.columns), np.nan)
        by_column[:, columns] = self._only(self.column, columns)
        chosen = list(without[:_MOST_WORKERS])
        without_s, alone_s = np.full((2, len(graph.steps), places.workers), np.nan)
        without_s[:, chosen] = self.step_times([self._alike_of([one]) for one in chosen])
        of_worker = graph.operations.worker
        alone_s[:, chosen] = self.step_times([np.where(of_worker == one, self.even, self.alike) for one in chosen])
        return WhatIf(
            steps=graph.steps,
            recorded_s=graph.recorded_s,
            replayed_s=base[:, 0],
            even_s=base[:, 1],
            alike_s=base[:, 2],
            flat_s=base[:, 3],
            best_s=base[:, 4],
            ideal_s=base[:, 5],
            by_stage_s=self._only(self.stage, range(places.stages)),
            by_column_s=by_column,
            by_operation_s=self._only(graph.operations.operation, range(len(names))),
            without_s=without_s,
            alone_s=alone_s,
            operations=names,
        )

    def without(self, workers: Sequence[int]) -> Seconds:
        """Steps with the passes of these workers as long as the median of their stage."""
        return self.step_times([self._alike_of(workers)])[:, 0]

    def _alike_of(self, workers: Sequence[int]) -> Seconds:
        chosen = self.is_pass & np.isin(self.graph.operations.worker, workers)
        return np.where(chosen, np.minimum(self.alike, self.durations), self.durations)

    def contributions(self, what_if: WhatIf, parts: Sequence[Flags]) -> list[Contribution]:
        """What chosen operations do to steps, for each choice."""
        durations, ideal = self.durations, self.ideal
        scenarios = [np.where(part, ideal, durations) for part in parts]
        scenarios += [np.where(part, durations, ideal) for part in parts]
        means = self.step_times(scenarios).mean(axis=0).tolist()
        original, best = float(what_if.replayed_s.mean()), float(what_if.ideal_s.mean())
        lost = max(original - best, 1e-12)
        pairs = zip(means[: len(parts)], means[len(parts) :], strict=True)
        return [
            Contribution(removed, added, (original - removed) / lost, (added - best) / lost) for removed, added in pairs
        ]

    def published_contributions(self, what_if: WhatIf) -> tuple[Contribution, Contribution]:
        """Of the slowest 3 % of workers, and of the last stage: M_W and M_S of the paper are their `rem`."""
        scores = worker_slowdowns(what_if, self.places)
        count = math.ceil(len(scores) * _TOP_SHARE)
        top = np.argsort(-np.nan_to_num(scores), kind="stable")[:count]
        parts = [np.isin(self.graph.operations.worker, top), self.stage == self.places.stages - 1]
        workers, stage = self.contributions(what_if, parts)
        return workers, stage

    def _only(self, part: Numbers, values: Sequence[int]) -> Seconds:
        """Steps by values: what is of that value as recorded, all else ideal."""
        found = np.zeros((len(self.graph.steps), len(values)))
        at_once = max(1, _AT_ONCE_CELLS // max(1, self.graph.schedule.nodes))
        for low in range(0, len(values), at_once):
            some = np.array(values[low : low + at_once])
            is_of = part[:, None] == some[None, :]
            durations = np.where(is_of, self.durations[:, None], self.ideal[:, None])
            found[:, low : low + at_once] = self.graph.step_times(durations)
        return found

    def _ideal(self) -> Seconds:
        operations = self.graph.operations
        is_compute = operations.is_compute
        means = _by_group(np.mean, self.durations, operations.alike, is_compute)
        return np.where(is_compute, means, _by_group(np.median, self.durations, operations.alike, ~is_compute))


def worker_slowdowns(what_if: WhatIf, places: JobPlaces) -> Seconds:
    """S of each worker as the paper bounds it: the smaller one of its stage's and its column's."""
    stages, columns = what_if.part_slowdowns(what_if.by_stage_s), what_if.part_slowdowns(what_if.by_column_s)
    found: Seconds = np.minimum(stages[places.worker_stage], columns[places.worker_column])
    return found


def _by_group(of: object, values: Seconds, groups: Numbers, chosen: Flags) -> Seconds:
    """For each chosen row, the mean or median of the chosen rows of its group; 0 elsewhere."""
    found = np.zeros(len(values))
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return found
    order = rows[np.argsort(groups[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
    counts = np.diff(np.append(begins, len(order)))
    if of is np.mean:
        each = np.add.reduceat(values[order], begins) / counts
    else:
        each = np.array([np.median(part) for part in np.split(values[order], begins[1:])])
    found[order] = np.repeat(each, counts)
    return found


def _stage_medians(means: Seconds, own: Numbers, of_stage: Numbers, chosen: Flags) -> Seconds:
    """By row, the (lower) median over workers of what is alike in its stage."""
    rows = np.flatnonzero(chosen)
    found = np.zeros(len(means))
    if not len(rows):
        return found
    _, first = np.unique(own[rows], return_index=True)
    workers = rows[first]
    order = workers[np.lexsort((means[workers], of_stage[workers]))]
    begins = np.flatnonzero(np.diff(of_stage[order], prepend=-1))
    counts = np.diff(np.append(begins, len(order)))
    medians = means[order][begins + (counts - 1) // 2]
    found[rows] = medians[np.searchsorted(of_stage[order][begins], of_stage[rows])]
    return found
