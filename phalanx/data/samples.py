"""The samples of one split of one source: in which order they come, and what they hold. Torch-free.

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig
from phalanx.data.order import Int64, Permutation, derive_key
from phalanx.data.tokens.prepared import PreparedSource, PreparedSplit
from phalanx.data.tokens.stream import TokenStream


class Arrays(NamedTuple):
    """Samples as arrays: int64 ids, float32 weights of the targets, int32 documents (None: not asked for)."""

    tokens_BL: NDArray[np.int64]
    weights_BS: NDArray[np.float32]
    documents_BS: NDArray[np.int32] | None


class SampleReader:
    """Reads windows of ``sequence_length + 1`` tokens of a source's split.

    The targets of a window are its tokens after the first. A target has weight 0 where the loss mask says so, behind
    the end of the tokens, and, with the document mask, where it begins a document that its own position cannot see.
    With end-of-text tokens the last never happens: such a token ends a document as a target, and begins the next one as
    an input, so that every token of every document is predicted, and from its own document alone.
    """

    def __init__(self, source: PreparedSource, split: PreparedSplit, config: DataConfig) -> None:
        self.name = source.name
        self.weight = source.weight
        self.stream = TokenStream(split.shards)
        self.length = config.sequence_length
        self._document_mask = config.document_mask
        self._borders_count = source.has_end_of_text

    @property
    def num_windows(self) -> int:
        """Windows of a pass from start to end, one after the other; the last may be short."""
        return -(-(len(self.stream) - 1) // self.length)

    def read(self, begin_B: Int64) -> Arrays:
        """The windows that begin at tokens `begin_B`."""
        tokens = np.zeros((len(begin_B), self.length + 1), np.int64)
        self.stream.read_tokens(begin_B, tokens)
        weights = self._weights(begin_B)
        if not self._document_mask:
            return Arrays(tokens, weights, None)
        documents = np.zeros((len(begin_B), self.length), np.int32)
        if self.stream.has_documents:
            self._mark_documents(begin_B, documents, weights)
        return Arrays(tokens, weights, documents)

    def _weights(self, begin_B: Int64) -> NDArray[np.float32]:
        weights = np.ones((len(begin_B), self.length), np.float32)
        if self.stream.has_mask:
            self.stream.read_mask(begin_B + 1, weights)
        if int(begin_B.max(initial=0)) + self.length >= len(self.stream):
            target_BS = begin_B[:, None] + 1 + np.arange(self.length)
            weights[target_BS >= len(self.stream)] = 0
        return weights

    def _mark_documents(self, begin_B: Int64, documents_BS: NDArray[Any], weights_BS: NDArray[Any]) -> None:
        rows, columns = self.stream.document_starts(begin_B, self.length + 1)
        if not rows:
            return
        row, column = np.array(rows), np.array(columns)
        if not self._borders_count:
            weights_BS[row[column > 0], column[column > 0] - 1] = 0
        inner = (column > 0) & (column < self.length)
        documents_BS[row[inner], column[inner]] = 1
        np.cumsum(documents_BS, axis=1, out=documents_BS)


class SampleOrder:
    """Which window is sample number n of a source: one permutation of its windows for each epoch.

    Raises:
        UserError: the source has too few tokens for one sample.
    """

    def __init__(self, reader: SampleReader, *, key: int, random_offset: bool) -> None:
        total, length = len(reader.stream), reader.length
        if total <= length:
            raise UserError(
                f"source {reader.name!r} has {total} tokens, a sample needs {length + 1}",
                cure="add text, or make data.sequence_length smaller",
                field="data.sequence_length",
                value=length,
            )
        self.num_samples = max((total - length) // length, 1) if random_offset else (total - 1) // length
        spare = total - 1 - self.num_samples * length
        self._offsets = min(length, spare + 1) if random_offset else 1
        self._length = length
        self._key = key
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def begins(self, index_B: Int64) -> Int64:
        """The first token of samples number `index_B`, counted over all epochs."""
        epoch_B, place_B = np.divmod(index_B, self.num_samples)
        result = np.empty_like(place_B)
        for epoch in np.unique(epoch_B).tolist():
            chosen = epoch_B == epoch
            permutation, offset = self._epoch(epoch)
            result[chosen] = permutation(place_B[chosen]) * self._length + offset
        return result

    def _make_epoch(self, epoch: int) -> tuple[Permutation, int]:
        key = derive_key(self._key, epoch)
        return Permutation(key, self.num_samples), derive_key(key, "offset") % self._offsets
