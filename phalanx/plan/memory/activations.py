"""What a layer and the ends of a model keep for the backward pass on one rank, in bytes of one micro-batch.

In Phalanx (`phalanx_layer`, read off `phalanx.model`, `phalanx.kernels` and `phalanx.parallel.tensor`): dropout keeps
nothing, as its masks are made again; projections of split matrices keep the rows that they were given, not those that
they gathered. Attention, between its two projections, depends on the back end of `phalanx.kernels.attention` (on a CPU
other ones than on a GPU), and on ring or all-to-all (`phalanx.parallel.context`). T tokens of the rank, a heads of the
rank, S sequence; other letters as in `phalanx.plan.types`; w bytes of what is multiplied, r of the residual stream.

In Megatron-LM, or a program like it (`megatron_layer`): Korthikanti et al., arXiv 2205.05198, section 4. Their 34 s b h
bytes of a layer (16 bits, dropout, no parallelism) are 11 and 5 a s / h of attention, 19 of the MLP and 4 of the norms.
Written term by term here, so that grouped heads, gates, other types and fused attention follow. Letters as there:
T tokens, R of them kept of the residual stream (T / t with sequence parallelism), D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phalanx.plan.layer import loss_chunk
from phalanx.plan.operations import Local
from phalanx.plan.types import Floats, Job, Model, Strategy, largest, where


@dataclass(frozen=True)
class Kept:
    """Bytes of one layer and one micro-batch."""

    whole: Floats  # where nothing is computed again
    chosen: Floats  # under the job's kind of recompute
    waiting: Floats  # what weight gradients need that are put off, of a schedule that splits backward passes
    masks: Floats  # kept once for all layers of a stage that see as many keys
    passing: Floats  # what its backward pass needs besides for a moment: gradients of the widest activations
    leaving: Floats = 0.0  # of `chosen`, what can wait on the host

    @property
    def again(self) -> Floats:
        """What is there for a moment, while the layer's backward pass runs, because it was computed again."""
        return self.whole - self.chosen


_ATTENTION_LSE_BYTES = 4
_ROW_ID_BYTES = 8
# As in phalanx.kernels.attention.
_FLASH_CHUNK, _PRODUCTS_CHUNK = 64, 128
_MOST_PROBABILITIES_BYTES = 64 << 20
_CHUNKED_FROM, _CHUNKED_TO = 128, 1024


@dataclass(frozen=True)
class Attended:
    """Bytes of one layer and micro-batch."""

    inputs: Floats  # q, k and v in all forms that are kept; with the output of the projection, of which v is a part
    core: Floats  # what only the attention itself keeps: scores, probabilities, log-sum-exps
    result: Floats  # what it gives, as kept by itself and by the output projection
    results_again: Floats  # results that recomputing all but matrix products and attention keeps
    masks: Floats  # kept once for all layers of a stage that see as many keys

    @property
    def total(self) -> Floats:
        """Of a layer that keeps everything; masks apart."""
        return self.inputs + self.core + self.result


@dataclass(frozen=True)
class _Rows:
    """Bytes of q, and of k or v, of all tokens of a micro-batch."""

    q: Floats
    kv: Floats
    model: Model

    @property
    def stacked(self) -> Floats:
        return self.q + 2 * self.kv

    @property
    def turned(self) -> Floats:
        """What is kept beside it: rotated q and k, normed ones, and what their norms read."""
        copies = 2 if self.model.qk_norm else int(self.model.position == "rotary")
        return copies * (self.q + self.kv)


def attended(local: Local, strategy: Strategy, window: int) -> Attended:
    """Attention of a layer that sees `window` keys (0: all of the past)."""
    bytes_ = local.compute_bytes
    kv_rows = (local.projection_rows - local.query_rows) / 2
    rows = _Rows(local.tokens * local.query_rows * bytes_, local.tokens * kv_rows * bytes_, local.model)
    lse = local.tokens * local.heads * _ATTENTION_LSE_BYTES
    seen = 0 if window >= local.sequence else window
    alone = _alone(local, rows, lse, seen)
    if isinstance(strategy.context, int) and strategy.context == 1:
        return alone
    make = _ring if strategy.context_method == "ring" else _exchanged
    return _where((strategy.context == 1), alone, make(local, strategy, rows, lse, seen))


def _alone(local: Local, rows: _Rows, lse: Floats, window: int) -> Attended:
    if local.model.attention_dropout or not local.software.fused_attention:
        return _written(local, rows)
    software, c = local.software, local.compute_bytes
    core = lse
    if software.on_cpu and software.document_masks and not _is_chunked(local, window):
        # One call of torch's kernel keeps documents apart by a mask of numbers, for every layer.
        core = core + local.sequences * local.sequence**2 * c
    # On a GPU v is copied, so that nothing of what was projected is kept beside what was rotated.
    copied = not software.on_cpu and local.model.position == "rotary" and not local.model.qk_norm
    inputs = rows.stacked if copied and not software.fused_elementwise else rows.stacked + rows.turned
    flash = Attended(inputs, core, rows.q, rows.q + lse, _flash_masks(local, window))
    if not software.on_cpu or c == 4:
        return flash
    # By products probabilities are kept; of several sequences, q, k and v are copied into dense memory and let go of.
    normed = rows.q + rows.kv if local.model.qk_norm else 0.0
    inputs = where((local.sequences == 1), rows.stacked + rows.turned, rows.stacked + normed)
    masks = _blocks_kept(local, window, _PRODUCTS_CHUNK) * c
    products = Attended(inputs, _probabilities(local, window) * c, rows.q, rows.q, masks)
    return _where(_by_products(local, window), products, flash)


def _is_chunked(local: Local, window: int) -> bool:
    return _CHUNKED_FROM <= local.sequence <= _CHUNKED_TO or bool(window)


def _flash_masks(local: Local, window: int) -> Floats:
    """Of the chunked flash kernel on a CPU: blocks of the mask, of distinct shapes, as numbers to add to scores."""
    if not local.software.on_cpu:
        return 0.0
    if not _is_chunked(local, window):
        return local.software.document_masks * local.sequences * local.sequence**2
    return _blocks_kept(local, window, _FLASH_CHUNK) * local.compute_bytes


def _blocks_kept(local: Local, window: int, chunk: int) -> Floats:
    """Elements of all masks: of documents every block of every sequence has its own, else blocks of a shape share."""
    if local.software.document_masks:
        return local.sequences * _seen_pairs(local.sequence, window, chunk)
    return sum(queries * keys for queries, keys in set(_blocks(local.sequence, window, chunk)))


def _by_products(local: Local, window: int) -> Floats:
    """Where a CPU attends by matrix products, in 16 bits as long as the probabilities are small."""
    keys = min(window + _PRODUCTS_CHUNK, local.sequence) if window else local.sequence // 2
    kept = local.tokens * local.heads * keys * local.compute_bytes
    return kept <= _MOST_PROBABILITIES_BYTES


def _probabilities(local: Local, window: int) -> Floats:
    return local.tokens / local.sequence * local.heads * _seen_pairs(local.sequence, window, _PRODUCTS_CHUNK)


def _written(local: Local, rows: _Rows) -> Attended:
    """Scores of all S x S pairs in memory, softmax in fp32; keys and values are copied for every query head."""
    pairs = local.tokens * local.heads * local.sequence
    c = local.compute_bytes
    dropped = local.model.attention_dropout
    probabilities = pairs * (4 + (c if dropped or c < 4 else 0))
    ids = local.tokens * local.heads * _ROW_ID_BYTES if dropped else 0
    mask = local.sequence**2 * (local.sequences if local.software.document_masks else 1)
    core = probabilities + ids + mask
    grouped = local.model.kv_heads < local.model.heads
    inputs = rows.q + 2 * (rows.q if grouped else rows.kv)
    return Attended(inputs, core, rows.q, rows.q + pairs * c, mask)


def _ring(local: Local, strategy: Strategy, rows: _Rows, lse: Floats, window: int) -> Attended:
    """Keys and values are stacked for the journey; results of pieces are put together in a tensor of their own."""
    kept_q = rows.turned if rows.model.position == "rotary" else rows.stacked
    whole_windows = all(0 < keys < local.sequence for keys in local.model.windows)
    pieces = 1 if whole_windows else 2
    piece = local.sequence / (strategy.context * pieces)
    masked = pieces + (1 if window else 0)
    blocks = 2 * strategy.context + 1 if pieces == 2 else 2
    per_block = (rows.q + lse) / pieces
    each = piece**2 * local.compute_bytes
    masks = blocks * local.sequences * each if local.software.document_masks else masked * each
    if not (local.software.on_cpu or local.model.attention_dropout):
        masks = 0.0  # fused kernels, and FlexAttention's lists of blocks
    return Attended(kept_q + 2 * rows.kv, lse, 2 * rows.q, blocks * per_block, masks)


def _exchanged(local: Local, strategy: Strategy, rows: _Rows, lse: Floats, window: int) -> Attended:
    """Heads are exchanged for positions, there and back; what came is kept, and the result once more in token rows."""
    masks = _flash_masks(local, window)
    flash = Attended(rows.stacked, lse, 2 * rows.q, rows.q + lse, masks)
    if not local.software.on_cpu or local.compute_bytes == 4:
        return flash
    kept = _probabilities(local, window) * local.compute_bytes
    return _where(_by_products(local, window), Attended(rows.stacked, kept, rows.q, rows.q, masks), flash)


def _where(condition: Floats, yes: Attended, no: Attended) -> Attended:
    names = ("inputs", "core", "result", "results_again", "masks")
    return Attended(*(where(condition, getattr(yes, name), getattr(no, name)) for name in names))


@lru_cache(maxsize=256)
def _blocks(sequence: int, window: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """Queries and keys of each block of the chunked back end."""
    starts = range(0, sequence, chunk)
    stops = [min(start + chunk, sequence) for start in starts]
    firsts = [max(0, start - window + 1) if window else 0 for start in starts]
    return tuple((stop - start, stop - first) for start, stop, first in zip(starts, stops, firsts, strict=True))


def _seen_pairs(sequence: int, window: int, chunk: int) -> int:
    return sum(queries * keys for queries, keys in _blocks(sequence, window, chunk))


def phalanx_layer(local: Local, strategy: Strategy, window: int, is_mixture: bool) -> Kept:
    """One layer that sees `window` keys (0: all of the past)."""
    seen = attended(local, strategy, window)
    # Inputs of norms (r), their results (w), and a number or two per row.
    row_bytes = 4 if local.model.norm == "rms" else 8
    stream = local.kept_tokens * local.model.hidden * local.residual_bytes
    normed = local.kept_tokens * (local.model.hidden * local.compute_bytes + row_bytes) + stream
    whole = _norms(local) * normed + seen.total + _phalanx_mlp(local, is_mixture) + _joined(local)
    products = _phalanx_products(local, strategy, seen, is_mixture)
    # `mlp` makes the MLP's product again, and those of attention where one operation makes both: where projections are
    # merged, and in a parallel block whose matrices are split, which gathers once.
    together = 1 if local.model.merged else (local.tensor > 1) * (local.model.block == "parallel")
    first_product = _phalanx_wide(local, is_mixture) + together * local.tokens * local.projection_rows
    chosen = {
        "none": whole,
        "attention": whole - seen.core,
        "elementwise": products,
        "alternate": products,
        "mlp": products - first_product * local.compute_bytes,
        "full": stream,
    }[strategy.recompute]
    # What selective recompute keeps passes no hook of autograd's, so of such a layer its input alone can leave.
    leaving = whole if strategy.recompute == "none" else stream
    # Put off: inputs and gradients of outputs of all matrix products; what was gathered for them stays gathered.
    wide, c = _phalanx_wide(local, is_mixture), local.compute_bytes
    attention = local.tokens * (local.projection_rows + local.query_rows)
    gathered = 2 * _norms(local) * local.tokens * local.model.hidden
    waiting = c * (gathered + attention + wide + wide / local.gates)
    # Gradients of the stream, and of what is widest in a layer, while what they were made of is let go of.
    passing = local.kept_tokens * local.model.hidden * (local.residual_bytes + c) + wide * c
    return Kept(whole, chosen, waiting, seen.masks, passing, leaving)


def _norms(local: Local) -> int:
    return 1 if local.model.block == "parallel" else 2


def _phalanx_mlp(local: Local, is_mixture: bool) -> Floats:
    """Inputs of the non-linearity and of the second product; on a CPU a gate keeps what it multiplies too."""
    if not is_mixture:
        return _phalanx_inner(local, local.tokens, local.dense_inner)
    rows, model = local.routed_rows, local.model
    routed = 2 * rows * model.hidden * local.compute_bytes + local.kept_tokens * model.experts * 4
    shared = _phalanx_inner(local, local.tokens, local.inner * model.shared_experts)
    return _phalanx_inner(local, rows, local.inner) + routed + shared


def _phalanx_inner(local: Local, rows: Floats, width: Floats) -> Floats:
    products = 4 if local.model.gated else 2
    if local.model.gated and (local.software.fused_elementwise or not local.software.on_cpu):
        products = 3
    return rows * width * products * local.compute_bytes


def _joined(local: Local) -> Floats:
    """Merged projections join what attention and the MLP give; attention keeps its own result besides."""
    return local.tokens * local.query_rows * local.compute_bytes if local.model.merged else 0.0


def _phalanx_wide(local: Local, is_mixture: bool) -> Floats:
    """Elements of what the MLP's first product gives."""
    if not is_mixture:
        return local.tokens * local.in_width
    return (local.routed_rows + local.tokens * local.model.shared_experts) * local.inner * local.gates


def _phalanx_products(local: Local, strategy: Strategy, seen: Attended, is_mixture: bool) -> Floats:
    """The layer's input, and what matrix products and attention give (`phalanx.model.recompute`).

    Products that write the stream give all T rows, before these are summed and scattered over tensor-parallel ranks.
    In fp32 without bias and dropout the product adds the residual itself, so that the last one's result is the next
    layer's input, and is not counted twice.
    """
    width, c = local.model.hidden, local.compute_bytes
    outputs = (1 if local.model.merged else 2) - adds_residual(local, strategy)
    stream = local.kept_tokens * width * local.residual_bytes + outputs * local.tokens * width * c
    projections = local.tokens * local.projection_rows + _phalanx_wide(local, is_mixture)
    return stream + projections * c + seen.results_again


def adds_residual(local: Local, strategy: Strategy) -> Any:
    """Whether the products that write the stream add the residual themselves."""
    plain = local.model.bias != "all" and not local.model.dropout and local.residual_bytes == local.compute_bytes
    split = strategy.schedule in ("interleaved_zero_bubble", "zbv") and (strategy.pipeline > 1)
    return plain * (local.tensor == 1) * (1 - 1 * split)


_MEGATRON_LSE_BYTES = 4
_MASK_BYTES = 1


def megatron_layer(local: Local, strategy: Strategy, is_mixture: bool) -> Kept:
    """One layer of any kind; windows save nothing where scores are written, and there is nothing to save else."""
    width, c, n = local.model.hidden, local.compute_bytes, _branches(local)
    # Inputs of the norms, of the products that read the stream, and masks of the dropout behind those that write.
    each = local.residual_bytes + c + (_MASK_BYTES if local.model.dropout else 0)
    stream = n * local.kept_tokens * width * each
    whole = stream + _attention(local) + _core(local) + _megatron_mlp(local, is_mixture)
    chosen = {
        "none": whole,
        "attention": whole - _core(local),
        "elementwise": _without_elementwise(local, is_mixture),
        "mlp": _without_elementwise(local, is_mixture) - _megatron_wide(local, is_mixture) * local.compute_bytes,
        "alternate": _without_elementwise(local, is_mixture) - _alternate(local, is_mixture) * local.compute_bytes,
        "full": local.kept_tokens * local.model.hidden * local.residual_bytes,
    }[strategy.recompute]
    wide = _megatron_wide(local, is_mixture)
    attention = local.tokens * (local.projection_rows + local.query_rows)
    waiting = c * (2 * n * local.kept_tokens * width + attention + wide + wide / local.gates)
    return Kept(whole, chosen, waiting, 0.0, _megatron_passing(local, is_mixture))


def _branches(local: Local) -> int:
    """Norms of a layer, and products that write the stream."""
    return 1 if local.model.block == "parallel" else 2


def _attention(local: Local) -> Floats:
    """q, k, v, and the result, which is the input of the output projection; their norms' inputs where they are normed.

    Rotation keeps no more: its input is free once it is done.
    """
    normed = local.projection_rows / 2 + local.query_rows / 2 if local.model.qk_norm else 0
    return local.tokens * (local.projection_rows + local.query_rows + normed) * local.compute_bytes


def _core(local: Local) -> Floats:
    """Softmax, its dropped result and the mask (5 a s^2 b in 16 bits); or only the log-sum-exps of fused attention."""
    if local.software.fused_attention:
        return local.tokens * local.heads * _MEGATRON_LSE_BYTES
    dropped = local.compute_bytes + _MASK_BYTES if local.model.attention_dropout else 0
    return local.tokens * local.heads * local.sequence * (local.compute_bytes + dropped)


def _megatron_mlp(local: Local, is_mixture: bool) -> Floats:
    """Inputs of the non-linearity and of the second product; what a gate multiplies too, unless it is fused.

    A mixture keeps the routed rows besides, which are copies of tokens, its probabilities, and its results, which are
    weighted.
    """
    if not is_mixture:
        return _megatron_inner(local, local.tokens, local.dense_inner)
    rows, model, c = local.routed_rows, local.model, local.compute_bytes
    routed = (
        _megatron_inner(local, rows, local.inner) + 2 * rows * model.hidden * c + local.kept_tokens * model.experts * 4
    )
    return routed + _megatron_inner(local, local.tokens, local.inner * model.shared_experts)


def _megatron_inner(local: Local, rows: Floats, width: Floats) -> Floats:
    products = local.gates + 1 + (1 if local.model.gated and not local.software.fused_elementwise else 0)
    return rows * width * products * local.compute_bytes


def _megatron_wide(local: Local, is_mixture: bool) -> Floats:
    if not is_mixture:
        return local.tokens * local.in_width
    return (local.routed_rows + local.tokens * local.model.shared_experts) * local.inner * local.gates


def _alternate(local: Local, is_mixture: bool) -> Floats:
    """Elements of what every second product gives: keys, what attention adds to the stream, and up."""
    keys = (local.projection_rows - local.query_rows) / 2 if not local.software.merged_projections else 0
    added = local.kept_tokens * local.model.hidden
    up = (
        _megatron_wide(local, is_mixture) / local.gates
        if not local.software.merged_projections and not is_mixture
        else 0
    )
    return local.tokens * keys + added + up


def _without_elementwise(local: Local, is_mixture: bool) -> Floats:
    width, c = local.model.hidden, local.compute_bytes
    stream = local.kept_tokens * width * (local.residual_bytes + _branches(local) * c)
    core = local.tokens * (local.projection_rows + local.query_rows) * c + _core(local)
    return stream + core + _megatron_wide(local, is_mixture) * c


def _megatron_passing(local: Local, is_mixture: bool) -> Floats:
    """Gradients of the stream and of what is widest in a layer, before and after the non-linearity."""
    wide = _megatron_wide(local, is_mixture)
    stream = local.kept_tokens * local.model.hidden * (local.residual_bytes + local.compute_bytes)
    return stream + (wide + wide / local.gates) * local.compute_bytes


@dataclass(frozen=True)
class Head:
    """Bytes of the loss head."""

    stream: Floats  # input of the last norm, which is kept like an activation
    kept: Floats  # from the end of its forward pass to its backward pass
    passing: Floats  # besides, for a moment in either pass


def head(job: Job, strategy: Strategy, local: Local) -> Head:
    """The last norm, logits and loss."""
    stream = local.kept_tokens * job.model.hidden * local.residual_bytes
    if not job.software.is_phalanx:
        return Head(stream, *_megatron(local))
    row_bytes = local.kept_tokens * (4 if job.model.norm == "rms" else 8)
    alone = strategy.world_size == 1
    normed = local.kept_tokens * job.model.hidden * local.compute_bytes
    kept, passing = _phalanx(local, alone)
    return Head(stream, kept + row_bytes + alone * normed, passing)


def embedding_mask(job: Job, local: Local) -> Floats:
    """The mask of the dropout behind the embedding, where it is kept."""
    kept = job.model.dropout and not job.software.is_phalanx
    return local.kept_tokens * job.model.hidden if kept else 0.0


def _megatron(local: Local) -> tuple[Floats, Floats]:
    """The product's input, and logits: in fp32 as the softmax leaves them (Korthikanti et al., 4.3), or as they are.

    A fused loss makes their gradient in their place; else it is made in fp32 there and cast. torch's own, of logits
    cast to fp32, keeps those, what they were cast from and its result, and makes gradients of both in its backward.
    """
    c = local.compute_bytes
    logits = local.tokens * local.model.vocab_rows / local.tensor
    rows = local.kept_tokens * local.model.hidden * c
    if local.software.torch_loss:
        return rows + logits * (c + 8), logits * (4 + c)
    return rows + logits * (c if local.software.fused_loss else 4), 0.0 if local.software.fused_loss else logits * c


def _phalanx(local: Local, alone: Floats) -> tuple[Floats, Floats]:
    """Gradients of hidden rows and of the weight are made in the forward pass, chunk by chunk of tokens.

    Small logits are kept whole. The other way, backward takes both gradients times the loss's: on a CPU into new
    memory, on a GPU in place, where logits have no fp32 copy either.
    """
    c, width, tokens = local.compute_bytes, local.model.hidden, local.tokens
    words = local.model.vocab_rows / local.tensor
    weight = words * width
    made = local.kept_tokens * width * c + weight * 4
    chunk, is_small = loss_chunk(local)
    logits = chunk * words
    own_cast = 0 if c == 4 else weight * c * (1 - alone)  # a program alone has one beside its weights
    cast = 0 if c == 4 else own_cast + weight * (c + 4) + logits * c
    again = where(chunk < tokens, largest(logits * 4, weight * 4), 0)
    spread_rows = where((local.tensor > 1), tokens * width * c, 0)
    if local.software.on_cpu:
        chunked = made, largest(2 * 4 * logits + cast + again + spread_rows, made)
    else:
        part = where(chunk < tokens, weight * 4, 0) if c == 4 else own_cast  # of the sum, or the weight's cast
        chunked = made, logits * c + part + spread_rows
    whole = tokens * words
    plain = whole * 4 + tokens * width * c * (1 - alone) + own_cast
    passing = whole * 4 + weight * 4
    return where(is_small, plain, chunked[0]), where(is_small, passing, chunked[1])
