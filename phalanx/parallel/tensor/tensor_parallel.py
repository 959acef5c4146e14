"""Spreads a part of a decoder over a tensor-parallel group, by replacing its seams from outside.

*Seams* are the modules that take the places of a decoder's when a group of ranks splits its matrices. Each keeps the
stored parameters of the module it replaces, under the same names and with the same `parts`; the parameters are read at
every call, so they may be replaced (materialised, sharded) afterwards. The part is built from
`phalanx.parallel.feasible.local_config`, so its matrices are this rank's already; the model itself knows nothing of it.
The stream between seams is this rank's rows (R, D); q, k, v and the MLP's inside are all tokens by this rank's heads
and columns.

The parallel block gathers once and scatters once: its two input projections are one operation, made when the first is
called, the larger product of the MLP beside the gather; of its two output projections the second does the work of both.

Gradients of what is the same on all ranks (norms, output biases, norms of queries and keys, learned positions) are
partial afterwards: each rank has those of its rows or heads, and the reduction of gradients adds them over the group.

Shapes: T tokens, R rows of the stream on this rank, D hidden, N rows of a local weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.kernels.loss import LogitTerms
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Block, DecoderPart
from phalanx.model.layers import Embedding, InputProjection, LossHead, OutputProjection, Stored
from phalanx.model.recompute import first_product
from phalanx.parallel.config import TensorOverlap
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.fused import FusedOverlap, require_symmetric_memory
from phalanx.parallel.tensor.overlap import ChunkedOverlap, Overlap
from phalanx.parallel.tensor.parallel_linear import Spread, gather_products, local_rows, products_scatter
from phalanx.parallel.tensor.tiles import tiles_on_gpu
from phalanx.parallel.tensor.vocabulary_parallel import embed_rows, full_logits, split_cross_entropy


@dataclass
class _Shared:
    """What two seams of one parallel block hand to each other within one call of the block.

    A recomputation may stop between the two, so a value may be left behind; the next call overwrites it.
    """

    tensor: Tensor | None = None
    modules: list[_SplitProjection] = field(default_factory=list)

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "the two seams of a parallel block are called one after the other"
        return tensor


class _SplitProjection(Stored):
    """A projection of which each rank of a group has a part; of a parallel block's, two share what they do."""

    bias: nn.Parameter | None

    def __init__(
        self, whole: InputProjection | OutputProjection, spread: Spread, shared: _Shared | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.parts = whole.weight, whole.bias, whole.parts
        self.spread, self.shared = spread, shared or _Shared()
        self.shared.modules.append(self)


class GatheredInput(_SplitProjection):
    """An input projection of gathered rows: (R, D) -> (T, N)."""

    def forward(self, x_RD: Tensor) -> Tensor:
        """Gather and project."""
        return gather_products(self.spread, x_RD, [self.weight], [self.bias])[0]


class ScatteredOutput(_SplitProjection):
    """An output projection whose sum over ranks is scattered: (T, N) -> (R, D)."""

    def forward(self, inner_TN: Tensor, residual_RD: Tensor | None = None) -> Tensor:
        """Project and scatter, then add the bias, and the residual where one is given."""
        out = products_scatter(self.spread, [inner_TN], [self.weight])
        return _added(out, [self.bias], residual_RD)


class _PairedInput(GatheredInput):
    """One of the two input projections of a parallel block; that of attention, called first, runs both.

    Both read the same rows, so one gather feeds them, and backward scatters the sum of their gradients.
    """

    def forward(self, x_RD: Tensor) -> Tensor:
        attention, mlp = self.shared.modules
        if self is mlp:
            return self.shared.take()
        weights, biases = [mlp.weight, attention.weight], [mlp.bias, attention.bias]
        self.shared.tensor, narrow = first_product(gather_products, self.spread, x_RD, weights, biases)
        return narrow


class _PairedOutput(ScatteredOutput):
    """One of the two output projections of a parallel block; that of the MLP, called second, runs both.

    The first gives back the residual it is given (None without one), for the second to add to.
    """

    def forward(self, inner_TN: Tensor, residual_RD: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        modules = self.shared.modules
        if self is modules[0]:
            self.shared.tensor = inner_TN
            return residual_RD
        out = products_scatter(self.spread, [self.shared.take(), inner_TN], [m.weight for m in modules])
        return _added(out, [m.bias for m in modules], residual_RD)


class _SplitEmbedding(Stored):
    """Token rows of a split vocabulary, plus learned position rows: this rank's rows of the stream."""

    position_weight: nn.Parameter | None

    def __init__(self, whole: Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.position_weight, self.parts = whole.weight, whole.position_weight, whole.parts
        self.group = group

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        rows = local_rows(tokens_BS.numel(), self.group)
        x_RD = embed_rows(self.group, self.weight, tokens_BS.flatten())
        if self.position_weight is None:
            return x_RD
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        return x_RD + F.embedding(positions_BS.flatten()[rows], self.position_weight)


class _SplitLossHead(Stored):
    """Logits and loss over a split vocabulary of `vocabulary` words, of this rank's rows of hidden states."""

    def __init__(self, whole: LossHead, group: Group, vocabulary: int) -> None:
        super().__init__()
        self.weight, self.parts = whole.weight, whole.parts
        self.group, self.compute = group, whole.compute
        self.terms = LogitTerms(vocabulary, whole.softcap, whole.z_loss)

    def forward(self, hidden_RD: Tensor, targets_T: Tensor, weights_T: Tensor | None) -> tuple[Tensor, Tensor]:
        return split_cross_entropy(self.group, hidden_RD, self.weight, targets_T, weights_T, self.terms)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return full_logits(self.group, hidden_RD, self.weight, self.terms)


def _added(out_RD: Tensor, biases: list[nn.Parameter | None], residual_RD: Tensor | None) -> Tensor:
    for bias in biases:
        if bias is not None:
            out_RD = out_RD + bias.view(-1, out_RD.shape[1]).sum(0).to(out_RD.dtype)
    return out_RD if residual_RD is None else residual_RD + out_RD


def spread_tensor(
    part: DecoderPart,  # built from ``local_config(config, group.size)``; its parameters stay the same objects
    # the tensor-parallel group. In a group of one nothing changes, but that projections use `queue` if given
    group: Group,
    config: ModelConfig,  # of the whole model
    *,
    # how collectives run beside matrix products, see `phalanx.parallel.tensor.overlap`; not ``"auto"``
    overlap: TensorOverlap = "none",
    chunks: int = 4,  # of ``"chunked"``
    queue: WeightQueue | None = None,  # where weight gradients go while it is deferring
    # names the group for ``"fused"`` and ``"tiles"``, which need it (`Mesh.registered`)
    registered: Callable[[Group], str] | None = None,
) -> None:
    """Replace the seams of `part`, in place; its stream is rows of tokens then, its context `local_context`.

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
        part.embedding = _SplitEmbedding(part.embedding, group)  # type: ignore[assignment]
    if part.head is not None:
        part.head = _SplitLossHead(part.head, group, config.vocab_size)  # type: ignore[assignment]


def make_overlap(
    kind: TensorOverlap, group: Group, chunks: int, registered: Callable[[Group], str] | None = None
) -> Overlap:
    """The back end named `kind`; the plain one in a group of one. `UserError`: it cannot run here."""
    if kind == "none" or group.size == 1:
        return Overlap(group)
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
        shared, joined = _Shared(), _Shared()
        block.attention_input = _PairedInput(block.attention_input, spread, shared)  # type: ignore[assignment]
        block.mlp_input = _PairedInput(block.mlp_input, spread, shared)  # type: ignore[assignment]
        block.attention_output = _PairedOutput(block.attention_output, spread, joined)  # type: ignore[assignment]
        block.mlp_output = _PairedOutput(block.mlp_output, spread, joined)  # type: ignore[assignment]
    else:
        for name, module in list(block.named_children()):
            if isinstance(module, InputProjection):
                setattr(block, name, GatheredInput(module, spread))
            elif isinstance(module, OutputProjection):
                setattr(block, name, ScatteredOutput(module, spread))
    first = group.index * (config.heads // group.size)
    block.attention.how = replace(block.attention.how, first_head=first, num_heads=config.heads)
