"""What attention of Phalanx keeps on one rank for one micro-batch of one layer, from q, k and v to its result.

Between the two projections, by the back ends of `phalanx.kernels.attention` (on a CPU other ones than on a GPU), ring
and all-to-all (`phalanx.parallel.context`). Sizes in bytes; T tokens of the rank, a heads of the rank, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.plan.hardware.either import where
from phalanx.plan.types import Floats, Model, Strategy
from phalanx.plan.work.local import Local

_LSE_BYTES = 4
_ROW_ID_BYTES = 8
# As in phalanx.kernels.attention and phalanx.kernels.blocked.
_FLASH_CHUNK, _PRODUCTS_CHUNK = 64, 128
_MOST_PROBABILITIES_BYTES = 64 << 20
_CHUNKED_FROM, _CHUNKED_TO = 128, 1024


@dataclass(frozen=True)
class Attended:
    """Bytes of one layer and micro-batch.

    Attributes:
        inputs: q, k and v in all forms that are kept; with the output of the projection, of which v is a part.
        core: what only the attention itself keeps: scores, probabilities, log-sum-exps.
        result: what it gives, as kept by itself and by the output projection.
        results_again: results that recomputing all but matrix products and attention keeps.
        masks: kept once for all layers of a stage that see as many keys.
    """

    inputs: Floats
    core: Floats
    result: Floats
    results_again: Floats
    masks: Floats

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
        """q, k and v as the projection gives them."""
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
    lse = local.tokens * local.heads * _LSE_BYTES
    seen = 0 if window >= local.sequence else window
    alone = _alone(local, rows, lse, seen)
    if isinstance(strategy.context, int) and strategy.context == 1:
        return alone
    make = _ring if strategy.context_method == "ring" else _exchanged
    return _where((strategy.context == 1), alone, make(local, strategy, rows, lse, seen))


def _alone(local: Local, rows: _Rows, lse: Floats, window: int) -> Attended:
    """On whole sequences."""
    if local.model.attention_dropout or not local.software.fused_attention:
        return _written(local, rows)
    core = lse + _whole_masks(local, window)
    flash = Attended(rows.stacked + rows.turned, core, rows.q, rows.q + lse, _flash_masks(local, window))
    if not local.software.on_cpu or local.compute_bytes == 4:
        return flash
    return _where(_by_products(local, window), _products(local, rows, window), flash)


def _flash_masks(local: Local, window: int) -> Floats:
    """Of the chunked flash kernel on a CPU: blocks of the mask, of distinct shapes, as numbers to add to scores."""
    chunked = _CHUNKED_FROM <= local.sequence <= _CHUNKED_TO or bool(window)
    if not local.software.on_cpu:
        return 0.0
    if not chunked:
        return local.software.document_masks * local.sequences * local.sequence**2
    return _blocks_kept(local, window, _FLASH_CHUNK) * local.compute_bytes


def _whole_masks(local: Local, window: int) -> Floats:
    """Where documents are kept apart in one call of torch's kernel on a CPU: the mask as numbers, for every layer."""
    software, sequence = local.software, local.sequence
    chunked = _CHUNKED_FROM <= sequence <= _CHUNKED_TO or bool(window)
    if chunked or not (software.on_cpu and software.document_masks):
        return 0.0
    return local.sequences * sequence**2 * local.compute_bytes


def _blocks_kept(local: Local, window: int, chunk: int) -> Floats:
    """Elements of all masks: of documents every block of every sequence has its own, else blocks of a shape share."""
    if local.software.document_masks:
        return local.sequences * _seen_pairs(local.sequence, window, chunk)
    return _distinct_blocks(local.sequence, window, chunk)


def _by_products(local: Local, window: int) -> Floats:
    """Where a CPU attends by matrix products, in 16 bits as long as the probabilities are small."""
    keys = min(window + _PRODUCTS_CHUNK, local.sequence) if window else local.sequence // 2
    kept = local.tokens * local.heads * keys * local.compute_bytes
    return kept <= _MOST_PROBABILITIES_BYTES


def _products(local: Local, rows: _Rows, window: int) -> Attended:
    """Probabilities are kept; of several sequences, q, k and v are copied into dense memory and let go of."""
    scores = local.tokens / local.sequence * local.heads * _seen_pairs(local.sequence, window, _PRODUCTS_CHUNK)
    normed = rows.q + rows.kv if local.model.qk_norm else 0.0
    inputs = where((local.sequences == 1), rows.stacked + rows.turned, rows.stacked + normed)
    masks = _blocks_kept(local, window, _PRODUCTS_CHUNK) * local.compute_bytes
    return Attended(inputs, scores * local.compute_bytes, rows.q, rows.q, masks)


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
    scores = local.tokens / local.sequence * local.heads * _seen_pairs(local.sequence, window, _PRODUCTS_CHUNK)
    products = Attended(rows.stacked, scores * local.compute_bytes, rows.q, rows.q, masks)
    return _where(_by_products(local, window), products, flash)


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
    """Query-key pairs of all blocks, one head of one sequence."""
    return sum(queries * keys for queries, keys in _blocks(sequence, window, chunk))


def _distinct_blocks(sequence: int, window: int, chunk: int) -> int:
    """Elements of the masks of blocks of distinct shapes."""
    return sum(queries * keys for queries, keys in set(_blocks(sequence, window, chunk)))
