"""A model chunk whose parameters, gradients and optimizer state are split over data-parallel ranks (ZeRO-1 to 3).

With ZeRO-3 the weights of a unit (embedding, a block, the head) are whole only while it computes.

They are gathered before its forward pass and freed after it, gathered again before its backward pass and freed when
the gradient of its input is known; the weights of the unit that comes next are asked for meanwhile. A block that the
backward pass computes again finds its weights there: they are gathered before its backward pass begins.

The cadence is MegaScale's (arXiv 2402.15627, section 3.2). With ZeRO-1 and ZeRO-2 parameters are gathered and gradients
reduced once per step and bucket, however many micro-batches there are. The gathers are started right after the update,
in order of use, so that they overlap the loading of data and the forward pass of what comes before; a bucket is waited
for by the first module that needs it. A bucket's reduction is started as soon as its last gradient is there.

Ranks of the axis `context` see other tokens of the same sequences, so they are data-parallel ranks to everything here:
parameters are split over `shard` and `context` together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.core.layout import AXES, Axis, Shard
from phalanx.kernels.fp8 import requantise
from phalanx.model.block import Block
from phalanx.model.decoder import DecoderPart
from phalanx.model.layers import Matrix
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Group, Groups
from phalanx.parallel.zero.bucket import Bucket, BucketGroups, Kind, StoredParameter, plan_places, stored_parameters
from phalanx.parallel.zero.reductions import CudaLane, Reductions


class Unit:
    """A module whose weights are gathered together.

    Args:
        module: what is called.
        buckets: those that hold its weights; a tied weight's belongs to two units.
        in_backward: whether its backward pass reads weights (that of an embedding does not).
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], in_backward: bool) -> None:
        self.buckets = list(buckets)
        self.needs_backward = in_backward
        self.before: Unit | None = None
        self.after: Unit | None = None
        self._backward = False
        module.register_forward_pre_hook(self._enter_forward, with_kwargs=True)
        module.register_forward_hook(self._leave_forward)

    def prefetch(self) -> None:
        """Start to gather."""
        for bucket in self.buckets:
            bucket.need()

    def release(self) -> None:
        """Free the weights."""
        self._backward = False
        for bucket in self.buckets:
            bucket.release()

    def _fetch(self, then: Unit | None) -> None:
        self.prefetch()
        if then is not None:
            then.prefetch()
        for bucket in self.buckets:
            bucket.wait()

    def _enter_forward(self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._backward:  # computed again
            return
        self._fetch(self.after)
        if self.needs_backward and torch.is_grad_enabled():
            for tensor in _differentiable((*arguments, *named.values())):
                tensor.register_hook(self._leave_backward)  # type: ignore[no-untyped-call]
                break

    def _leave_forward(self, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        if self._backward:
            return
        self.release()
        if self.needs_backward and torch.is_grad_enabled():
            for tensor in _differentiable(output if isinstance(output, tuple) else (output,)):
                tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]

    def _enter_backward(self, _gradient: Tensor) -> None:
        if not self._backward:
            self._backward = True
            before = self.before
            self._fetch(before if before is not None and before.needs_backward else None)

    def _leave_backward(self, _gradient: Tensor) -> None:
        self.release()


def link(units: Sequence[Unit]) -> None:
    """Tell units, in order of use, which comes before and after each."""
    for unit, following in itertools.pairwise(units):
        unit.after, following.before = following, unit


def _differentiable(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


Initial = Callable[[str, Shard], Tensor]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Whole gradients that may be on their way when another is sent, by ZeRO stage: they are what these stages save.
_IN_FLIGHT = {2: 3, 3: 1}


class MemoryBytes(NamedTuple):
    """Memory that this rank holds now: measured sizes of storages, bytes.

    Attributes:
        parameters: weights as the model uses them, and masters where these have memory of their own.
        gradients: whole ones and sums.
    """

    parameters: int
    gradients: int


class ShardedChunk:
    """A `DecoderPart` on flat buckets; makes its memory, and fills it.

    One step is: `gather`, the forward and backward passes of all micro-batches with `last_backward` before the last
    backward pass, `reduce`, `finish`, the update of `parameters`, `zero_grad`.

    Args:
        part: on the meta device, perhaps with seams replaced. Parameters that are not on the meta device (a tied head
            whose embedding is in another chunk of this process) are left alone.
        shards: what of each logical parameter is in the part, as its tensor-parallel rank holds it.
        groups: of this rank.
        config: `zero`, `bucket_bytes`, `reduce_dtype`.
        initial: values of a block of a logical parameter; None leaves zeros (to be loaded).
        device: where the memory is.
        whole_blocks: wait for all weights of a block before its forward pass: where that is compiled.

    Attributes:
        part: with parameters that have memory.
        parameters: logical name to this rank's rows of the master, fp32, perhaps none; in the order of the table.
        shards: what each of `parameters` is of the logical one.
    """

    def __init__(
        self,
        part: DecoderPart,
        shards: Mapping[str, Shard],
        groups: Groups,
        config: ParallelConfig,
        *,
        initial: Initial | None = None,
        device: torch.device | str = "cpu",
        whole_blocks: bool = False,
    ) -> None:
        self.part = part
        self._whole_blocks = whole_blocks
        self._groups, self._config, self._device = groups, config, torch.device(device)
        self._tensor_shards = shards
        self._split_axes = _used(groups, "shard", "context")
        self._split = _own_group(groups, "shard", "context")
        self._buckets = self._make_buckets()
        self._reductions = Reductions(CudaLane(self._device) if self._device.type == "cuda" else None)
        self._last = False
        self._seen: dict[Bucket, set[int]] = {bucket: set() for bucket in self._buckets}
        # The order in which gradients are complete: what is used first has its gradient last.
        self._to_reduce = sorted(self._buckets, key=lambda bucket: -bucket.place.first_use)
        self._passed: set[Bucket] = set()  # reduced since the present backward pass began
        self.parameters, self.shards = self._logical()
        self._fill(initial)
        self._stale: set[Matrix] = set()  # quantised from weights that have since been gathered anew
        self._hold_quantised()
        self._units = self._make_units()
        self._add_hooks()

    # One step

    def gather(self) -> None:
        """Start to make the weights whole from the updated masters, in order of use."""
        # What ZeRO-3 still holds gathered is from before the update.
        for unit in self._units:
            unit.release()
        # All at once and in order of use: the first modules wait shortly, the others' weights come while these compute.
        for bucket in self._buckets:
            if bucket.keeps_weights:
                bucket.gather()
        self._stale = {matrix for matrix in self._matrices(self.part) if matrix.quantised is not None}
        if self._units:
            self._units[0].prefetch()

    def wait(self) -> None:
        """Wait for all weights that were asked for; modules that are called wait for theirs by themselves."""
        for bucket in self._buckets:
            bucket.wait()

    def last_backward(self) -> None:
        """The coming backward pass is the last of the step: reduce each bucket as soon as its gradients are there.

        Not for schedules that put weight gradients off: those of earlier micro-batches may still be to come. They call
        `reduce` when the last has been made.
        """
        self._last = True
        self._passed.clear()
        for seen in self._seen.values():
            seen.clear()

    def reduce(self) -> None:
        """Start the reductions that have not been started, for gradients that were made without autograd's hooks."""
        if not self._last:
            self.last_backward()
        for bucket in self._to_reduce:
            if bucket not in self._passed:
                self._start(bucket)

    def finish(self) -> None:
        """Wait for all reductions; the sums over all ranks are then the gradients of `parameters`."""
        self.reduce()
        self._reductions.finish()
        # Only now: the other stage has its sum when its backward passes are done, which may be waiting for ours.
        for bucket in self._buckets:
            self._reductions.start(bucket.add_tied())
        self._reductions.finish()
        for bucket in self._buckets:
            bucket.bind()
        self._last = False
        self._passed.clear()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for bucket in self._buckets:
            bucket.drop_gradients()

    def memory_bytes(self) -> MemoryBytes:
        """What parameters and gradients take on this rank at this moment."""
        held = [bucket.tensors() for bucket in self._buckets]
        parameters = [t for weights, masters, _ in held for t in (*weights, *masters)]
        return MemoryBytes(stored_bytes(parameters), stored_bytes(t for *_, gradients in held for t in gradients))

    def share_embedding(self, last: DecoderPart) -> None:
        """Let the head of `last` use the embedding of this chunk: both are in this process (schedule ``"zbv"``).

        To be called before `last` is made a chunk, which then leaves the weight alone: its gradients from both places
        are reduced, and the weight updated, here. Call this chunk's `last_backward` after the last backward of `last`.
        """
        assert self.part.embedding is not None and last.head is not None
        weight = self.part.embedding.weight
        last.head.weight, last.head.parts = weight, ()
        last.head.register_forward_pre_hook(partial(_wait_for, self._holding([weight], keeps_weights=True)))
        if self._units:
            self._units.append(Unit(last.head, self._holding([weight], keeps_weights=False), in_backward=True))

    # Making

    def _make_buckets(self) -> list[Bucket]:
        unit_of = self._unit_numbers() if self._config.zero == 3 and self._split.size > 1 else {}
        table = parameter_table(self.part.config)

        def kind_of(stored: StoredParameter) -> Kind:
            name = stored.parts[0].name
            vectors = stored.meta.dim() == 1
            multiplied = not vectors and table[name].role in ("input", "output")
            return Kind(
                # The gradient of such a matrix is made in the compute dtype in any case: the numbers are the same.
                dtype=self.part.compute_dtype if multiplied else torch.float32,
                vectors=vectors,
                shared=self._groups.layout.tensor > 1 and "tensor" not in self._tensor_shards[name].axes,
                tied=name == "embedding" and self._is_tied(),
                unit=-1 if vectors else unit_of.get(id(stored.holders[0][0]), -1),
            )

        stored = stored_parameters(self.part)
        places = plan_places(stored, kind_of, self.part.config.hidden, self._config.bucket_bytes)
        wire = _DTYPES[self._config.reduce_dtype]
        return [
            Bucket(place, self._bucket_groups(place.kind), self._config.zero, wire, self._device) for place in places
        ]

    def _bucket_groups(self, kind: Kind) -> BucketGroups:
        axes: tuple[Axis, ...] = ("replicate", "tensor") if kind.shared else ("replicate",)
        add = _own_group(self._groups, *axes)
        tied = tied_group(self._groups) if kind.tied else None
        return BucketGroups(self._split, (add,) if add.size > 1 else (), tied)

    def _is_tied(self) -> bool:
        """Whether another stage holds the embedding too."""
        whole = self.part.embedding is not None and self.part.head is not None
        return self.part.config.tie_embeddings and not whole and self._config.schedule != "zbv"

    def _tops(self) -> list[nn.Module]:
        tops = [self.part.embedding, *self.part.layers, self.part.head]
        return [module for module in tops if module is not None]

    def _unit_numbers(self) -> dict[int, int]:
        return {id(module): number for number, top in enumerate(self._tops()) for module in top.modules()}

    def _make_units(self) -> list[Unit]:
        if all(bucket.keeps_weights for bucket in self._buckets):
            return []
        units = [
            Unit(
                top,
                self._holding(top.parameters(), keeps_weights=False),
                in_backward=top is not self.part.embedding,
            )
            for top in self._tops()
        ]
        link(units)
        return units

    def _holding(self, parameters: Iterable[nn.Parameter], keeps_weights: bool) -> list[Bucket]:
        """The buckets with any of `parameters`: those that stay gathered, or the others."""
        wanted = {id(parameter) for parameter in parameters}
        some = [bucket for bucket in self._buckets if bucket.keeps_weights == keeps_weights]
        return [bucket for bucket in some if any(id(parameter) in wanted for parameter in bucket.parameters)]

    def _add_hooks(self) -> None:
        norm, head = self.part.norm, self.part.head
        for module in (*self._waiting(), *([] if norm is None else [norm])):
            # The last norm waits for the head, whose logits are not taken by a call of the module.
            needed = [*module.parameters(), *(head.parameters() if module is norm and head is not None else ())]
            buckets = self._holding(needed, keeps_weights=True)
            module.register_forward_pre_hook(partial(self._make_ready, buckets, self._matrices(module)))
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._accumulated, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _waiting(self) -> Iterator[nn.Module]:
        """Modules before whose forward pass their weights must be there.

        A serial block uses them one after the other, so its first product need not wait for its last weights. In other
        blocks seams use the weights of their neighbours, and within a compiled one nothing can wait.
        """
        for top in self._tops():
            if isinstance(top, Block) and top.kind == "serial" and not self._whole_blocks:
                yield from top.children()
            else:
                yield top

    @staticmethod
    def _matrices(top: nn.Module) -> list[Matrix]:
        return [module for module in top.modules() if isinstance(module, Matrix)]

    def _hold_quantised(self) -> None:
        """Quantise once per step what stays whole; what is gathered for every use (ZeRO-3) is quantised for each."""
        kept = {id(parameter) for b in self._buckets if b.keeps_weights for parameter in b.parameters}
        for matrix in self._matrices(self.part):
            if matrix.fp8 and id(matrix.weight) in kept:
                matrix.hold_cast()

    def _make_ready(self, buckets: list[Bucket], matrices: list[Matrix], module: nn.Module, arguments: object) -> None:
        """Before a forward pass: the weights are there, and quantised where they are new."""
        _wait_for(buckets, module, arguments)
        stale = self._stale.intersection(matrices)
        requantise([(m.weight, m.quantised) for m in matrices if m in stale and m.quantised is not None])
        self._stale -= stale

    def _logical(self) -> tuple[dict[str, nn.Parameter], dict[str, Shard]]:
        found, shards = {}, {}
        first_replica = self._groups.layout.index(self._groups.rank, ("replicate",)) == 0
        for bucket in self._buckets:
            copy = bucket.place.kind.tied and self.part.embedding is None
            for run, master in bucket.masters:
                held = self._tensor_shards[run.name]
                owner = held.owner and first_replica and not copy
                found[run.name] = master
                shards[run.name] = held.rows(run.start, run.count, self._split_axes, owner=owner)
        order = [name for name in parameter_table(self.part.config) if name in found]
        return {name: found[name] for name in order}, {name: shards[name] for name in order}

    def _fill(self, initial: Initial | None) -> None:
        if initial is None:
            return
        for name, parameter in self.parameters.items():
            if parameter.numel():
                parameter.data.copy_(initial(name, self.shards[name]))

    # Gradients

    def _accumulated(self, bucket: Bucket, index: int, _parameter: Tensor) -> None:
        """A gradient of one micro-batch has been added."""
        bucket.collect(index)
        # Hooks are the only places where Python runs during a backward pass, so reductions under way move on here.
        self._reductions.advance()
        # ZeRO-1 and 2 keep whole gradients of earlier micro-batches and reduce their sum, once. ZeRO-3 has no room for
        # that, and reduces after every backward pass.
        if not self._last and bucket.keeps_weights:
            return
        if bucket in self._passed:  # all its gradients came before: another backward pass has begun
            assert not self._last, "a backward pass after the one that was said to be the last"
            self._passed.clear()
        seen = self._seen[bucket]
        seen.add(index)
        if len(seen) == len(bucket.parameters):
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Start what is complete, in an order that is the same on all ranks."""
        for bucket in self._to_reduce:
            if bucket in self._passed or (not self._last and bucket.keeps_weights):
                continue
            # Autograd may complete a later bucket first, and not on every rank alike. It waits for its turn, because
            # collectives of one group are matched by their order.
            if len(self._seen[bucket]) < len(bucket.parameters):
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        self._seen[bucket].clear()
        # Every reduction under way holds memory of a bucket: the oldest are waited for before one more is begun.
        if bucket.zero in _IN_FLIGHT:
            self._reductions.finish(leave=_IN_FLIGHT[bucket.zero])
        self._reductions.start(bucket.reduce(self._last), bucket.sent)
        self._passed.add(bucket)


def _wait_for(buckets: list[Bucket], _module: nn.Module, _arguments: object) -> None:
    for bucket in buckets:
        bucket.wait()


def _own_group(groups: Groups, *axes: Axis) -> Group:
    """A group over `axes` that nothing else uses while a backward pass goes on.

    Reductions go on when they can, which is not at the same moment on all ranks; among the collectives of layers (over
    `tensor` and `context`) they would be taken for one another.
    """
    used = _used(groups, *axes)
    if not used:
        return Group.alone(groups.rank)
    if "tensor" in used or "context" in used:
        return groups.named("zero", groups.layout.members(groups.rank, used), used)
    return groups.group(*used)


def tied_group(groups: Groups) -> Group:
    """This rank and the one at the same place in the other of the first and the last pipeline stage."""
    layout, here = groups.layout, groups.layout.coordinates(groups.rank)
    ranks = [layout.rank(here._replace(pipeline=stage)) for stage in (0, layout.pipeline - 1)]
    return groups.named("tied", ranks, ("pipeline",))


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def _used(groups: Groups, *axes: Axis) -> tuple[Axis, ...]:
    return tuple(axis for axis in AXES if axis in axes and groups.layout.size(axis) > 1)
