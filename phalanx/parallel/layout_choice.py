"""From ``[parallel]`` to a layout: axes that were left open are chosen, impossible layouts refused.

Everything here is arithmetic on the config, done before any process is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
"""Whether a rank's memory suffices: with a reserve; with it, but only as every layer is computed again, though that
was not asked for; without a reserve; not at all."""
_FROM_BEST: tuple[Verdict, ...] = ("well", "slowly", "barely", "no")


@dataclass(frozen=True)
class Need:
    """Memory that a layout takes."""

    verdict: Verdict
    num_bytes: float  # on the fullest rank
    available_bytes: float  # that each rank could have
    parts: str  # what takes it, in words
    cure: str = ""  # settings that would take less, in words; empty: none are known


Judge = Callable[[ParallelConfig, int], Need]
"""The memory of a layout with a number of sequences per forward pass (0: as many as fit). Handed in by the planner,
which knows more than the state of a model and is in a room above this one."""


@dataclass(frozen=True)
class LayoutChoice:
    """A layout that can be run, with every axis and the ZeRO stage filled in."""

    config: ParallelConfig
    reasons: tuple[str, ...]  # why, a line each; empty where nothing was left open
    micro_batch: int  # sequences per forward pass on each data-parallel rank; 0 where it is still to be chosen
    micro_batches: int  # passes per step and data-parallel rank, at the full global batch; 0 likewise

    @property
    def layout(self) -> Layout:
        """Its axes."""
        return self.config.layout


def choose_layout(config: ParallelConfig, task: Task, machines: Machines, judge: Judge | None = None) -> LayoutChoice:
    """The layout that `config` asks for; where it gives only a number of devices, a good one.

    Data parallel comes first, because it talks least. Where memory does not suffice, more of the state is split (ZeRO);
    where the batch has too few sequences or memory is still short, tensor parallel inside a host, then pipeline.

    Args:
        judge: whether memory suffices; None: weights, gradients and optimizer state alone are looked at. Axes
            that are all given are tried even if they do not fit.

    Raises:
        UserError: numbers that do not divide each other, too few micro-batches or layers, or memory that cannot do.
    """

    def by_state(config: ParallelConfig, _: int) -> Need:
        available_bytes = math.inf if machines.available_bytes is None else machines.available_bytes
        needed = needed_bytes(config, task) if available_bytes < math.inf else 0
        verdict: Verdict = "well" if needed <= available_bytes else "no"
        return Need(verdict, needed, available_bytes, "weights, gradients and optimizer state")

    if config.devices:
        return _Search(config, task, machines, judge or by_state).choose()
    choice = _checked(config, task, ())
    need = by_state(config, choice.micro_batch)
    if need.verdict == "no":
        raise UserError(
            _too_much(config, need),
            cure="raise parallel.zero, parallel.shard, parallel.tensor or parallel.pipeline, or make the model smaller",
            field="parallel",
        )
    return choice


@dataclass(frozen=True)
class _Search:
    """Ways to give `config.devices` to the axes that are open."""

    config: ParallelConfig
    task: Task
    machines: Machines
    judge: Judge

    @cached_property
    def given(self) -> list[Axis]:
        return [axis for axis in AXES if getattr(self.config, axis) > 1]

    @cached_property
    def known(self) -> int:
        return math.prod(getattr(self.config, axis) for axis in self.given)

    def choose(self) -> LayoutChoice:
        config, known = self.config, self.known
        if config.devices % known:
            listed = " x ".join(f"{axis} {getattr(config, axis)}" for axis in self.given)
            raise UserError(
                f"cannot be shared by {listed} = {known} ranks",
                cure=f"make it a multiple of {known}, or leave an axis out",
                field="parallel.devices",
                value=config.devices,
            )
        refused: list[str] = []
        errors: list[UserError] = []
        short: list[tuple[LayoutChoice, Need]] = []
        for found in self._judged_until_one_fits():
            if isinstance(found, UserError):
                refused.append(str(found).removesuffix(f"; {found.cure}"))
                errors.append(found)
                continue
            choice, need = found
            # Candidates come in the order of how much they talk: the first that fits well is the one.
            if need.verdict == "well":
                return self._with_reasons(choice, refused)
            short.append(found)
            refused.append(_too_much(choice.config, need))
        if not short:
            # Where an axis that was given is at fault, another number of devices would not help.
            for error in errors:
                if error.field and error.field.removeprefix("parallel.") in self.given:
                    raise error
            raise UserError(
                f"no layout of so many devices was found: {refused[0]}",
                cure=f"{self._nearest()}give the axes yourself",
                field="parallel.devices",
                value=config.devices,
            )
        # Of those that fit equally well `min` takes the first, which talks least.
        choice, need = min(short, key=lambda one: _FROM_BEST.index(one[1].verdict))
        if need.verdict == "no":
            raise self._nothing_fits(*min(short, key=lambda one: one[1].num_bytes))
        why = "whole layers are computed again: of the layouts that were tried none fits without that"
        if need.verdict == "barely":
            taken = f"{units.size(need.num_bytes)} of {units.size(need.available_bytes)}"
            why = f"takes {taken}: of the layouts that were tried none leaves a tenth free"
        return self._with_reasons(choice, refused, why)

    def _judged_until_one_fits(self) -> Iterator[tuple[LayoutChoice, Need] | UserError]:
        """`judged`, and where memory is all that is short those that split sequences besides, which talk most."""
        verdicts = set()
        for found in self.judged():
            if not isinstance(found, UserError):
                verdicts.add(found[1].verdict)
            yield found
        if verdicts == {"no"}:
            yield from self.judged(split_sequences=True)

    def judged(self, split_sequences: bool = False) -> Iterator[tuple[LayoutChoice, Need] | UserError]:
        """Every way to fill the devices, those that talk least first, with its memory; or why it cannot be."""
        for candidate, reasons in self._candidates(split_sequences):
            try:
                choice = _checked(candidate, self.task, reasons)
                # The judge refuses, too: a layout that the program does not have takes no memory.
                best = min(self._sizes(choice), key=lambda one: _FROM_BEST.index(one[1].verdict))
            except UserError as error:
                yield error
                continue
            yield best

    def _sizes(self, choice: LayoutChoice) -> Iterator[tuple[LayoutChoice, Need]]:
        """A choice with its memory; also with smaller micro-batches, where it settled that itself and does not fit."""
        # A micro-batch that the config gives stays.
        settled = 0 if self.task.micro_batch else choice.micro_batch
        for size in [choice.micro_batch, *(n for n in reversed(divisors(settled)) if n < settled)]:
            try:
                counts = check_batches(choice.config, self.task, size)
            except UserError:  # a schedule that takes no such number of micro-batches
                continue
            need = self.judge(choice.config, size)
            yield replace(choice, micro_batch=size, micro_batches=counts), need
            if need.verdict == "well":
                return

    def _with_reasons(self, choice: LayoutChoice, refused: Sequence[str], *why: str) -> LayoutChoice:
        more = (choice.config.pipeline, choice.config.tensor) != (self.config.pipeline, self.config.tensor)
        why_more = [f"not data parallel alone: {reason}" for reason in refused[:1] if more]
        return replace(choice, reasons=(*choice.reasons, *why, *why_more))

    def _nothing_fits(self, choice: LayoutChoice, need: Need) -> UserError:
        # A number of devices, doubled again and again, of which some layout fits.
        # Memory per rank falls at most with the number of ranks, so fewer doublings need not be tried.
        first = max(int(math.log2(need.num_bytes / need.available_bytes)), 1)
        doubled = (self.config.devices << n for n in range(first, first + _DOUBLINGS))
        devices = next((n for n in doubled if n <= _MOST_DEVICES and self._can_be(n)), None)
        other = f"another optimizer than {self.task.whole_matrices_for}, " if self.task.whole_matrices_for else ""
        less = f"{need.cure}, " if need.cure else ""
        return UserError(
            f"no layout of so many devices fits. The nearest: {_too_much(choice.config, need)}",
            cure=f"take {f'{devices:,} devices, ' if devices else ''}{less}{other}a smaller model or "
            "data.sequence_length, or give the axes yourself (phalanx plan --search tries more layouts)",
            field="parallel.devices",
            value=self.config.devices,
        )

    def _nearest(self) -> str:
        """The numbers of devices next to the one that cannot be, as words of a cure; empty where none is near."""
        devices, known = self.config.devices, self.known
        below = range(devices - known, 0, -known)[:_NEAR]
        above = range(devices + known, devices + (_NEAR + 1) * known, known)
        found = [next((str(n) for n in numbers if self._can_be(n)), "") for numbers in (below, above)]
        return f"take {' or '.join(filter(None, found))} devices, or " if any(found) else ""

    def _can_be(self, devices: int) -> bool:
        other = replace(self, config=self.config.model_copy(update={"devices": devices}))
        return any(not isinstance(found, UserError) and found[1].verdict != "no" for found in other.judged())

    def _candidates(self, split_sequences: bool) -> Iterator[tuple[ParallelConfig, tuple[str, ...]]]:
        """Ways to fill the ranks that are left, those that talk least first, each with its reasons.

        Splitting weights (ZeRO-3) gathers them in every pass: inside one host it comes before tensor parallel, between
        hosts after everything else, as in MegaScale, which has tensor parallel inside hosts and pipelines between them.
        """
        config, task, per_host = self.config, self.task, self.machines.ranks_per_host
        rest = config.devices // self.known
        # Tensor-parallel groups that do not divide a host would lie across two.
        in_host = [t for t in divisors(rest) if t <= per_host and per_host % t == 0]
        in_host = in_host[:1] if task.whole_matrices_for else in_host
        stages = [p for p in divisors(rest) if p <= task.model.layers]
        # Stage 1 is the default, so it leaves the others open.
        zeros = (1, 2, 3) if config.zero == 1 and not task.whole_matrices_for else (config.zero,)
        contexts = [1]
        if split_sequences:
            possible = "context" not in self.given and not task.whole_matrices_for
            contexts = [n for n in divisors(rest)[1:] if task.sequence_length % n == 0] if possible else []
        tried = [
            (pipeline, tensor, zero, context)
            for context in contexts
            for pipeline in ([1] if "pipeline" in self.given else stages)
            for tensor in ([1] if "tensor" in self.given else in_host)
            if rest % (pipeline * tensor * context) == 0
            for zero in zeros
        ]
        far = config.devices > per_host
        # Sorting is stable: between hosts ZeRO 3 goes behind all others, which keep their order.
        for pipeline, tensor, zero, context in sorted(tried, key=lambda shape: far and shape[2] == 3):
            yield self._filled(pipeline, tensor, rest // (pipeline * tensor * context), zero, context)

    def _filled(
        self, pipeline: int, tensor: int, data: int, zero: int, context: int
    ) -> tuple[ParallelConfig, tuple[str, ...]]:
        whole_for = self.task.whole_matrices_for
        update: dict[str, int] = {"zero": zero, "devices": 0}
        reasons = []
        if "pipeline" not in self.given and pipeline > 1:
            update["pipeline"] = pipeline
            reasons.append(f"pipeline = {pipeline}: other layers on other ranks, which say little to each other")
        if "tensor" not in self.given and tensor > 1:
            update["tensor"] = tensor
            reasons.append(f"tensor = {tensor}: inside one host, where ranks talk fastest")
        if context > 1:
            update["context"] = context
            reasons.append(f"context = {context}: parts of every sequence on other ranks, as none fits with whole ones")
        axis: Axis = "replicate" if "shard" in self.given or whole_for else "shard"
        if data > 1:
            update[axis] = getattr(self.config, axis) * data
            whole = f"; nothing is split, as {whole_for} works on whole matrices" if whole_for else ""
            reasons.append(f"{axis} = {update[axis]}: data parallel, which talks least{whole}")
            if axis == "shard":
                what = {1: "optimizer state is", 2: "optimizer state and gradients are", 3: "state and weights are"}
                reasons.append(f"zero = {zero}: {what[zero]} split over them; what is split least talks least")
        return self.config.model_copy(update=update), tuple(reasons)


def _checked(config: ParallelConfig, task: Task, reasons: tuple[str, ...]) -> LayoutChoice:
    micro_batch = micro_batch_of(config, task)
    return LayoutChoice(config, reasons, micro_batch, check_possible(config, task, micro_batch))


def _too_much(config: ParallelConfig, need: Need) -> str:
    return (
        f"{need.parts} are {units.size(need.num_bytes)} on each rank of {config.layout} with zero = {config.zero}, "
        f"and each has {units.size(need.available_bytes)} to give"
    )
