"""Sets of layouts as columns of numbers: rows are added by what can follow them, and taken away by rules that count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Removed:
    """What one rule left of the layouts that came to it.

    Attributes:
        rule: in words.
        of: what was counted: ways to share the devices, ways to share batch and layers too, or whole layouts.
        cure: how to have fewer taken away, in the imperative.
    """

    rule: str
    of: str
    before: int
    removed: int
    cure: str

    @property
    def left(self) -> int:
        """How many it let pass."""
        return self.before - self.removed


@dataclass
class Table:
    """Columns of equal length, one row for each layout, and what was taken away from them so far."""

    columns: dict[str, Column]
    removed: list[Removed] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def extend(self, name: str, key: Column, values_of: Callable[[int], Sequence[int]]) -> None:
        """Each row once for each value in ``values_of(its key)``, which is in the new column `name`."""
        keys, which = np.unique(key, return_inverse=True)
        lists = [np.asarray(values_of(int(one)), dtype=np.int64) for one in keys]
        counts = np.array([len(values) for values in lists], dtype=np.int64)
        times = counts[which]
        starts = (np.cumsum(counts) - counts)[which]
        rows = np.repeat(np.arange(len(key)), times)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
        flat = np.concatenate(lists) if lists else np.zeros(0, dtype=np.int64)
        self.columns = {old: column[rows] for old, column in self.columns.items()}
        self.columns[name] = flat[starts[rows] + within]

    def keep(self, mask: Mask, rule: str, of: str, cure: str) -> None:
        """Only the rows where `mask` is true; a rule that takes nothing away is not written down."""
        before, left = len(mask), int(np.count_nonzero(mask))
        if left == before:
            return
        self.removed.append(Removed(rule, of, before, before - left, cure))
        self.columns = {name: column[mask] for name, column in self.columns.items()}


def one_row(values: Mapping[str, int]) -> Table:
    """A table of one row."""
    return Table({name: np.array([value], dtype=np.int64) for name, value in values.items()})
