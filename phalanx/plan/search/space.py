"""The layouts that are searched: rows of numbers times the choices that each of them can have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.search.constraints import Constraints
from phalanx.plan.search.enumerate import ROWS_UNIT, numeric_layouts
from phalanx.plan.search.options import Machine, options_of
from phalanx.plan.search.table import Column, Mask, Removed, Table
from phalanx.plan.types import Job, Strategy

NUMERIC = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "micro_batch", "chunks")
"""Fields of a strategy that differ from row to row."""


@dataclass(frozen=True)
class Option:
    """A value of one choice, or of two that hang together, and the rows that can have it."""

    settings: Mapping[str, Any]
    rows: Mask


@dataclass(frozen=True, eq=False)
class Group:
    """Layouts that differ in numbers only.

    Attributes:
        settings: the fields of their strategies that are the same.
        rows: of the space's columns.
    """

    settings: Mapping[str, Any]
    rows: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Space:
    """Every layout that the rules leave.

    Attributes:
        columns: numbers, a row for each way to share devices, batch and layers.
        groups: the choices, each with the rows that can have them.
        removed: what each rule took away, in the order of the rules.
    """

    columns: Mapping[str, Column]
    groups: tuple[Group, ...]
    removed: tuple[Removed, ...]

    @property
    def count(self) -> int:
        """Layouts in all."""
        return sum(len(group.rows) for group in self.groups)

    @property
    def rows(self) -> int:
        """Rows of the columns."""
        return len(self.columns["pipeline"])

    def strategies(self, group: Group, begin: int = 0, end: int | None = None) -> Strategy:
        """The layouts of `group` as one strategy whose numbers are arrays."""
        rows = group.rows[begin:end]
        numbers: dict[str, Any] = {name: self.columns[name][rows] for name in NUMERIC}
        return Strategy(**numbers, **group.settings)

    def strategy(self, group: int, row: int) -> Strategy:
        """One layout."""
        numbers: dict[str, Any] = {name: int(self.columns[name][row]) for name in NUMERIC}
        return Strategy(**numbers, **self.groups[group].settings)


def layouts(job: Job, machine: Machine, asked: Constraints) -> Space:
    """Every layout of `job` on `machine` that `asked` allows; each said in one way only.

    A choice that changes nothing has one value: without a pipeline the schedule is 1f1b, without ranks that could split
    state `zero` is 0, and so on.
    """
    table = numeric_layouts(job, machine, asked)
    options = options_of(job, machine, asked)
    for make in _DIMENSIONS if len(table) else ():
        _keep_possible(table, make(table, job, options))
    dimensions = [make(table, job, options) for make in _DIMENSIONS] if len(table) else []
    return Space(table.columns, tuple(_groups(dimensions)), tuple(table.removed))


def _groups(dimensions: list[list[Option]]) -> list[Group]:
    found = []
    for options in itertools.product(*dimensions) if dimensions else ():
        rows = np.flatnonzero(np.logical_and.reduce([option.rows for option in options])).astype(np.int32)
        if len(rows):
            settings: dict[str, Any] = {}
            for option in options:
                settings |= option.settings
            found.append(Group(settings, rows))
    return found


def _keep_possible(table: Table, options: list[Option]) -> None:
    """Take away the rows that no value of a choice suits."""
    names = " and ".join(options[0].settings)
    what = ", ".join(" ".join(str(value) for value in option.settings.values()) for option in options)
    possible = np.logical_or.reduce([option.rows for option in options])
    table.keep(possible, f"a {names} that fits, of {what}", ROWS_UNIT, f"allow another {names}")


def _schedules(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """As `phalanx.parallel.pipeline.schedules` has them: chunks, and micro-batches in equal rounds."""
    alone = table["pipeline"] == 1
    pipeline, chunks, passes = table["pipeline"], table["chunks"], table["micro_batches"]
    rounds = ~alone & (passes % np.maximum(passes // pipeline, 1) == 0)
    fits: dict[str, Mask] = {
        "1f1b": ~alone & (chunks == 1),
        "interleaved_1f1b": rounds & (chunks > 1),  # with one chunk it is 1f1b
        "interleaved_zero_bubble": rounds,
        "zbv": ~alone & (chunks == 2),
    }
    names = dict.fromkeys(("1f1b", *allowed["schedule"]))
    asked = [(name, fits[name] & (name in allowed["schedule"])) for name in names]
    return [Option({"schedule": name}, mask | (alone & (name == "1f1b"))) for name, mask in asked]


def _zeros(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """Ranks of `shard` and of `context` split state; where there is one of them, nothing can be split."""
    splits = table["shard"] * table["context"] > 1
    return [Option({"zero": zero}, splits if zero else ~splits) for zero in allowed["zero"]]


def _recomputes(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    every = np.ones(len(table), dtype=np.bool_)
    return [Option({"recompute": kind}, every) for kind in allowed["recompute"]]


def _tensor_styles(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """Sequence parallel splits the rows of a micro-batch; only its collectives can be overlapped."""
    many = table["tensor"] > 1
    rows = table["micro_batch"] * job.sequence // table["context"]
    splits = many & (rows % table["tensor"] == 0)
    alone = Option({"sequence_parallel": True, "tensor_overlap": "none"}, ~many)
    pairs = itertools.product(allowed["sequence_parallel"], allowed["tensor_overlap"])
    found = [
        Option({"sequence_parallel": parallel, "tensor_overlap": overlap}, splits if parallel else many)
        for parallel, overlap in pairs
        if parallel or overlap == "none"
    ]
    return _joined([alone, *found])


def _context_methods(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """A ring balances causal work by two pieces a rank, Ulysses exchanges heads."""
    context = table["context"]
    many = context > 1
    all_windows = all(job.model.window_of(layer) for layer in range(job.model.layers))
    pieces = context * (1 if all_windows else 2)
    fits = {
        "ring": many & (job.sequence % pieces == 0),
        "all_to_all": many & ((job.model.kv_heads // table["tensor"]) % context == 0),
    }
    found = [Option({"context_method": method}, fits[method]) for method in allowed["context_method"]]
    return _joined([Option({"context_method": "ring"}, ~many), *found])


def _buckets(table: Table, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """Sizes matter where gradients are reduced."""
    reduced = table["data"] * table["context"] > 1
    first, *others = allowed["bucket_bytes"]
    return [
        Option({"bucket_bytes": first}, np.ones_like(reduced)),
        *(Option({"bucket_bytes": size}, reduced) for size in others),
    ]


def _joined(options: list[Option]) -> list[Option]:
    """Options with the same settings as one."""
    found: list[Option] = []
    for option in options:
        same = [one for one in found if one.settings == option.settings]
        found = [one for one in found if one.settings != option.settings]
        found.append(Option(option.settings, np.logical_or.reduce([option.rows, *(one.rows for one in same)])))
    return found


_DIMENSIONS: tuple[Callable[[Table, Job, Mapping[str, tuple[Any, ...]]], list[Option]], ...] = (
    _schedules,
    _zeros,
    _recomputes,
    _tensor_styles,
    _context_methods,
    _buckets,
)
