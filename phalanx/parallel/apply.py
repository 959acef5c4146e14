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
from phalanx.parallel.zero.chunk import ShardedChunk
from phalanx.telemetry.spans import Recorder


@dataclass(frozen=True)
class Build:
    """How the parts of a model are made, whatever the layout."""

    sequence_length: int  # of the samples, tokens
    device: torch.device
    compute_dtype: torch.dtype  # of matrix products; master weights are float32
    seed: int  # of the initial weights
    blank: bool = False  # leave the weights zero, since a restore fills them next
    recompute: Recompute = "none"
    offload: float = 0.0  # share of each stage's layers whose activations wait on the host
    compile: bool = False  # compile each block, without what waits for other ranks inside of one
    fp8_layers: Container[int] = ()  # those whose matrices are multiplied in 8 bits
    # the name under which torch finds a group, for operators over symmetric memory; None: there are none
    registered: Callable[[Group], str] | None = None
    recorder: Recorder | None = None  # where passes are recorded


def build_engine(model: ModelConfig, config: ParallelConfig, groups: Groups, build: Build) -> Engine:
    """This rank's part of `model` with its initial weights; all ranks call it, with all axes of `config` given.

    Raises:
        UserError: something does not divide.
    """
    assert config.layout == groups.layout, "the groups are of another layout"
    placement = Placement(1, 1)
    if config.pipeline > 1:
        placement = placement_of(config.schedule, config.pipeline, config.num_chunks)
    spans = split_stages(model, build.sequence_length, placement.stages)
    spread = ContextSpread(model, groups.group("context"), config.context_method, build.sequence_length)
    rank = groups.layout.index(groups.rank, ("pipeline",))
    held: dict[int, Held] = {}
    for number in placement.stages_of(rank):
        first = next(iter(held.values()), None)
        held[number] = _hold(spans[number], model, config, groups, build, first)
    fill = build.compile or build.device.type == "cuda"
    engine = Engine(model, config, groups, spread, held, placement, build.device, fill=fill, recorder=build.recorder)
    engine.weights_changed()
    return engine


def _hold(
    span: StageSpan, model: ModelConfig, config: ParallelConfig, groups: Groups, build: Build, first: Held | None
) -> Held:
    """One stage of this rank; `first` is the first of this rank's stages, if this is another."""
    # The order is fixed: a part without memory; its seams; what is computed again and what goes to the host; compiling;
    # and last the flat memory, into which all parameters that are there by now are laid.
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
    # Where the embedding and the head that is tied to it are on one rank (the V of zbv), they are one parameter.
    tied = model.tie_embeddings and part.head is not None and part.embedding is None
    if tied and first is not None and first.chunk.part.embedding is not None:
        first.chunk.share_embedding(part)
    table = parameter_table(model)

    def initial(name: str, shard: Shard) -> Tensor:
        # A hash of (seed, name, element): every rank makes its own slices, with the same bits in every layout.
        offsets, shape = shard.offsets, shard.sizes
        return initial_values(model, table[name], build.seed, offsets=offsets, shape=shape, device=build.device)

    chunk = ShardedChunk(
        part,
        tensor_shards(model, config.tensor, tensor.index),
        groups,
        config,
        initial=None if build.blank else initial,
        device=build.device,
        whole_blocks=build.compile,
    )
    return Held(Stage(part, tensor, build.device), chunk, queue)
