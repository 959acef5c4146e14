"""A model chunk whose parameters, gradients and optimizer state are split over data-parallel ranks (ZeRO-1 to 3).

With ZeRO-3 the weights of a unit (embedding, a block, the head) are whole only while it computes. They are gathered
before its forward pass and freed after it, gathered again before its backward pass and freed when the gradient of its
input is known; the weights of the unit that comes next are asked for meanwhile. A block that the backward pass computes
again finds its weights there: they are gathered before its backward pass begins.

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
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.core.layout import AXES, Axis, Shard
from phalanx.kernels.fp8 import requantise
from phalanx.model.decoder import Block, DecoderPart
from phalanx.model.layers import Matrix
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Group, Groups
from phalanx.parallel.zero.bucket import (
    Bucket,
    BucketGroups,
    BucketKind,
    StoredParameter,
    plan_places,
    stored_parameters,
)
from phalanx.parallel.zero.reductions import CudaLane, Reductions


class _Unit:
    """A module whose weights are gathered together; a tied weight's buckets belong to two units."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], in_backward: bool) -> None:
        self.buckets = list(buckets)
        self.needs_backward = in_backward  # that of an embedding reads no weights
        self.before: _Unit | None = None
        self.after: _Unit | None = None
        self._backward = False
        module.register_forward_pre_hook(self._enter_forward, with_kwargs=True)
        module.register_forward_hook(self._leave_forward)

    def prefetch(self) -> None:
        for bucket in self.buckets:
            bucket.need()

    def release(self) -> None:
        self._backward = False
        for bucket in self.buckets:
            bucket.release()

    def _fetch(self, then: _Unit | None) -> None:
        self.prefetch()
        if then is not None:
            then.prefetch()
        for bucket in self.buckets:
            bucket.wait()

    def _enter_forward(self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._backward:  # computed again: its weights are there, and go when its backward pass is done
            return
        self._fetch(self.after)
        if self.needs_backward and torch.is_grad_enabled():
            # The gradient of the input is the last thing that a backward pass makes: when it is known, the weights go.
            for tensor in _differentiable((*arguments, *named.values())):
                tensor.register_hook(lambda _gradient: self.release())  # type: ignore[no-untyped-call]
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


def _differentiable(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


Initial = Callable[[str, Shard], Tensor]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Whole gradients that may be on their way when another is sent, by ZeRO stage: they are what these stages save.
_IN_FLIGHT = {2: 3, 3: 1}


class ShardedChunk:
    """A `DecoderPart` on flat buckets; makes its memory, and fills it.

    One step is: `gather`, the forward and backward passes of all micro-batches with `last_backward` before the last
    backward pass, `reduce`, `finish`, the update of `parameters`, `zero_grad`.
    """

    def __init__(
        self,
        # on the meta device, perhaps with seams replaced. Parameters that are not on the meta device (a tied head whose
        # embedding is in another chunk of this process) are left alone
        part: DecoderPart,
        # what of each logical parameter is in the part, as its tensor-parallel rank holds it
        shards: Mapping[str, Shard],
        groups: Groups,
        config: ParallelConfig,  # `zero`, `bucket_bytes`, `reduce_dtype`
        *,
        initial: Initial | None = None,  # values of a block of a logical parameter; None leaves zeros (to be loaded)
        device: torch.device | str = "cpu",
        whole_blocks: bool = False,  # wait for all weights of a block before its forward pass: where that is compiled
    ) -> None:
        self.part = part  # with parameters that have memory
        self._whole_blocks = whole_blocks
        self._groups, self._config, self._device = groups, config, torch.device(device)
        self._tensor_shards = shards
        self._split_axes = _used(groups, "shard", "context")
        self._split = _own_group(groups, "shard", "context")
        self._tops = [top for top in (part.embedding, *part.layers, part.head) if top is not None]
        self._buckets = self._make_buckets()
        self._reductions = Reductions(CudaLane(self._device) if self._device.type == "cuda" else None)
        self._last = False
        self._seen: dict[Bucket, set[int]] = {bucket: set() for bucket in self._buckets}
        # The order in which gradients are complete: what is used first has its gradient last.
        self._to_reduce = sorted(self._buckets, key=lambda bucket: -bucket.place.first_use)
        self._passed: set[Bucket] = set()  # reduced since the present backward pass began
        # `shards`: what each of `parameters` is of the logical one.
        # `parameters`: logical name to this rank's rows of the master, fp32, perhaps none; in the order of the table.
        self.parameters, self.shards = self._logical()
        for name, parameter in self.parameters.items():
            if initial is not None and parameter.numel():
                parameter.data.copy_(initial(name, self.shards[name]))
        self._stale: set[Matrix] = set()  # quantised from weights that have since been gathered anew
        # What stays whole is quantised once per step; what is gathered for every use (ZeRO-3), for each.
        kept = {id(parameter) for b in self._buckets if b.keeps_weights for parameter in b.parameters}
        for matrix in self._matrices(part):
            if matrix.fp8 and id(matrix.weight) in kept:
                matrix.hold_cast()
        self._units: list[_Unit] = []
        if not all(bucket.keeps_weights for bucket in self._buckets):
            for top in self._tops:
                buckets = self._holding(top.parameters(), keeps_weights=False)
                self._units.append(_Unit(top, buckets, in_backward=top is not part.embedding))
            for unit, following in itertools.pairwise(self._units):
                unit.after, following.before = following, unit
        self._add_hooks()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients of a backward pass stay whole on this rank until the last one (ZeRO-1 and 2)."""
        return all(bucket.keeps_weights for bucket in self._buckets)

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
            self._units.append(_Unit(last.head, self._holding([weight], keeps_weights=False), in_backward=True))

    # Making

    def _make_buckets(self) -> list[Bucket]:
        unit_of: dict[int, int] = {}
        if self._config.zero == 3 and self._split.size > 1:
            unit_of = {id(module): number for number, top in enumerate(self._tops) for module in top.modules()}
        table = parameter_table(self.part.config)
        # Whether another stage holds the embedding too.
        whole = self.part.embedding is not None and self.part.head is not None
        is_tied = self.part.config.tie_embeddings and not whole and self._config.schedule != "zbv"

        def kind_of(stored: StoredParameter) -> BucketKind:
            name = stored.parts[0].name
            vectors = stored.meta.dim() == 1
            multiplied = not vectors and table[name].role in ("input", "output")
            return BucketKind(
                # The gradient of such a matrix is made in the compute dtype in any case: the numbers are the same.
                dtype=self.part.compute_dtype if multiplied else torch.float32,
                vectors=vectors,
                shared=self._groups.layout.tensor > 1 and "tensor" not in self._tensor_shards[name].axes,
                tied=name == "embedding" and is_tied,
                unit=-1 if vectors else unit_of.get(id(stored.holders[0][0]), -1),
            )

        stored = stored_parameters(self.part)
        wire, buckets = _DTYPES[self._config.reduce_dtype], []
        for place in plan_places(stored, kind_of, self.part.config.hidden, self._config.bucket_bytes):
            axes: tuple[Axis, ...] = ("replicate", "tensor") if place.kind.shared else ("replicate",)
            add = _own_group(self._groups, *axes)
            tied: Group | None = None
            if place.kind.tied:
                # This rank and the one at the same place in the other of the first and the last pipeline stage.
                layout = self._groups.layout
                here = layout.coordinates(self._groups.rank)
                ranks = [layout.rank(here._replace(pipeline=stage)) for stage in (0, layout.pipeline - 1)]
                tied = self._groups.named("tied", ranks, ("pipeline",))
                tied.label = "embedding"
            groups = BucketGroups(self._split, (add,) if add.size > 1 else (), tied)
            buckets.append(Bucket(place, groups, self._config.zero, wire, self._device))
        return buckets

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
        for top in self._tops:
            if isinstance(top, Block) and top.kind == "serial" and not self._whole_blocks:
                yield from top.children()
            else:
                yield top

    @staticmethod
    def _matrices(top: nn.Module) -> list[Matrix]:
        return [module for module in top.modules() if isinstance(module, Matrix)]

    def _make_ready(self, buckets: list[Bucket], matrices: list[Matrix], module: nn.Module, arguments: object) -> None:
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

    # Gradients

    def _accumulated(self, bucket: Bucket, index: int, _parameter: Tensor) -> None:
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


def _used(groups: Groups, *axes: Axis) -> tuple[Axis, ...]:
    return tuple(axis for axis in AXES if axis in axes and groups.layout.size(axis) > 1)
