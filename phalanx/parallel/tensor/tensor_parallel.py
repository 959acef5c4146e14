"""Spreads a part of a decoder over a tensor-parallel group, by replacing its seams from outside.

*Seams* are the modules that take the places of a decoder's when a group of ranks splits its matrices.

Each keeps the stored parameters of the module it replaces, under the same names and with the same `parts`; the
parameters are read at every call, so they may be replaced (materialised, sharded) afterwards. The stream between them
is this rank's rows (R, D); q, k, v and the MLP's inside are all tokens by this rank's heads and columns.

The parallel block gathers once and scatters once: its two input projections are one operation, made when the first is
called, the larger product of the MLP beside the gather; of its two output projections the second does the work of both.

Shapes: T tokens, R rows of the stream on this rank, D hidden, N rows of a local weight.

The part is built from `phalanx.parallel.feasible.local_config`, so its matrices are this rank's already; here the
modules that use them learn to gather and to scatter. The model itself knows nothing of it.

Gradients of what is the same on all ranks (norms, output biases, norms of queries and keys, learned positions) are
partial afterwards: each rank has those of its rows or heads, and whoever reduces gradients adds them over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.kernels.cross_entropy import LogitTerms
from phalanx.model.block import Block
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart
from phalanx.model.forward_context import Context
from phalanx.model.layers import Embedding, InputProjection, LossHead, OutputProjection, Stored
from phalanx.model.recompute import first_product
from phalanx.parallel.config import TensorOverlap
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.fused import FusedOverlap, require_symmetric_memory
from phalanx.parallel.tensor.overlap import ChunkedOverlap, Overlap, PlainOverlap
from phalanx.parallel.tensor.parallel_linear import Spread, gather_products, products_scatter
from phalanx.parallel.tensor.tiles import tiles_on_gpu
from phalanx.parallel.tensor.vocabulary_parallel import embed_rows, full_logits, split_cross_entropy


def local_rows(tokens: int, group: Group) -> slice:
    """This rank's rows of the stream of `tokens` tokens (B * S, of the local part of the sequences).

    Raises:
        UserError: the ranks cannot have equally many.
    """
    if tokens % group.size:
        raise UserError(
            f"does not divide the {tokens} tokens of a micro-batch, whose rows the ranks share",
            cure=f"make micro-batch times sequence length a multiple of {group.size}",
            field="parallel.tensor",
            value=group.size,
        )
    rows = tokens // group.size
    return slice(group.index * rows, (group.index + 1) * rows)


class GatheredInput(Stored):
    """An input projection of gathered rows: (R, D) -> (T, N)."""

    bias: nn.Parameter | None

    def __init__(self, whole: InputProjection, spread: Spread) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = whole.weight, whole.bias, whole.parts
        self.spread = spread

    def forward(self, x_RD: Tensor) -> Tensor:
        """Gather and project."""
        return gather_products(self.spread, x_RD, [self.weight], [self.bias])[0]


class ScatteredOutput(Stored):
    """An output projection whose sum over ranks is scattered: (T, N) -> (R, D)."""

    bias: nn.Parameter | None

    def __init__(self, whole: OutputProjection, spread: Spread) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = whole.weight, whole.bias, whole.parts
        self.spread = spread

    def forward(self, inner_TN: Tensor, residual_RD: Tensor | None = None) -> Tensor:
        """Project and scatter, then add the bias, and the residual where one is given."""
        out = products_scatter(self.spread, [inner_TN], [self.weight])
        return _added(out, [self.bias], residual_RD)


@dataclass
class _Shared:
    """What two seams of one parallel block hand to each other within one call of the block.

    A recomputation may stop between the two, so a value may be left behind; the next call overwrites it.
    """

    tensor: Tensor | None = None
    modules: list[Stored] = field(default_factory=list)

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "the two seams of a parallel block are called one after the other"
        return tensor


class PairedInput(GatheredInput):
    """One of the two input projections of a parallel block; that of attention, called first, runs both.

    Both read the same rows, so one gather feeds them, and backward scatters the sum of their gradients.
    """

    def __init__(self, whole: InputProjection, spread: Spread, shared: _Shared, first: bool) -> None:
        super().__init__(whole, spread)
        self.shared, self.first = shared, first
        shared.modules.append(self)

    def forward(self, x_RD: Tensor) -> Tensor:
        """Project; the result of the other projection waits for its call."""
        if not self.first:
            return self.shared.take()
        attention, mlp = self.shared.modules
        weights, biases = [_weight(mlp), _weight(attention)], [_bias(mlp), _bias(attention)]
        wide, narrow = first_product(gather_products, self.spread, x_RD, weights, biases)
        self.shared.tensor = wide
        return narrow


class PairedOutput(ScatteredOutput):
    """One of the two output projections of a parallel block; that of the MLP, called second, runs both.

    The first gives back the residual it is given (None without one), for the second to add to.
    """

    def __init__(self, whole: OutputProjection, spread: Spread, shared: _Shared, first: bool) -> None:
        super().__init__(whole, spread)
        self.shared, self.first = shared, first
        shared.modules.append(self)

    def forward(self, inner_TN: Tensor, residual_RD: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Put aside what attention gives; or project both, scatter, add biases and residual."""
        if self.first:
            self.shared.tensor = inner_TN
            return residual_RD
        modules = self.shared.modules
        out = products_scatter(self.spread, [self.shared.take(), inner_TN], [_weight(m) for m in modules])
        return _added(out, [_bias(m) for m in modules], residual_RD)


class SplitEmbedding(Stored):
    """Token rows of a split vocabulary, plus learned position rows: this rank's rows of the stream."""

    position_weight: nn.Parameter | None

    def __init__(self, whole: Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.position_weight, self.parts = whole.weight, whole.position_weight, whole.parts
        self.group = group

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Rows (R, D) for tokens (B, S) at positions 0, 1, 2 … or at `positions_BS`."""
        rows = local_rows(tokens_BS.numel(), self.group)
        x_RD = embed_rows(self.group, self.weight, tokens_BS.flatten())
        if self.position_weight is None:
            return x_RD
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        return x_RD + F.embedding(positions_BS.flatten()[rows], self.position_weight)


class SplitLossHead(Stored):
    """Logits and loss over a split vocabulary, of this rank's rows of hidden states.

    Args:
        vocabulary: words of the whole vocabulary, its padding not counted.
    """

    def __init__(self, whole: LossHead, group: Group, vocabulary: int) -> None:
        super().__init__()
        self.weight, self.parts = whole.weight, whole.parts
        self.group, self.compute = group, whole.compute
        self.terms = LogitTerms(vocabulary, whole.softcap, whole.z_loss)

    def forward(self, hidden_RD: Tensor, targets_T: Tensor, weights_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over all tokens of weighted loss and weighted z-loss, the same on every rank."""
        return split_cross_entropy(self.group, hidden_RD, self.weight, targets_T, weights_T, self.terms)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Float32 logits (T, V) of all tokens, on every rank: for evaluation of a few tokens."""
        return full_logits(self.group, hidden_RD, self.weight, self.terms)


def pair_inputs(attention: InputProjection, mlp: InputProjection, spread: Spread) -> tuple[PairedInput, PairedInput]:
    """The two input projections of a parallel block, joined."""
    shared = _Shared()
    return PairedInput(attention, spread, shared, True), PairedInput(mlp, spread, shared, False)


def pair_outputs(
    attention: OutputProjection, mlp: OutputProjection, spread: Spread
) -> tuple[PairedOutput, PairedOutput]:
    """The two output projections of a parallel block, joined."""
    shared = _Shared()
    return PairedOutput(attention, spread, shared, True), PairedOutput(mlp, spread, shared, False)


def _added(out_RD: Tensor, biases: list[nn.Parameter | None], residual_RD: Tensor | None) -> Tensor:
    """`out` plus biases (each of one or several stacked rows of D), plus a residual in its own type."""
    for bias in biases:
        if bias is not None:
            out_RD = out_RD + bias.view(-1, out_RD.shape[1]).sum(0).to(out_RD.dtype)
    return out_RD if residual_RD is None else residual_RD + out_RD


def _weight(module: Stored) -> nn.Parameter:
    return module.get_parameter("weight")


def _bias(module: Stored) -> nn.Parameter | None:
    assert isinstance(module, GatheredInput | ScatteredOutput)
    return module.bias


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
        cure = "decide it with phalanx.parallel.tensor.fused.choose_overlap, or set it to 'chunked'"
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
