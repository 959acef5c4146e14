"""The layouts that are searched: rows of numbers times the choices that each of them can have.

`numeric_layouts` enumerates all ways to share devices, batch and layers by the rules that `phalanx train` keeps: those
of `phalanx.parallel.layout_choice`, on columns of numbers; tests hold the two side by side. `LayoutTable` holds the
rows as
columns: rows are added by what can follow them, and taken away by rules that count how many. Choices, such as the
schedule, are `Option`s, which `layouts` combines with the rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.layout import divisors
from phalanx.plan.search.constraints import (
    HOST_AXES,
    NUMBERS,
    Bound,
    Constraints,
    SearchTarget,
    options_of,
    restricted,
)
from phalanx.plan.types import Job, Strategy

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]


NUMERIC = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "micro_batch", "chunks")
"""Fields of a strategy that differ from row to row."""


@dataclass(frozen=True)
class Option:
    """A value of one choice, or of two that hang together, and the rows that can have it."""

    settings: Mapping[str, Any]
    rows: Mask


@dataclass(frozen=True, eq=False)
class Group:
    """Layouts that differ in numbers only."""

    settings: Mapping[str, Any]  # the fields of their strategies that are the same
    rows: NDArray[np.int32]  # of the space's columns


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Every layout that the rules leave."""

    columns: Mapping[str, Column]  # numbers, a row for each way to share devices, batch and layers
    groups: tuple[Group, ...]  # the choices, each with the rows that can have them
    removed: tuple[Removed, ...]  # what each rule took away, in the order of the rules

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


def layouts(job: Job, machine: SearchTarget, asked: Constraints) -> SearchSpace:
    """Every layout of `job` on `machine` that `asked` allows and the job's program has; each of them once.

    A choice that changes nothing has one value: without a pipeline the schedule is 1f1b, without ranks that could split
    state `zero` is 0, and so on.
    """
    asked = restricted(asked, job.software.name)
    table = numeric_layouts(job, machine, asked)
    options = options_of(job, machine, asked)
    for make in _DIMENSIONS if len(table) else ():
        _keep_possible(table, make(table, job, options))
    dimensions = [make(table, job, options) for make in _DIMENSIONS] if len(table) else []
    return SearchSpace(table.columns, tuple(_groups(dimensions)), tuple(table.removed))


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


def _keep_possible(table: LayoutTable, options: list[Option]) -> None:
    names = " and ".join(options[0].settings)
    what = ", ".join(" ".join(str(value) for value in option.settings.values()) for option in options)
    possible = np.logical_or.reduce([option.rows for option in options])
    table.keep(possible, f"a {names} that fits, of {what}", ROWS_UNIT, f"allow another {names}")


def _schedules(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
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


def _zeros(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """Ranks of `shard` and of `context` split state; where there is one of them, nothing can be split."""
    splits = table["shard"] * table["context"] > 1
    return [Option({"zero": zero}, splits if zero else ~splits) for zero in allowed["zero"]]


def _recomputes(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    every = np.ones(len(table), dtype=np.bool_)
    return [Option({"recompute": kind}, every) for kind in allowed["recompute"]]


def _tensor_styles(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    """Sequence parallel splits the rows of a micro-batch; only its collectives can be overlapped."""
    many = table["tensor"] > 1
    rows = table["micro_batch"] * job.sequence // table["context"]
    splits = many & (rows % table["tensor"] == 0)
    alone = Option({"sequence_parallel": True, "tensor_overlap": "none"}, ~many)
    found = [
        Option({"sequence_parallel": parallel, "tensor_overlap": overlap}, splits if parallel else many)
        for parallel in allowed["sequence_parallel"]
        for overlap in (allowed["tensor_overlap"] if parallel else ("none",))
    ]
    return _joined([alone, *found])


def _context_methods(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
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


def _buckets(table: LayoutTable, job: Job, allowed: Mapping[str, tuple[Any, ...]]) -> list[Option]:
    reduced = table["data"] * table["context"] > 1
    first, *others = allowed["bucket_bytes"]
    return [
        Option({"bucket_bytes": first}, np.ones_like(reduced)),
        *(Option({"bucket_bytes": size}, reduced) for size in others),
    ]


def _joined(options: list[Option]) -> list[Option]:
    found: list[Option] = []
    for option in options:
        same = [one for one in found if one.settings == option.settings]
        found = [one for one in found if one.settings != option.settings]
        found.append(Option(option.settings, np.logical_or.reduce([option.rows, *(one.rows for one in same)])))
    return found


_DIMENSIONS: tuple[Callable[[LayoutTable, Job, Mapping[str, tuple[Any, ...]]], list[Option]], ...] = (
    _schedules,
    _zeros,
    _recomputes,
    _tensor_styles,
    _context_methods,
    _buckets,
)


AXES_UNIT = "ways to share the devices"
ROWS_UNIT = "ways to share batch and layers too"

_ON_AXES = ("pipeline", "replicate", "shard", "data", "context", "tensor", "expert", "context_tokens")


@dataclass(frozen=True)
class Rule:
    """A rule on the columns of a table."""

    name: str
    cure: str
    holds: Callable[[LayoutTable], Mask]


def numeric_layouts(job: Job, machine: SearchTarget, asked: Constraints) -> LayoutTable:
    """Every way to share devices over axes, sequences over micro-batches, and layers over chunks; a row for each.

    Columns are the axes, `data`, `expert`, `context_tokens`, `micro_batch`, `micro_batches`, `chunks`, `stages`. The
    table is empty where no way is left.
    """
    table = _axes(job, machine.devices)
    for rule in [*_bounds(asked, on_axes=True), *_axis_rules(job, machine, asked)]:
        table.keep(rule.holds(table), rule.name, AXES_UNIT, rule.cure)
    if len(table):
        # Micro-batches that divide what a data-parallel rank has, and chunks that leave each stage a layer.
        table.extend("micro_batch", job.global_batch // table["data"], divisors)
        table.columns["micro_batches"] = job.global_batch // (table["data"] * table["micro_batch"])
        table.extend("chunks", table["pipeline"], lambda p: range(1, job.model.layers // p + 1) if p > 1 else (1,))
        table.columns["stages"] = table["pipeline"] * table["chunks"]
        fullest = -(-job.model.layers // table["stages"])
        # Of a whole number of layers: the only column that is not one by nature, kept in millionths.
        table.columns["imbalance"] = (1_000_000 * fullest * table["stages"]) // job.model.layers - 1_000_000
        enough = Rule(
            "at least as many micro-batches as pipeline ranks",
            f"raise the global batch above {job.global_batch}",
            lambda table: (table["pipeline"] == 1) | (table["micro_batches"] >= table["pipeline"]),
        )
        for rule in [*_bounds(asked, on_axes=False), enough]:
            table.keep(rule.holds(table), rule.name, ROWS_UNIT, rule.cure)
    table.columns.pop("imbalance", None)
    return table


def _axes(job: Job, devices: int) -> LayoutTable:
    """All factorisations of `devices`, and of the experts over data-parallel ranks."""
    table = LayoutTable({"rest": np.array([devices], dtype=np.int64)})
    for axis in ("tensor", "context", "pipeline", "replicate"):
        table.extend(axis, table["rest"], divisors)
        table.columns["rest"] = table["rest"] // table[axis]
    table.columns["shard"] = table.columns.pop("rest")
    table.columns["data"] = table["replicate"] * table["shard"]
    table.columns["context_tokens"] = job.sequence // table["context"]
    shared = np.gcd(table["data"], job.model.experts) if job.model.experts else np.ones_like(table["data"])
    table.extend("expert", shared, divisors)
    return table


def _bounds(asked: Constraints, *, on_axes: bool) -> list[Rule]:
    """The bounds on numbers that are known before micro-batches and chunks are, or on the others."""
    return [_bound_rule(bound) for bound in asked.bounds if (bound.name in _ON_AXES) == on_axes]


def _bound_rule(bound: Bound) -> Rule:
    scale = 1_000_000 if bound.name == "imbalance" else 1
    # What is asked of a split says nothing where there is none.
    neutral = {"context_tokens": "context", "imbalance": "stages"}.get(bound.name)

    def holds(table: LayoutTable) -> Mask:
        allowed: Mask = bound.allows(table[bound.name] / scale)
        return allowed | (table[neutral] == 1) if neutral else allowed

    default = " unless asked otherwise" if bound.default else f" of {bound.program}" if bound.program else ""
    lift = f"write {bound.name}=any" if bound.default else f"leave out {bound.text}"
    if bound.program:
        lift = "search for another program"
    return Rule(f"{bound.text} ({NUMBERS[bound.name]}){default}", lift, holds)


def _axis_rules(job: Job, machine: SearchTarget, asked: Constraints) -> list[Rule]:
    model = job.model
    widths = sorted({model.mlp_width, model.dense_mlp_width} if model.experts else {model.mlp_width})
    return [
        _inside_host(machine, asked),
        _divides("tensor", model.kv_heads, "key/value heads"),
        *[_divides("tensor", width, "columns of the MLP") for width in widths],
        _divides("tensor", model.vocab_rows, "rows of the vocabulary"),
        _divides("context", job.sequence, "tokens of a sequence"),
        *_optimizer_rules(job),
        _divides("data", job.global_batch, "sequences of the global batch"),
        Rule(
            f"a layer for each of pipeline ranks, of {model.layers}",
            "take a model with more layers",
            lambda table: table["pipeline"] <= model.layers,
        ),
    ]


def _inside_host(machine: SearchTarget, asked: Constraints) -> Rule:
    """Neighbours share a host as far as it has room: a group stays in one if all up to it divide what a host has."""
    reach = max((HOST_AXES.index(axis) + 1 for axis in asked.inside_host), default=0)

    def holds(table: LayoutTable) -> Mask:
        if machine.devices <= machine.devices_per_host:
            return np.ones(len(table), dtype=np.bool_)
        span = math.prod((table[axis] for axis in HOST_AXES[:reach]), start=np.ones_like(table["tensor"]))
        fits: Mask = machine.devices_per_host % span == 0
        return fits

    names = " and ".join(HOST_AXES[:reach])
    return Rule(
        f"{names} inside a host of {machine.devices_per_host} devices", "write inside_host=none to let it span", holds
    )


def _divides(axis: str, whole: int, what: str) -> Rule:
    cure = {
        "data": f"take a global batch with more divisors than {whole}, or another number of devices",
        "context": "take a sequence length with more divisors",
    }.get(axis, f"take a model whose number of them has more divisors than {whole}, or another number of devices")
    return Rule(f"{axis} divides {whole} {what}", cure, lambda table: whole % table[axis] == 0)


def _optimizer_rules(job: Job) -> list[Rule]:
    """Muon turns whole matrices, so nothing may split them."""
    if job.optimizer != "muon":
        return []
    return [
        Rule(
            f"{axis} = 1, as muon works on whole matrices",
            "take another optimizer, such as adamw",
            lambda table, axis=axis: table[axis] == 1,  # type: ignore[misc]
        )
        for axis in ("shard", "context", "tensor")
    ]


@dataclass(frozen=True)
class Removed:
    """What one rule left of the layouts that came to it."""

    rule: str  # in words
    of: str  # what was counted: ways to share the devices, ways to share batch and layers too, or whole layouts
    before: int
    removed: int
    cure: str  # how to have fewer taken away, in the imperative

    @property
    def left(self) -> int:
        """How many it let pass."""
        return self.before - self.removed


@dataclass
class LayoutTable:
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
