"""The only place where a model is spread: in one fixed order, each step a function of its own room.

Split into stages, then for each stage of this rank: a part on the meta device in tensor-local sizes, its seams
replaced, recompute, and its parameters laid on flat buckets, of which this rank makes only its own slices.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.core.layout import Shard
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart
from phalanx.model.forward_context import leave_out
from phalanx.model.logical_parameters import initial_values
from phalanx.model.offload import make_offload
from phalanx.model.recompute import Recompute
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.context.context_parallel import ContextSpread
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.engine import Engine, Held
from phalanx.parallel.feasible import local_config, tensor_shards
from phalanx.parallel.group import Group, Groups
from phalanx.parallel.pipeline.schedules import Placement, placement_of
from phalanx.parallel.pipeline.split import StageSpan, split_stages
from phalanx.parallel.stage import Stage
from phalanx.parallel.tensor.tensor_parallel import GatheredInput, ScatteredOutput, spread_tensor
from phalanx.parallel.zero.chunk import Initial, ShardedChunk


@dataclass(frozen=True)
class Build:
    """How the parts of a model are made, whatever the layout.

    Attributes:
        sequence_length: of the samples, tokens.
        compute_dtype: of matrix products; master weights are float32.
        seed: of the initial weights.
        offload: share of each stage's layers whose activations wait on the host.
        blank: leave the weights zero, since a restore fills them next.
        compile: compile each block, without what waits for other ranks inside of one.
        fp8_layers: those whose matrices are multiplied in 8 bits.
        registered: the name under which torch finds a group, for its operators over symmetric memory; None where there
            are none.
    """

    sequence_length: int
    device: torch.device
    compute_dtype: torch.dtype
    seed: int
    blank: bool = False
    recompute: Recompute = "none"
    offload: float = 0.0
    compile: bool = False
    fp8_layers: Container[int] = ()
    registered: Callable[[Group], str] | None = None


def build_engine(model: ModelConfig, config: ParallelConfig, groups: Groups, build: Build) -> Engine:
    """This rank's part of `model` with its initial weights; all ranks call it.

    Args:
        model: with vocabulary and longest sequence known.
        config: with all axes given, whose layout is that of `groups`.

    Raises:
        UserError: something does not divide.
    """
    assert config.layout == groups.layout, "the groups are of another layout"
    placement = _placement(config)
    spans = split_stages(model, build.sequence_length, placement.stages)
    spread = ContextSpread(model, groups.group("context"), config.context_method, build.sequence_length)
    rank = groups.layout.index(groups.rank, ("pipeline",))
    held: dict[int, Held] = {}
    for number in placement.stages_of(rank):
        first = next(iter(held.values()), None)
        held[number] = _hold(spans[number], model, config, groups, build, first)
    fill = build.compile or build.device.type == "cuda"
    engine = Engine(model, config, groups, spread, held, placement, build.device, fill=fill)
    engine.weights_changed()
    return engine


def _placement(config: ParallelConfig) -> Placement:
    if config.pipeline == 1:
        return Placement(1, 1)
    return placement_of(config.schedule, config.pipeline, config.num_chunks)


def _hold(
    span: StageSpan, model: ModelConfig, config: ParallelConfig, groups: Groups, build: Build, first: Held | None
) -> Held:
    """One stage of this rank.

    Args:
        first: the first of this rank's stages, if this is another.
    """
    tensor = groups.group("tensor")
    part = DecoderPart(
        local_config(model, config.tensor),
        layers=span.layers,
        first=span.first,
        last=span.last,
        device="meta",
        compute_dtype=build.compute_dtype,
        fp8_layers=build.fp8_layers,
    )
    queue = WeightQueue() if config.splits_backward else None
    spread_tensor(
        part,
        tensor,
        model,
        overlap=config.tensor_overlap,
        chunks=config.tensor_chunks,
        queue=queue,
        registered=build.registered,
    )
    part.set_recompute(build.recompute)
    part.offload = make_offload(build.offload, build.device)
    if build.compile:
        leave_out(m for m in part.layers.modules() if isinstance(m, GatheredInput | ScatteredOutput))
        part.compile()
    if model.tie_embeddings and first is not None:
        _share_embedding(first.chunk, part)
    shards = tensor_shards(model, config.tensor, tensor.index)
    chunk = ShardedChunk(
        part,
        shards,
        groups,
        config,
        initial=None if build.blank else _initial(model, build),
        device=build.device,
        whole_blocks=build.compile,
    )
    return Held(Stage(part, tensor, build.device), chunk, queue)


def _share_embedding(first: ShardedChunk, last: DecoderPart) -> None:
    """Where the embedding and the head that is tied to it are on one rank (the V of zbv), they are one parameter."""
    if first.part.embedding is not None and last.head is not None and last.embedding is None:
        first.share_embedding(last)


def _initial(model: ModelConfig, build: Build) -> Initial:
    table = parameter_table(model)

    def values(name: str, shard: Shard) -> Tensor:
        return initial_values(
            model, table[name], build.seed, offsets=shard.offsets, shape=shard.sizes, device=build.device
        )

    return values
