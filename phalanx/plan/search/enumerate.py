"""All ways to share devices, batch and layers that a job can have, by the rules that `phalanx train` keeps.

The rules are those of `phalanx.parallel.choose`, on columns of numbers; tests hold the two side by side. What is a
choice, such as the schedule, is left to `phalanx.plan.search.space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.core.layout import divisors
from phalanx.plan.search.constraints import HOST_AXES, NUMBERS, Bound, Constraints
from phalanx.plan.search.options import Machine
from phalanx.plan.search.table import Mask, Table, one_row
from phalanx.plan.types import Job

AXES_UNIT = "ways to share the devices"
ROWS_UNIT = "ways to share batch and layers too"

_ON_AXES = ("pipeline", "replicate", "shard", "data", "context", "tensor", "expert", "context_tokens")


@dataclass(frozen=True)
class Rule:
    """A rule on the columns of a table.

    Attributes:
        holds: for each row.
    """

    name: str
    cure: str
    holds: Callable[[Table], Mask]


def numeric_layouts(job: Job, machine: Machine, asked: Constraints) -> Table:
    """Every way to share devices over axes, sequences over micro-batches, and layers over chunks; a row for each.

    Columns are the axes, `data`, `expert`, `context_tokens`, `micro_batch`, `micro_batches`, `chunks`, `stages`. The
    table is empty where no way is left.
    """
    table = _axes(job, machine.devices)
    for rule in [*_bounds(asked, on_axes=True), *_axis_rules(job, machine, asked)]:
        table.keep(rule.holds(table), rule.name, AXES_UNIT, rule.cure)
    if len(table):
        _add_batches(table, job)
        for rule in [*_bounds(asked, on_axes=False), *_row_rules(job)]:
            table.keep(rule.holds(table), rule.name, ROWS_UNIT, rule.cure)
    table.columns.pop("imbalance", None)
    return table


def _axes(job: Job, devices: int) -> Table:
    """All factorisations of `devices`, and of the experts over data-parallel ranks."""
    table = one_row({"rest": devices})
    for axis in ("tensor", "context", "pipeline", "replicate"):
        table.extend(axis, table["rest"], divisors)
        table.columns["rest"] = table["rest"] // table[axis]
    table.columns["shard"] = table.columns.pop("rest")
    table.columns["data"] = table["replicate"] * table["shard"]
    table.columns["context_tokens"] = job.sequence // table["context"]
    shared = np.gcd(table["data"], job.model.experts) if job.model.experts else np.ones_like(table["data"])
    table.extend("expert", shared, divisors)
    return table


def _add_batches(table: Table, job: Job) -> None:
    """Micro-batches that divide what a data-parallel rank has, and chunks that leave each stage a layer."""
    table.extend("micro_batch", job.global_batch // table["data"], divisors)
    table.columns["micro_batches"] = job.global_batch // (table["data"] * table["micro_batch"])
    table.extend("chunks", table["pipeline"], lambda p: range(1, job.model.layers // p + 1) if p > 1 else (1,))
    table.columns["stages"] = table["pipeline"] * table["chunks"]
    fullest = -(-job.model.layers // table["stages"])
    # Of a whole number of layers: the only column that is not one by nature, kept in millionths.
    table.columns["imbalance"] = (1_000_000 * fullest * table["stages"]) // job.model.layers - 1_000_000


def _bounds(asked: Constraints, *, on_axes: bool) -> list[Rule]:
    """The bounds on numbers that are known before micro-batches and chunks are, or on the others."""
    return [_bound_rule(bound) for bound in asked.bounds if (bound.name in _ON_AXES) == on_axes]


def _bound_rule(bound: Bound) -> Rule:
    scale = 1_000_000 if bound.name == "imbalance" else 1
    # What is asked of a split says nothing where there is none.
    neutral = {"context_tokens": "context", "imbalance": "stages"}.get(bound.name)

    def holds(table: Table) -> Mask:
        allowed: Mask = bound.allows(table[bound.name] / scale)
        return allowed | (table[neutral] == 1) if neutral else allowed

    default = " unless asked otherwise" if bound.default else ""
    lift = f"write {bound.name}=any" if bound.default else f"leave out {bound.text}"
    return Rule(f"{bound.text} ({NUMBERS[bound.name]}){default}", lift, holds)


def _axis_rules(job: Job, machine: Machine, asked: Constraints) -> list[Rule]:
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


def _inside_host(machine: Machine, asked: Constraints) -> Rule:
    """Neighbours share a host as far as it has room: a group stays in one if all up to it divide what a host has."""
    reach = max((HOST_AXES.index(axis) + 1 for axis in asked.inside_host), default=0)

    def holds(table: Table) -> Mask:
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


def _row_rules(job: Job) -> list[Rule]:
    return [
        Rule(
            "at least as many micro-batches as pipeline ranks",
            f"raise the global batch above {job.global_batch}",
            lambda table: (table["pipeline"] == 1) | (table["micro_batches"] >= table["pipeline"]),
        )
    ]
