"""Exactly the best of a set of layouts, by branch and bound: few are predicted, the others are bounded away.

Every layout has a lower bound of its step time. Those that may be among the best are predicted in the order of their
bounds, until the k-th best prediction is no slower than the next bound: no other can be faster. Predictions are kept,
so that asking for the best of many overlapping sets, as a sensitivity does, costs little more than asking once.

Memory is treated alike: what is known of it at first is a bound, too, and only a prediction says that a layout fits.

`Scored` holds the bounds of all layouts. Large spaces are shared by as many processes as there are cores, since NumPy's
work on some thousand layouts at a time is too short for threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.search.space import Group, Mask, SearchSpace
from phalanx.plan.types import Floats, Prediction, Strategy

Bounds = NDArray[np.float64]


# A bound and a prediction are sums in another order: equal ones may differ in the last bits.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Best:
    """The best of a set."""

    places: tuple[int, ...]  # of the best, best first; fewer than asked for where the set is smaller
    lower_s: float  # no layout of the set that is not among them is faster than this, or than the last of them; seconds
    proven: bool  # it is certain that they are the best. It is not where the number of predictions was limited


def memory_bytes(prediction: Prediction) -> float:
    """Of its fullest rank."""
    return max(rank.total for rank in prediction.memory)


class Frontier:
    """All layouts of a space in the order of their lower bounds, and those that were predicted.

    Layouts are known by their place in this order, from 0.

    Attributes:
        lower_s: bounds of step times.
        memory_bytes: bounds of what the fullest rank needs; of predicted layouts, what it does need.
        sound: no prediction was below its bound; else the cost model contradicts itself, and nothing is proven.

    Args:
        budget: predictions that may be made in all.
    """

    def __init__(self, space: SearchSpace, costs: CostModel, budget: int) -> None:
        self.space = space
        self._predict, self._budget = costs.predict, budget
        unsorted = scored(space, costs)
        self._scored = unsorted.at(np.argsort(unsorted.lower_s))
        self.lower_s, self.memory_bytes = self._scored.lower_s, self._scored.memory_bytes
        self._exact_s = np.full(space.count, np.nan)
        self._predictions: dict[int, Prediction] = {}
        self.sound = True

    def __len__(self) -> int:
        return len(self._scored.row)

    @property
    def predicted(self) -> int:
        """Predictions that were made."""
        return len(self._predictions)

    def prediction(self, place: int) -> Prediction:
        """Of one layout, made when it is asked for first."""
        if place not in self._predictions:
            made = self._predict(self.strategy(place))
            nearly, num_bytes = 1 - _ROUNDING, memory_bytes(made)
            self.sound &= bool(
                made.step_s >= self.lower_s[place] * nearly and num_bytes >= self.memory_bytes[place] * nearly
            )
            self._predictions[place], self._exact_s[place] = made, made.step_s
            self.memory_bytes[place] = num_bytes
        return self._predictions[place]

    def strategy(self, place: int) -> Strategy:
        """The layout at `place`."""
        return self.space.strategy(int(self._scored.group[place]), int(self._scored.row[place]))

    def column(self, name: str) -> NDArray[Any]:
        """A number of every layout, such as ``pipeline``, or the index of its value among `values` of a choice."""
        if name in self.space.columns:
            return self.space.columns[name].astype(np.int32)[self._scored.row]
        index = {value: place for place, value in enumerate(self.values(name))}
        of_group = np.array([index[group.settings[name]] for group in self.space.groups], dtype=np.int16)
        return of_group[self._scored.group]

    def values(self, name: str) -> list[Any]:
        """What a number or a choice has anywhere: numbers ascending, choices as they were tried."""
        if name in self.space.columns:
            return [int(value) for value in np.unique(self.space.columns[name])]
        return list(dict.fromkeys(group.settings[name] for group in self.space.groups))

    def best(
        self, among: Mask, count: int = 1, limit_bytes: float = np.inf, max_predictions: int | None = None
    ) -> Best:
        """The `count` layouts of `among` with the shortest predicted steps; of equals, those with less memory.

        Exact, unless the budget ends before; then the best that were found.
        """
        most = self._budget if max_predictions is None else min(self._budget, self.predicted + max_predictions)
        for place in self._doubtful(among, count, limit_bytes):
            if self.predicted >= most:
                return self._found(among, count, limit_bytes, lower_s=float(self.lower_s[place]))
            self.prediction(place)
        return self._found(among, count, limit_bytes)

    def _doubtful(self, among: Mask, count: int, limit_bytes: float) -> Iterator[int]:
        """Layouts that may be among the best and are not predicted yet, those with the lowest bounds first."""
        end = 0
        best = sorted(self._exact_s[self._known(among, limit_bytes)].tolist())[:count]
        # Growing slices: most searches end within the first ones, so that not all layouts need to be filtered.
        while end < len(self):
            begin, end = end, min(max(4 * end, 256), len(self))
            for place in begin + np.flatnonzero(among[begin:end] & (self.memory_bytes[begin:end] <= limit_bytes)):
                slowest = best[-1] if len(best) == count else np.inf
                # Layouts come in the order of their bounds: from here on none can be among the best.
                if self.lower_s[place] * (1 - _ROUNDING) > slowest:
                    return
                if np.isnan(self._exact_s[place]):
                    yield int(place)
                    if self.memory_bytes[place] <= limit_bytes:
                        best = sorted([*best, float(self._exact_s[place])])[:count]

    def _known(self, among: Mask, limit_bytes: float) -> NDArray[np.int64]:
        known = np.fromiter(self._predictions, dtype=np.int64, count=len(self._predictions))
        return known[among[known] & (self.memory_bytes[known] <= limit_bytes)]

    def _found(self, among: Mask, count: int, limit_bytes: float, lower_s: float | None = None) -> Best:
        known = self._known(among, limit_bytes)
        order = np.lexsort((known, self.memory_bytes[known], self._exact_s[known]))
        places = tuple(int(place) for place in known[order[:count]])
        if lower_s is None:
            return Best(places, float(self._exact_s[places[-1]]) if places else np.inf, proven=self.sound)
        return Best(places, lower_s, proven=False)


# Layouts that are scored at once: small enough for the columns in between to stay in a processor's cache.
_BLOCK = 16_384
# How products and collectives overlap changes when things are held, not how much: memory is asked for once.
_NO_MEMORY = "tensor_overlap"
# Below so many layouts, starting processes costs more than it saves.
_FEW = 100_000

Part: TypeAlias = tuple[Bounds, Bounds]  # of one group: step times and memory


class Scores(Protocol):
    """What is known of many layouts at once."""

    @property
    def step_s(self) -> Floats:
        """Not above the predicted step time, seconds."""
        ...

    @property
    def memory_bytes(self) -> Floats:
        """Of the fullest rank; not above what is predicted."""
        ...


@dataclass(frozen=True)
class CostModel:
    """The cost model that a search asks."""

    score: Callable[[Strategy], Scores]  # of a strategy whose numbers are arrays
    predict: Callable[[Strategy], Prediction]  # of one layout, in full


@dataclass(frozen=True, eq=False)
class Scored:
    """All layouts of a space: what is known of each, and which group and row it is."""

    lower_s: Bounds
    memory_bytes: Bounds
    group: NDArray[np.int16]
    row: NDArray[np.int32]

    def at(self, order: NDArray[np.int64]) -> Scored:
        """In another order."""
        return Scored(self.lower_s[order], self.memory_bytes[order], self.group[order], self.row[order])


def scored(space: SearchSpace, costs: CostModel, processes: int | None = None) -> Scored:
    """Of every layout a lower bound and the memory; block by block, so that little is held in between."""
    parts = _in_processes(space, costs, processes or _worth(space))
    sizes = [len(group.rows) for group in space.groups]
    return Scored(
        lower_s=np.concatenate([lower_s for lower_s, _ in parts]),
        memory_bytes=np.concatenate([memory_bytes for _, memory_bytes in parts]),
        group=np.repeat(np.arange(len(sizes), dtype=np.int16), sizes),
        row=np.concatenate([group.rows for group in space.groups]),
    )


def _of_group(space: SearchSpace, costs: CostModel, group: Group, memory_bytes: Bounds) -> Part:
    """Step times and memory; `memory_bytes` has what is known of the space's rows already, and takes what is new."""
    lower_s = np.empty(len(group.rows))
    for begin in range(0, len(group.rows), _BLOCK):
        span = slice(begin, min(begin + _BLOCK, len(group.rows)))
        scores = costs.score(space.strategies(group, span.start, span.stop))
        lower_s[span] = scores.step_s
        if np.isnan(memory_bytes[group.rows[span]]).any():
            memory_bytes[group.rows[span]] = scores.memory_bytes
    return lower_s, memory_bytes[group.rows]


def _worth(space: SearchSpace) -> int:
    """Processes that are worth it; a fork is safe where this one has no other threads."""
    safe = sys.platform == "linux" and threading.active_count() == 1
    return len(os.sched_getaffinity(0)) if safe and space.count >= _FEW else 1


def _in_processes(space: SearchSpace, costs: CostModel, processes: int) -> list[Part]:
    """Every group, dealt out to this process and forked ones; these end when they have sent what they found."""
    context = multiprocessing.get_context("fork")
    others = []
    for first in range(1, processes):
        reader, writer = context.Pipe(duplex=False)
        # What is forked need not be pickled, as cost models cannot be.
        other = context.Process(target=_say, args=(space, costs, first, processes, writer), daemon=True)
        other.start()
        writer.close()
        others.append((other, reader))
    parts = _dealt(space, costs, 0, processes)
    for other, reader in others:
        parts |= _heard(reader)
        other.join()
    return [parts[at] for at in range(len(space.groups))]


def _dealt(space: SearchSpace, costs: CostModel, first: int, processes: int) -> dict[int, Part]:
    """What one of so many processes works out, by group: sets of groups that need the same memory."""
    sets: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for at, group in enumerate(space.groups):
        sets[tuple(value for name, value in group.settings.items() if name != _NO_MEMORY)].append(at)
    found: dict[int, Part] = {}
    for same in list(sets.values())[first::processes]:
        memory_bytes = np.full(space.rows, np.nan)
        found |= {at: _of_group(space, costs, space.groups[at], memory_bytes) for at in same}
    return found


def _say(space: SearchSpace, costs: CostModel, first: int, processes: int, writer: Connection) -> None:
    with writer, contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
        try:
            writer.send(_dealt(space, costs, first, processes))
        except Exception:
            writer.send(traceback.format_exc())


def _heard(reader: Connection) -> dict[int, Part]:
    with reader:
        found: dict[int, Part] | str = reader.recv()
    if isinstance(found, str):
        raise RuntimeError(f"a process that scored layouts failed:\n{found}")
    return found
