"""Spreads a part of a decoder over a tensor-parallel group, by replacing its seams from outside.

The part is built from `phalanx.parallel.tensor.sizes.local_config`, so its matrices are this rank's already; here the
modules that use them learn to gather and to scatter. The model itself knows nothing of it.

Gradients of what is the same on all ranks (norms, output biases, norms of queries and keys, learned positions) are
partial afterwards: each rank has those of its rows or heads, and whoever reduces gradients adds them over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.model.block import Block
from phalanx.model.config import ModelConfig
from phalanx.model.context import Context
from phalanx.model.layers import InputProjection, OutputProjection
from phalanx.model.part import DecoderPart
from phalanx.parallel.config import TensorOverlap
from phalanx.parallel.deferred import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.chunked import ChunkedOverlap
from phalanx.parallel.tensor.fused import FusedOverlap, require_symmetric_memory
from phalanx.parallel.tensor.linear import Spread
from phalanx.parallel.tensor.overlap import Overlap, PlainOverlap
from phalanx.parallel.tensor.rows import local_rows
from phalanx.parallel.tensor.seams import (
    GatheredInput,
    ScatteredOutput,
    SplitEmbedding,
    SplitLossHead,
    pair_inputs,
    pair_outputs,
)
from phalanx.parallel.tensor.tiles import tiles_on_gpu

Registered = Callable[[Group], str]
"""The name under which torch knows a group, made known to it first: `phalanx.parallel.mesh.Mesh.registered`."""


def spread_tensor(
    part: DecoderPart,
    group: Group,
    config: ModelConfig,
    *,
    overlap: TensorOverlap = "none",
    chunks: int = 4,
    queue: WeightQueue | None = None,
    registered: Registered | None = None,
) -> None:
    """Replace the seams of `part`, in place; its stream is rows of tokens then, its context `local_context`.

    Args:
        part: built from ``local_config(config, group.size)``; its parameters stay the same objects.
        group: the tensor-parallel group. In a group of one nothing changes, but that projections use `queue` if given.
        config: of the whole model.
        overlap: how collectives run beside matrix products, see `phalanx.parallel.tensor.overlap`; not ``"auto"``.
        chunks: of ``"chunked"``.
        queue: where weight gradients go while it is deferring.
        registered: names the group for ``"fused"`` and ``"tiles"``, which need it.

    Raises:
        UserError: the back end cannot run here.
    """
    if group.size == 1 and queue is None:
        return
    spread = Spread(make_overlap(overlap, group, chunks, registered), part.compute_dtype, queue)
    for block in part.layers:
        assert isinstance(block, Block), "a part is spread once, before anything else wraps its blocks"
        _spread_block(block, spread, config)
    if group.size == 1:
        return
    if part.embedding is not None:
        part.embedding = SplitEmbedding(part.embedding, group)  # type: ignore[assignment]
    if part.head is not None:
        part.head = SplitLossHead(part.head, group, config.vocab_size)  # type: ignore[assignment]


def local_context(context: Context, group: Group) -> Context:
    """A part's context on one rank of `group`: rows of the stream are cut, queries are not.

    Args:
        context: with `rows_T` of all tokens of the sequences (or of their local part, under context parallel).

    Raises:
        UserError: the ranks cannot have equally many rows.
    """
    rows = local_rows(context.batch * context.length, group)
    if group.size == 1 or context.rows_T is None:
        return context
    queries = context.attention_rows_BS
    if queries is None:
        queries = context.rows_T.view(context.batch, context.length)
    return replace(context, rows_T=context.rows_T[rows], attention_rows_BS=queries)


def make_overlap(kind: TensorOverlap, group: Group, chunks: int, registered: Registered | None = None) -> Overlap:
    """The back end named `kind`; the plain one in a group of one.

    Raises:
        UserError: it cannot run here.
    """
    if kind == "none" or group.size == 1:
        return PlainOverlap(group)
    if kind == "chunked":
        return ChunkedOverlap(group, chunks)
    if kind == "auto":
        cure = "decide it with phalanx.parallel.tensor.reach.choose_overlap, or set it to 'chunked'"
        raise UserError("is not decided yet", cure=cure, field="parallel.tensor_overlap", value=kind)
    if registered is None:
        problem = "needs a group that torch knows by a name"
        raise UserError(problem, cure="pass Mesh.registered", field="parallel.tensor_overlap", value=kind)
    name = registered(group)
    require_symmetric_memory(name, kind)
    return tiles_on_gpu(group, name) if kind == "tiles" else FusedOverlap(group, name)


def _spread_block(block: Block, spread: Spread, config: ModelConfig) -> None:
    group = spread.overlap.group
    if block.kind == "parallel" and group.size > 1:
        _spread_pairs(block, spread)
    else:
        for name, module in list(block.named_children()):
            if isinstance(module, InputProjection):
                setattr(block, name, GatheredInput(module, spread))
            elif isinstance(module, OutputProjection):
                setattr(block, name, ScatteredOutput(module, spread))
    first = group.index * (config.heads // group.size)
    block.attention.how = replace(block.attention.how, first_head=first, num_heads=config.heads)


def _spread_pairs(block: Block, spread: Spread) -> None:
    """The parallel block's projections, two and two."""
    inputs = pair_inputs(block.attention_input, block.mlp_input, spread)
    block.attention_input, block.mlp_input = inputs  # type: ignore[assignment]
    outputs = pair_outputs(block.attention_output, block.mlp_output, spread)
    block.attention_output, block.mlp_output = outputs  # type: ignore[assignment]
