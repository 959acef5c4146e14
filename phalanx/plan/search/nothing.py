"""The error when no layout is left: what took them away, and what is cheapest to relax."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import Constraints
from phalanx.plan.search.options import Machine
from phalanx.plan.search.scored import Costs, scored
from phalanx.plan.search.space import Space, layouts
from phalanx.plan.search.table import Removed
from phalanx.plan.types import Job

# Without a bound that is there by default a space can be ten times as large: it is not searched only for an error.
_TOO_MANY = 2_000_000
# How far other numbers of devices are looked for, each way.
_NEAR = 128


def nothing_left(job: Job, machine: Machine, asked: Constraints, space: Space) -> UserError:
    """The error for a space that is empty by its rules."""
    problem = _problem(job, machine, _said(space.removed))
    for cure, other in _relaxations(asked):
        if count := layouts(job, machine, other).count:
            return UserError(problem, cure=f"{cure}: {count:,} layouts are left then")
    near = " or ".join(f"{devices:,}" for devices in _near(job, machine, asked))
    return UserError(problem, cure=f"take {near} devices" if near else _last_cure(space.removed))


def nothing_fits(job: Job, machine: Machine, costs: Costs, asked: Constraints, least_bytes: float) -> UserError:
    """The error where the leanest layout, of `least_bytes`, is too large for a device."""
    limit_bytes = asked.memory_bytes(machine.memory_bytes)
    problem = (
        f"no layout of {machine.devices:,} devices fits: the leanest needs {units.size(least_bytes)} on its fullest "
        f"rank, of {units.size(limit_bytes)} that may be filled"
    )
    for cure, other in _relaxations(asked):
        space = layouts(job, machine, other)
        if space.count <= _TOO_MANY and space.count:
            leanest = float(scored(space, costs).memory_bytes.min())
            if leanest <= other.memory_bytes(machine.memory_bytes):
                return UserError(problem, cure=f"{cure}: about {units.size(leanest)} are enough then")
    return UserError(problem, cure="take more devices, devices with more memory, or a smaller model")


def _relaxations(asked: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each thing that was asked for left out by itself, and how to say it: first what nobody asked for."""
    without = {bound: tuple(one for one in asked.bounds if one is not bound) for bound in asked.bounds}
    if asked.memory < 1:
        yield "write 'memory<=1'", replace(asked, memory=1.0)
    for bound in asked.bounds:
        if bound.default:
            yield f"write {bound.name}=any", replace(asked, bounds=without[bound])
    if asked.inside_host:
        yield "write inside_host=none", replace(asked, inside_host=())
    for name in asked.choices:
        yield f"leave out {name}=", replace(asked, choices={k: v for k, v in asked.choices.items() if k != name})
    for bound in asked.bounds:
        if not bound.default:
            yield f"leave out {bound.text}", replace(asked, bounds=without[bound])


def _near(job: Job, machine: Machine, asked: Constraints) -> Iterator[int]:
    """The nearest numbers of devices, below and above, for which layouts are left."""
    below = range(machine.devices - 1, max(machine.devices - _NEAR, 0), -1)
    for numbers in (below, range(machine.devices + 1, machine.devices + _NEAR)):
        there = (n for n in numbers if layouts(job, replace(machine, devices=n), asked).count)
        yield from itertools.islice(there, 1)


def _problem(job: Job, machine: Machine, said: str) -> str:
    return (
        f"no layout of {machine.devices:,} device{'s' * (machine.devices > 1)} is left for {job.model.layers} layers, "
        f"{job.model.kv_heads} key/value heads, sequences of {job.sequence:,} tokens and a global batch of "
        f"{job.global_batch:,}: {said}"
    )


def _said(removed: Sequence[Removed]) -> str:
    """Each rule with what it took away, those of one kind after another."""
    kinds = dict.fromkeys(one.of for one in removed)
    return "; ".join(
        f"of {next(one.before for one in removed if one.of == kind):,} {kind} "
        + ", ".join(f"{one.removed:,} by '{one.rule}'" for one in removed if one.of == kind)
        for kind in kinds
    )


def _last_cure(removed: Sequence[Removed]) -> str:
    """Of the rule that left nothing."""
    return next((one.cure for one in reversed(removed) if one.left == 0), "take another number of devices")
