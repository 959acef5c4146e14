"""Where each host of each run stands, in arrays: shelves of hosts, and slots for those that come back later.

Every function takes `runs`, the numbers of different runs, and changes one host in each of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

JOB, SPARE, COLD, AWAY = 0, 1, 2, 3
"""In the job; ready beside it; could be asked for; out, or coming."""


class Shelves:
    """The hosts in the job, the spares and the cold ones; a host is on one of the shelves, or away.

    Args:
        counts: hosts on each shelf at first; they are numbered in this order.
    """

    def __init__(self, runs: int, counts: tuple[int, int, int]) -> None:
        total = sum(counts)
        self.where = np.repeat(np.array([JOB, SPARE, COLD], dtype=np.int8), counts)[None].repeat(runs, axis=0)
        starts = np.repeat(np.cumsum((0, *counts[:2])), counts)
        self._place = (np.arange(total, dtype=np.int32) - starts.astype(np.int32))[None].repeat(runs, axis=0)
        self._items = np.zeros((3, runs, total), dtype=np.int32)
        self.counts: Ints = np.zeros((3, runs), dtype=np.int64)
        for shelf, count in enumerate(counts):
            first = sum(counts[:shelf])
            self._items[shelf, :, :count] = np.arange(first, first + count)
            self.counts[shelf] = count

    def put(self, shelf: int, runs: Ints, hosts: Ints) -> None:
        """Hosts that were away."""
        last = self.counts[shelf, runs]
        self._items[shelf, runs, last] = hosts
        self._place[runs, hosts] = last
        self.where[runs, hosts] = shelf
        self.counts[shelf, runs] = last + 1

    def remove(self, shelf: int, runs: Ints, hosts: Ints) -> None:
        """These hosts, which are on that shelf, are away from now on; the last one takes their place."""
        last = self.counts[shelf, runs] - 1
        moved = self._items[shelf, runs, last]
        place = self._place[runs, hosts]
        self._items[shelf, runs, place] = moved
        self._place[runs, moved] = place
        self.where[runs, hosts] = AWAY
        self.counts[shelf, runs] = last

    def take(self, shelf: int, runs: Ints) -> Ints:
        """The last host of a shelf that is not empty; it is away from now on."""
        last = self.counts[shelf, runs] - 1
        hosts: Ints = self._items[shelf, runs, last].astype(np.int64)
        self.where[runs, hosts] = AWAY
        self.counts[shelf, runs] = last
        return hosts


FREE, OUT, COMING, UNSEEN, WANTED = 0, 1, 2, 3, 4
"""A slot is free; its host is being repaired; will be ready; is bad and not found; is found, and waits for another."""


class Slots:
    """What will happen to hosts later, in a few columns that grow when they have to.

    Attributes:
        at_s: when; infinite: not by itself.
        end_s: when the host is good again by itself, if it is.
        length_s: how long its repair takes.
        slowdown: of the whole job by this host, ratio.
    """

    def __init__(self, runs: int, width: int = 8) -> None:
        self.at_s = np.full((runs, width), np.inf)
        self.end_s = np.full((runs, width), np.inf)
        self.length_s = np.zeros((runs, width))
        self.slowdown = np.ones((runs, width))
        self.hosts = np.full((runs, width), -1, dtype=np.int64)
        self.kinds = np.zeros((runs, width), dtype=np.int8)

    def put(self, kind: int, runs: Ints, hosts: Ints, at_s: Floats) -> Ints:
        """Use a free slot of each run; its column."""
        is_free = self.kinds[runs] == FREE
        if not is_free.any(axis=1).all():
            self._grow()
            is_free = self.kinds[runs] == FREE
        columns: Ints = is_free.argmax(axis=1)
        self.set(kind, runs, columns, at_s)
        self.hosts[runs, columns] = hosts
        return columns

    def set(self, kind: int, runs: Ints, columns: Ints, at_s: Floats | float) -> None:
        """Give the slot's host another fate; it holds nothing up any more."""
        self.kinds[runs, columns] = kind
        self.at_s[runs, columns] = at_s
        self.slowdown[runs, columns] = 1.0

    def clear(self, runs: Ints, columns: Ints) -> None:
        """Nothing is known of the host any more."""
        self.set(FREE, runs, columns, np.inf)
        self.end_s[runs, columns] = np.inf
        self.hosts[runs, columns] = -1

    def find(self, runs: Ints, hosts: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Whether these hosts have a slot, and its column."""
        is_theirs = self.hosts[runs] == hosts[:, None]
        return is_theirs.any(axis=1), is_theirs.argmax(axis=1)

    def first(self, kind: int, runs: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Whether there is a slot of this kind, and its column."""
        is_kind = self.kinds[runs] == kind
        return is_kind.any(axis=1), is_kind.argmax(axis=1)

    def _grow(self) -> None:
        for name in ("at_s", "end_s", "length_s", "slowdown", "hosts", "kinds"):
            old = getattr(self, name)
            fresh = type(self)(len(old), old.shape[1])
            setattr(self, name, np.concatenate([old, getattr(fresh, name)], axis=1))
