"""Where each rank stands in its job: pipeline stage, column, and the worker that it computes in lockstep with.

A *worker* is what a step consists of: ranks that wait for each other within their passes (tensor-parallel ones, most
often) are one. A *column* is what one micro-batch passes: a worker of each stage, joined by the pipeline. So workers
are a table of stages by columns, and the columns are what data parallelism runs beside each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.telemetry.queries import Trace

Numbers = NDArray[np.int64]

_PIPELINE = "pipeline"


@dataclass(frozen=True)
class JobPlaces:
    """Arrays by the place of a rank in `ranks`.

    Attributes:
        ranks: numbers, ascending.
        hosts: where they are; empty: not known.
        stage: of the pipeline; 0 without one.
        worker: from 0 on, in order of stage and column.
        worker_stage, worker_column: by worker.
        groups: by the group's axes, for each rank the number of its group; -1: in none, or not described.
    """

    ranks: Numbers
    hosts: tuple[str, ...]
    stage: Numbers
    worker: Numbers
    worker_stage: Numbers
    worker_column: Numbers
    groups: Mapping[str, Numbers]

    @property
    def stages(self) -> int:
        """How many."""
        return int(self.worker_stage.max(initial=-1)) + 1

    @property
    def columns(self) -> int:
        """How many run beside each other: the data-parallel size."""
        return int(self.worker_column.max(initial=-1)) + 1

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.worker_stage)

    def members(self, worker: int) -> tuple[int, ...]:
        """Numbers of a worker's ranks."""
        return tuple(int(rank) for rank in self.ranks[self.worker == worker])

    def places_of(self, ranks: Numbers) -> Numbers:
        """The place of each rank in `ranks`; all have to be known."""
        found: Numbers = np.searchsorted(self.ranks, ranks)
        return found

    def same_as(self, other: JobPlaces) -> bool:
        """Whether arrays by rank and worker mean the same."""
        return (
            np.array_equal(self.ranks, other.ranks)
            and np.array_equal(self.worker, other.worker)
            and np.array_equal(self.stage, other.stage)
        )


Groups = Sequence[tuple[str, tuple[int, ...]]]
"""Groups of a job as ``(axes, members)``."""


def read_groups(trace: Trace) -> Groups:
    """What a run's telemetry says about its groups."""
    rows = trace.ask('select distinct "group", ranks from groups', None, None).to_pylist()
    return sorted((row["group"], tuple(row["ranks"])) for row in rows)


def place_ranks(hosts: Mapping[int, str], groups: Groups, lockstep: Collection[str]) -> JobPlaces:
    """Places of ranks, by the groups that they are in.

    Args:
        hosts: of the ranks that have spans.
        groups: of the job; ranks that have no spans may be members.
        lockstep: groups whose members compute in lockstep.
    """
    known = np.array(sorted(hosts), np.int64)
    place = {int(rank): at for at, rank in enumerate(known)}
    stage = np.zeros(len(known), np.int64)
    numbers: dict[str, Numbers] = {}
    alike, beside = _Sets(len(known)), _Sets(len(known))
    is_stage_known = np.zeros(len(known), bool)
    for number, (axes, members) in enumerate(groups):
        inside = [place[rank] for rank in members if rank in place]
        of_rank = numbers.setdefault(axes, np.full(len(known), -1, np.int64))
        of_rank[inside] = number
        if _PIPELINE in axes.split("·"):
            for at, rank in enumerate(members):
                if rank in place and (not is_stage_known[place[rank]] or at < stage[place[rank]]):
                    stage[place[rank]], is_stage_known[place[rank]] = at, True
            beside.join(inside)
        if axes in lockstep:
            alike.join(inside)
            beside.join(inside)
    component = alike.numbers()
    # Lockstep over several stages would be a mistake of the records: the stage tells workers apart in any case.
    _, worker, first = _renumbered(component, stage)
    worker_stage, of_column = stage[first], beside.numbers()[first]
    worker_column = np.zeros(len(first), np.int64)
    for one in range(int(stage.max(initial=0)) + 1):
        own = np.flatnonzero(worker_stage == one)
        worker_column[own[np.argsort(of_column[own], kind="stable")]] = np.arange(len(own))
    order = np.lexsort((worker_column, worker_stage))
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    return JobPlaces(
        known,
        tuple(hosts[int(rank)] for rank in known),
        stage,
        place_of[worker],
        worker_stage[order],
        worker_column[order],
        numbers,
    )


def _renumbered(*columns: Numbers) -> tuple[Numbers, Numbers, NDArray[np.intp]]:
    """Distinct rows of columns, the number of each row among them, and the first row of each."""
    table = np.stack(columns, axis=1)
    rows, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return rows, number.reshape(-1).astype(np.int64), first


class _Sets:
    """Disjoint sets of places (union-find)."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def join(self, places: Sequence[int]) -> None:
        """They are one set."""
        for one in places[1:]:
            a, b = self._root(places[0]), self._root(one)
            self._parent[max(a, b)] = min(a, b)

    def numbers(self) -> Numbers:
        """The lowest place of the set of each."""
        return np.array([self._root(at) for at in range(len(self._parent))], np.int64)

    def _root(self, at: int) -> int:
        while self._parent[at] != at:
            self._parent[at] = self._parent[self._parent[at]]
            at = self._parent[at]
        return at
