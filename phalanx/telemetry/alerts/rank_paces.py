"""How long each rank of a run computes beside those that do the same, from its spans as they come.

Compared is a rank's own time of a step: forward and backward, without waiting inside them, by the median of ranks of
the same pipeline stage and the same experts in that step. So neither a stage that is heavier blames anybody, nor a long
batch, a machine that is busy all over, an evaluation or a checkpoint. What is slow for a moment only is told apart by
parts of the window: a slow rank is slow in each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from phalanx.telemetry.alerts.alert_rules import RankPace
from phalanx.telemetry.alike_ranks import LEAST_RANKS, groups_of, work_of_ranks
from phalanx.telemetry.span_store import sums
from phalanx.telemetry.span_tail import SpanTail

EVERY_S = 2.0
PARTS = 4
LEAST_STEPS = 12
FIRST_STEPS = 5
"""Of a start, which compile and fill caches, on one rank longer than on another."""

_SHARE_OF_TIME = 0.02  # a look costs no more than this: where it takes long, looks are rare
_OTHERS_KNOWN = 0.5  # of the ranks seen so far; a step of fewer says nothing
_ROW = np.dtype(
    [("step", "i8"), ("end_ns", "i8"), ("rank", "i4"), ("peers", "i4"), ("own_ns", "f4"), ("usual_ns", "f4")]
)

Rows = NDArray[Any]


class RankPaces:
    """Of a run that goes on; for one thread.

    Args:
        telemetry: of the run; it need not be there yet.
        for_s: length of the window that is compared; where a step takes long, `LEAST_STEPS` steps.
        excess: how much longer than its peers counts as slow, for the share of steps; 0.1 is 10 %.
        since_s: steps that ended before are of earlier starts, seconds since 1970.
    """

    def __init__(
        self,
        telemetry: Path,
        for_s: float,
        excess: float,
        since_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry, self._for_s, self._excess, self._clock = telemetry, for_s, excess, clock
        self.every_s = EVERY_S
        """Between two looks that read, at least."""
        self._since_ns = int(since_s * 1e9)
        self._tail: SpanTail | None = None
        self._attempt = -1
        self._first_step = 0
        self._rows: Rows = np.empty(0, _ROW)
        self._hosts: dict[int, str] = {}
        self._work: dict[int, tuple[int, int]] = {}
        self._next_s = float("-inf")
        self._paces: tuple[RankPace, ...] = ()

    def look(self) -> tuple[RankPace, ...]:
        """Each rank that can be compared, over the newest window; empty: there is too little yet.

        Every call may be the one that reads what is new; most return what was found before.
        """
        began_s = self._clock()
        if began_s < self._next_s or not self._telemetry.is_dir():
            return self._paces
        with suppress(OSError, ValueError, KeyError, pa.ArrowException):  # damaged, or just moved: the next look has it
            self._read()
        self._next_s = began_s + max(self.every_s, (self._clock() - began_s) / _SHARE_OF_TIME)
        return self._paces

    def _read(self) -> None:
        if self._tail is None:
            self._tail = SpanTail(self._telemetry)
        spans = self._tail.new_steps()
        if spans is None:
            return
        steps = sums(spans)[1]
        steps = steps.filter(pa.array(steps["end_ns"].to_numpy() >= self._since_ns))
        if not len(steps):
            return
        if self._tail.attempt != self._attempt:
            self._attempt, self._first_step = self._tail.attempt, int(steps["step"].to_numpy().min())
            self._rows, self._hosts, self._paces = self._rows[:0], {}, ()
            self._work = work_of_ranks(groups_of(self._telemetry))
        self._rows = self._newest(np.concatenate([self._rows, self._compared(steps)]))
        self._paces = self._judged(self._rows)

    def _compared(self, steps: pa.Table) -> Rows:
        """Rows of ranks that have peers, with what is usual for these in that step."""
        rank, step = steps["rank"].to_numpy(), steps["step"].to_numpy()
        hosts = steps["host"].to_pylist()
        self._hosts.update(zip(rank.tolist(), hosts, strict=True))
        own_ns = (steps["forward_ns"].to_numpy() + steps["backward_ns"].to_numpy()).astype(np.float64)
        works = sorted(set(self._work.values()))
        numbers = {rank: works.index(work) + 1 for rank, work in self._work.items()}
        kind = np.array([numbers.get(one, 0) for one in rank.tolist()], np.int64)
        usual_ns, peers, _ = _medians(step * (len(works) + 1) + kind, own_ns)
        rows = np.empty(len(steps), _ROW)
        for name, column in (("step", step), ("rank", rank), ("end_ns", steps["end_ns"].to_numpy()), ("peers", peers),
                             ("own_ns", own_ns), ("usual_ns", usual_ns)):  # fmt: skip
            rows[name] = column
        compared: Rows = rows[(peers >= LEAST_RANKS) & (usual_ns > 0) & (step >= self._first_step + FIRST_STEPS)]
        return compared

    def _newest(self, rows: Rows) -> Rows:
        """What the window holds, and no more."""
        steps, first = np.unique(rows["step"], return_index=True)
        if not len(steps):
            return rows
        ends_ns = rows["end_ns"][first]
        before = int(np.searchsorted(ends_ns, ends_ns[-1] - self._for_s * 1e9, side="right")) - 1
        newest: Rows = rows[rows["step"] >= steps[max(0, min(before, len(steps) - LEAST_STEPS))]]
        return newest

    def _judged(self, rows: Rows) -> tuple[RankPace, ...]:
        steps = np.unique(rows["step"])
        seconds = float(np.ptp(rows["end_ns"])) * 1e-9 if len(rows) else 0.0
        if len(steps) < LEAST_STEPS or seconds < self._for_s:
            return ()
        ratio = (rows["own_ns"] / rows["usual_ns"]).astype(np.float64)
        part = np.searchsorted(steps, rows["step"]) * PARTS // len(steps)
        in_part, count, first = _medians(rows["rank"].astype(np.int64) * PARTS + part, ratio)
        least: dict[int, float] = {}
        parts: dict[int, int] = {}
        for at in first.tolist():
            if count[at] * PARTS >= len(steps) * _OTHERS_KNOWN:
                rank = int(rows["rank"][at])
                least[rank] = min(least.get(rank, float("inf")), float(in_part[at]))
                parts[rank] = parts.get(rank, 0) + 1
        of_rank = rows["rank"].astype(np.int64)
        whole, count, first = _medians(of_rank, ratio)
        own_ns, usual_ns = _medians(of_rank, rows["own_ns"])[0], _medians(of_rank, rows["usual_ns"])[0]
        slow = np.bincount(of_rank, ratio > 1 + self._excess / 2)
        return tuple(
            RankPace(
                rank=rank,
                host=self._hosts.get(rank, ""),
                stage=self._work.get(rank, (0, 0))[0],
                expert=self._work.get(rank, (0, 0))[1],
                peers=int(rows["peers"][at]) - 1,
                steps=int(count[at]),
                first_step=int(steps[0]),
                last_step=int(steps[-1]),
                seconds=seconds,
                own_s=float(own_ns[at]) * 1e-9,
                peers_s=float(usual_ns[at]) * 1e-9,
                excess=float(whole[at]) - 1,
                least_excess=least[rank] - 1,
                slow_share=float(slow[rank]) / int(count[at]),
            )
            for at in first.tolist()
            if parts.get(rank := int(rows["rank"][at])) == PARTS
        )


def _medians(
    keys: NDArray[np.int64], values: NDArray[np.floating]
) -> tuple[NDArray[np.floating], NDArray[np.int64], NDArray[np.int64]]:
    """For each row the lower median of the values that have its key, and how many these are; and a row of each key.

    The lower one: where two of four ranks are slow, the other two are what is usual.
    """
    order = np.lexsort((values, keys))
    begins = np.flatnonzero(np.diff(keys[order], prepend=keys[order][:1] - 1))
    counts = np.diff(begins, append=len(keys))
    medians, numbers = np.empty(len(keys)), np.empty(len(keys), np.int64)
    medians[order] = np.repeat(values[order][begins + (counts - 1) // 2], counts)
    numbers[order] = np.repeat(counts, counts)
    return medians, numbers, order[begins]
