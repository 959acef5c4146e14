"""From ``[parallel]`` to a layout: axes that were left open are chosen, impossible layouts refused.

Everything here is arithmetic on the config, done before any process is started.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Axis, Layout, divisors
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.feasible import Task, check_batches, check_possible, micro_batch_of, needed_bytes

# How far a number of devices that would do is looked for, each way; and how often it is doubled where memory is short.
_NEAR = 8
_DOUBLINGS = 6
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Machines:
    """Where the ranks are to be: how many a host has, and the memory that each of them could have (None: unknown)."""

    ranks_per_host: int
    available_bytes: int | None = None


Verdict = Literal["well", "slowly", "barely", "no"]
"""Whether a rank's memory suffices: with a reserve; with it, but only as every layer is computed again, which nobody
asked for; without a reserve; not at all."""
_FROM_BEST: tuple[Verdict, ...] = ("well", "slowly", "barely", "no")


@dataclass(frozen=True)
class Need:
    """Memory that a layout takes.

    Attributes:
        num_bytes: on the fullest rank.
        available_bytes: that each rank could have.
        parts: what takes it, in words.
        cure: settings that would take less, in words; empty: none are known.
    """

    verdict: Verdict
    num_bytes: float
    available_bytes: float
    parts: str
    cure: str = ""


Judge = Callable[[ParallelConfig, int], Need]
"""What a layout takes of memory with so many sequences per forward pass (0: as many as fit). Handed in by whoever knows
more than the state of a model: the planner is in a room above this one."""


@dataclass(frozen=True)
class Choice:
    """A layout that can be run.

    Attributes:
        config: with every axis and the ZeRO stage filled in.
        reasons: why, a line each; empty where nothing was left open.
        micro_batch: sequences per forward pass on each data-parallel rank; 0 where it is still to be chosen.
        micro_batches: passes per step and data-parallel rank, at the full global batch; 0 likewise.
    """

    config: ParallelConfig
    reasons: tuple[str, ...]
    micro_batch: int
    micro_batches: int

    @property
    def layout(self) -> Layout:
        """Its axes."""
        return self.config.layout


def choose_layout(config: ParallelConfig, task: Task, machines: Machines, judge: Judge | None = None) -> Choice:
    """The layout that `config` asks for; where it gives only a number of devices, a good one.

    Data parallel comes first, because it talks least. Where memory does not suffice, more of the state is split (ZeRO);
    where the batch has too few sequences or memory is still short, tensor parallel inside a host, then pipeline.

    Args:
        judge: says what memory suffices for; None: weights, gradients and optimizer state alone are looked at. Axes
            that are all given are tried even if it says that they do not fit.

    Raises:
        UserError: numbers that do not divide each other, too few micro-batches or layers, or memory that cannot do.
    """
    if config.devices:
        return _choose(config, task, machines, judge or _of_state(task, machines))
    choice = _checked(config, task, ())
    need = _of_state(task, machines)(config, choice.micro_batch)
    if need.verdict == "no":
        raise UserError(
            _too_much(config, need),
            cure="raise parallel.zero, parallel.shard, parallel.tensor or parallel.pipeline, or make the model smaller",
            field="parallel",
        )
    return choice


def _choose(config: ParallelConfig, task: Task, machines: Machines, judge: Judge) -> Choice:
    given: list[Axis] = [axis for axis in AXES if getattr(config, axis) > 1]
    known = math.prod(getattr(config, axis) for axis in given)
    if config.devices % known:
        listed = " x ".join(f"{axis} {getattr(config, axis)}" for axis in given)
        raise UserError(
            f"cannot be shared by {listed} = {known} ranks",
            cure=f"make it a multiple of {known}, or leave an axis out",
            field="parallel.devices",
            value=config.devices,
        )
    refused: list[str] = []
    short: list[tuple[Choice, Need]] = []
    for found in _judged(config, given, known, task, machines, judge):
        if isinstance(found, UserError):
            refused.append(_what(found))
            continue
        choice, need = found
        if need.verdict == "well":
            return _with_reason(choice, config, refused)
        short.append(found)
        refused.append(_too_much(choice.config, need))
    if not short:
        raise UserError(
            f"no layout of so many devices was found: {refused[0]}",
            cure=f"{_nearest(config, known, task, machines, judge)}give the axes yourself",
            field="parallel.devices",
            value=config.devices,
        )
    choice, need = min(short, key=lambda one: _FROM_BEST.index(one[1].verdict))
    if need.verdict == "no":
        raise _nothing_fits(config, known, task, machines, judge, min(short, key=lambda one: one[1].num_bytes))
    why = "whole layers are computed again: of the layouts that were tried none fits without that"
    if need.verdict == "barely":
        taken = f"{units.size(need.num_bytes)} of {units.size(need.available_bytes)}"
        why = f"takes {taken}: of the layouts that were tried none leaves a tenth free"
    return _with_reason(replace(choice, reasons=(*choice.reasons, why)), config, refused)


def _judged(
    config: ParallelConfig, given: Sequence[Axis], known: int, task: Task, machines: Machines, judge: Judge
) -> Iterator[tuple[Choice, Need] | UserError]:
    """Every way to fill the devices, those that talk least first, with its memory; or why it cannot be."""
    for candidate, reasons in _candidates(config, given, config.devices // known, task, machines):
        try:
            choice = _checked(candidate, task, reasons)
        except UserError as error:
            yield error
            continue
        yield min(_sizes(choice, task, judge), key=lambda one: _FROM_BEST.index(one[1].verdict))


def _sizes(choice: Choice, task: Task, judge: Judge) -> Iterator[tuple[Choice, Need]]:
    """A choice with its memory; with smaller micro-batches too, where it settled that itself and it is too large."""
    settled = 0 if task.micro_batch else choice.micro_batch
    for size in [choice.micro_batch, *(n for n in reversed(divisors(settled)) if n < settled)]:
        try:
            counts = check_batches(choice.config, task, size)
        except UserError:  # a schedule that takes no such number of micro-batches
            continue
        need = judge(choice.config, size)
        yield replace(choice, micro_batch=size, micro_batches=counts), need
        if need.verdict == "well":
            return


def _with_reason(choice: Choice, config: ParallelConfig, refused: Sequence[str]) -> Choice:
    """With a word on why it is more than data parallel."""
    more = (choice.config.pipeline, choice.config.tensor) != (config.pipeline, config.tensor)
    why_more = [f"not data parallel alone: {why}" for why in refused[:1] if more]
    return replace(choice, reasons=(*choice.reasons, *why_more))


def _nothing_fits(
    config: ParallelConfig, known: int, task: Task, machines: Machines, judge: Judge, nearest: tuple[Choice, Need]
) -> UserError:
    choice, need = nearest
    devices = _enough(config, known, task, machines, judge, need.num_bytes / need.available_bytes)
    other = f"another optimizer than {task.whole_matrices_for}, " if task.whole_matrices_for else ""
    less = f"{need.cure}, " if need.cure else ""
    return UserError(
        f"no layout of so many devices fits. The nearest: {_too_much(choice.config, need)}",
        cure=f"take {f'{devices:,} devices, ' if devices else ''}{less}{other}a smaller model or data.sequence_length, "
        "or give the axes yourself (phalanx plan --search tries more layouts)",
        field="parallel.devices",
        value=config.devices,
    )


def _enough(
    config: ParallelConfig, known: int, task: Task, machines: Machines, judge: Judge, times: float
) -> int | None:
    """A number of devices, doubled again and again, of which some layout fits; None: none was found.

    Args:
        times: how often the memory of a device the nearest layout takes.
    """
    first = max(int(math.log2(times)), 1)
    for doublings in range(first, first + _DOUBLINGS):
        devices = config.devices << doublings
        if devices > _MOST_DEVICES:
            break
        if _can_be(config.model_copy(update={"devices": devices}), known, task, machines, judge):
            return devices
    return None


def _nearest(config: ParallelConfig, known: int, task: Task, machines: Machines, judge: Judge) -> str:
    """The numbers of devices next to the one that cannot be, as words of a cure; empty where none is near."""
    below = range(config.devices - known, 0, -known)[:_NEAR]
    above = range(config.devices + known, config.devices + (_NEAR + 1) * known, known)
    found: list[str] = []
    for numbers in (below, above):
        there = (n for n in numbers if _can_be(config.model_copy(update={"devices": n}), known, task, machines, judge))
        found += map(str, itertools.islice(there, 1))
    return f"take {' or '.join(found)} devices, or " if found else ""


def _can_be(config: ParallelConfig, known: int, task: Task, machines: Machines, judge: Judge) -> bool:
    given: list[Axis] = [axis for axis in AXES if getattr(config, axis) > 1]
    ways = _judged(config, given, known, task, machines, judge)
    return any(not isinstance(found, UserError) and found[1].verdict != "no" for found in ways)


def _what(error: UserError) -> str:
    """An error without its cure."""
    return str(error).removesuffix(f"; {error.cure}")


def _candidates(
    config: ParallelConfig, given: Sequence[Axis], rest: int, task: Task, machines: Machines
) -> Iterator[tuple[ParallelConfig, tuple[str, ...]]]:
    """Ways to fill `rest` ranks, those that talk least first, each with its reasons.

    Splitting weights (ZeRO-3) gathers them in every pass: inside one host it comes before tensor parallel, between
    hosts after everything else, as in MegaScale, which has tensor parallel inside hosts and pipelines between them.
    """
    in_host = [t for t in divisors(rest) if t <= machines.ranks_per_host and machines.ranks_per_host % t == 0]
    in_host = in_host[:1] if task.whole_matrices_for else in_host
    stages = [p for p in divisors(rest) if p <= task.model.layers]
    shapes = [
        (pipeline, tensor)
        for pipeline in ([1] if "pipeline" in given else stages)
        for tensor in ([1] if "tensor" in given else in_host)
        if rest % (pipeline * tensor) == 0
    ]
    zeros = (1, 2, 3) if config.zero == 1 and not task.whole_matrices_for else (config.zero,)
    far = config.devices > machines.ranks_per_host
    tried = [(pipeline, tensor, zero) for pipeline, tensor in shapes for zero in zeros]
    for pipeline, tensor, zero in sorted(tried, key=lambda shape: far and shape[2] == 3):
        data: Axis = "replicate" if "shard" in given or task.whole_matrices_for else "shard"
        yield _filled(config, given, pipeline, tensor, (data, rest // (pipeline * tensor)), zero, task)


def _filled(
    config: ParallelConfig,
    given: Sequence[Axis],
    pipeline: int,
    tensor: int,
    data: tuple[Axis, int],
    zero: int,
    task: Task,
) -> tuple[ParallelConfig, tuple[str, ...]]:
    update: dict[str, int] = {"zero": zero, "devices": 0}
    reasons = []
    if "pipeline" not in given and pipeline > 1:
        update["pipeline"] = pipeline
        reasons.append(f"pipeline = {pipeline}: other layers on other ranks, which say little to each other")
    if "tensor" not in given and tensor > 1:
        update["tensor"] = tensor
        reasons.append(f"tensor = {tensor}: inside one host, where ranks talk fastest")
    axis, more = data
    if more > 1:
        update[axis] = getattr(config, axis) * more
        whole = f"; nothing is split, as {task.whole_matrices_for} works on whole matrices"
        reasons.append(
            f"{axis} = {update[axis]}: data parallel, which talks least{whole if task.whole_matrices_for else ''}"
        )
        if axis == "shard":
            what = {1: "optimizer state is", 2: "optimizer state and gradients are", 3: "state and weights are"}[zero]
            reasons.append(f"zero = {zero}: {what} split over them; what is split least talks least")
    return config.model_copy(update=update), tuple(reasons)


def _checked(config: ParallelConfig, task: Task, reasons: tuple[str, ...]) -> Choice:
    """A choice that can be run, if memory suffices."""
    micro_batch = micro_batch_of(config, task)
    return Choice(config, reasons, micro_batch, check_possible(config, task, micro_batch))


def _of_state(task: Task, machines: Machines) -> Judge:
    """By weights, gradients and optimizer state alone."""

    def judge(config: ParallelConfig, _: int) -> Need:
        available_bytes = math.inf if machines.available_bytes is None else machines.available_bytes
        needed = needed_bytes(config, task) if available_bytes < math.inf else 0
        verdict: Verdict = "well" if needed <= available_bytes else "no"
        return Need(verdict, needed, available_bytes, "weights, gradients and optimizer state")

    return judge


def _too_much(config: ParallelConfig, need: Need) -> str:
    return (
        f"{need.parts} are {units.size(need.num_bytes)} on each rank of {config.layout} with zero = {config.zero}, "
        f"and each has {units.size(need.available_bytes)} to give"
    )
