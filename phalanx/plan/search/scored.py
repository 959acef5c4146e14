"""What is known of every layout before any is predicted: a bound of its step time, and one of its memory.

Large spaces are shared by as many processes as there are cores, since NumPy's work on some thousand layouts at a time
is too short for threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.search.space import Group, Space
from phalanx.plan.types import Floats, Prediction, Strategy

# Layouts that are scored at once: small enough for the columns in between to stay in a processor's cache.
_BLOCK = 16_384
# How products and collectives overlap changes when things are held, not how much: memory is asked for once.
_NO_MEMORY = "tensor_overlap"
# Below so many layouts, starting processes costs more than it saves.
_FEW = 100_000

Bounds = NDArray[np.float64]
Part: TypeAlias = tuple[Bounds, Bounds]
"""Of one group: step times and memory."""


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
class Costs:
    """The cost model that a search asks.

    Attributes:
        score: of a strategy whose numbers are arrays.
        predict: of one layout, in full.
    """

    score: Callable[[Strategy], Scores]
    predict: Callable[[Strategy], Prediction]


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


def scored(space: Space, costs: Costs, processes: int | None = None) -> Scored:
    """Of every layout a lower bound and the memory; block by block, so that little is held in between.

    Args:
        processes: that share the work; None: as many as there are cores, if it is worth it.
    """
    parts = _in_processes(space, costs, processes or _worth(space))
    sizes = [len(group.rows) for group in space.groups]
    return Scored(
        lower_s=np.concatenate([lower_s for lower_s, _ in parts]),
        memory_bytes=np.concatenate([memory_bytes for _, memory_bytes in parts]),
        group=np.repeat(np.arange(len(sizes), dtype=np.int16), sizes),
        row=np.concatenate([group.rows for group in space.groups]),
    )


def _of_group(space: Space, costs: Costs, group: Group, memory_bytes: Bounds) -> Part:
    """Step times and memory; `memory_bytes` has what is known of the space's rows already, and takes what is new."""
    lower_s = np.empty(len(group.rows))
    for begin in range(0, len(group.rows), _BLOCK):
        span = slice(begin, min(begin + _BLOCK, len(group.rows)))
        scores = costs.score(space.strategies(group, span.start, span.stop))
        lower_s[span] = scores.step_s
        if np.isnan(memory_bytes[group.rows[span]]).any():
            memory_bytes[group.rows[span]] = scores.memory_bytes
    return lower_s, memory_bytes[group.rows]


def _worth(space: Space) -> int:
    """Processes that are worth it; a fork is safe where this one has no other threads."""
    safe = sys.platform == "linux" and threading.active_count() == 1
    return len(os.sched_getaffinity(0)) if safe and space.count >= _FEW else 1


def _in_processes(space: Space, costs: Costs, processes: int) -> list[Part]:
    """Every group, dealt out to this process and forked ones; these end when they have said what they found."""
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


def _dealt(space: Space, costs: Costs, first: int, processes: int) -> dict[int, Part]:
    """What one of so many processes works out, by group: sets of groups that need the same memory."""
    sets: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for at, group in enumerate(space.groups):
        sets[tuple(value for name, value in group.settings.items() if name != _NO_MEMORY)].append(at)
    found: dict[int, Part] = {}
    for same in list(sets.values())[first::processes]:
        memory_bytes = np.full(space.rows, np.nan)
        found |= {at: _of_group(space, costs, space.groups[at], memory_bytes) for at in same}
    return found


def _say(space: Space, costs: Costs, first: int, processes: int, writer: Connection) -> None:
    with writer, contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
        try:
            writer.send(_dealt(space, costs, first, processes))
        except Exception:
            writer.send(traceback.format_exc())


def _heard(reader: Connection) -> dict[int, Part]:
    with reader:
        said: dict[int, Part] | str = reader.recv()
    if isinstance(said, str):
        raise RuntimeError(f"a process that scored layouts failed:\n{said}")
    return said
