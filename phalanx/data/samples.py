"""The samples of a split, packed into arrays: in which order they come, and what they hold.

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, Split
from phalanx.data.shuffle import Int64, Mixture, Permutation, derive_key
from phalanx.data.tokens.prepared_corpus import PreparedSource, PreparedSplit
from phalanx.data.tokens.shards import TokenStream


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
        tokens_BL = np.zeros((len(begin_B), self.length + 1), np.int64)
        self.stream.read_tokens(begin_B, tokens_BL)
        weights_BS = np.ones((len(begin_B), self.length), np.float32)
        if self.stream.has_mask:
            self.stream.read_mask(begin_B + 1, weights_BS)
        if int(begin_B.max(initial=0)) + self.length >= len(self.stream):
            # The last window of held-out text may be short: its rest is padding.
            target_BS = begin_B[:, None] + 1 + np.arange(self.length)
            weights_BS[target_BS >= len(self.stream)] = 0
        if not self._document_mask:
            return Arrays(tokens_BL, weights_BS, None)
        documents_BS = np.zeros((len(begin_B), self.length), np.int32)
        rows, columns = self.stream.document_starts(begin_B, self.length + 1) if self.stream.has_documents else ([], [])
        if rows:
            row, column = np.array(rows), np.array(columns)
            if not self._borders_count:  # the first token of a document cannot be predicted from the one before
                weights_BS[row[column > 0], column[column > 0] - 1] = 0
            inner = (column > 0) & (column < self.length)
            # Document numbers rise by one where a document begins, so that attention compares numbers alone.
            documents_BS[row[inner], column[inner]] = 1
            np.cumsum(documents_BS, axis=1, out=documents_BS)
        return Arrays(tokens_BL, weights_BS, documents_BS)


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
        # An epoch cuts the text up to `length` tokens later, so up to one sample less fits; their number is the same at
        # every shift. The last target lies one token further on.
        self.num_samples = max((total - length) // length, 1) if random_offset else (total - 1) // length
        spare = total - 1 - self.num_samples * length
        self._offsets = min(length, spare + 1) if random_offset else 1
        self._length = length
        self._key = key
        # Samples of several epochs are asked for in turns, at the end of one or by ranks' batches that reach over it.
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)

    def begins(self, index_B: Int64) -> Int64:
        """The first token of samples number `index_B`, counted over all epochs."""
        # A batch may reach over the end of an epoch, and sources of a mixture end theirs at different times.
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


BLOCK = 1024  # samples located together; for a few at a time, numpy's cost per call would dominate

Parts = Sequence[tuple[PreparedSource, PreparedSplit]]


class PackedSplit:
    """Any samples of one split of a prepared corpus: a pure function of (corpus, config, seed, place in the order).

    `Mixture` gives the source of a sample and its number within that; a `Permutation` per source and epoch gives the
    window of tokens.

    Args:
        parts: the sources that have tokens in the split (`Prepared.split`).
        split: its name, for messages.
        seed: of the order; None: `config.seed`.

    Raises:
        UserError: there are no parts, or a source has too few tokens for one sample.
    """

    def __init__(self, parts: Parts, config: DataConfig, *, split: Split = "train", seed: int | None = None) -> None:
        if not parts:
            raise UserError(f"there are no {split} tokens", cure="prepare some: see data.sources", field="data")
        seed = config.seed if seed is None else seed
        self.config = config
        self._readers = [SampleReader(*part, config) for part in parts]
        self._orders = [
            SampleOrder(reader, key=derive_key(seed, i), random_offset=config.random_offset)
            for i, reader in enumerate(self._readers)
        ]
        # A source without a weight counts by its size, so that all such sources end their epochs together.
        self._mixture = Mixture([r.weight or o.num_samples for r, o in zip(self._readers, self._orders, strict=True)])
        self._located = lru_cache(maxsize=4)(self._locate_block)

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which every source has been read once, on average."""
        return sum(order.num_samples for order in self._orders)

    def read(self, start: int, count: int) -> Arrays:
        """Samples ``start..start+count`` of the global order."""
        source_B, begin_B = self._windows(start, start + count)
        return read_mixed(self._readers, source_B, begin_B, self.config)

    def places(self, start: int, count: int) -> list[tuple[SampleReader, int]]:
        """Of the same samples the source that each is of, and its first token there."""
        source_B, begin_B = self._windows(start, start + count)
        pairs = zip(source_B.tolist(), begin_B.tolist(), strict=True)
        return [(self._readers[source], begin) for source, begin in pairs]

    def _windows(self, start: int, end: int) -> tuple[Int64, Int64]:
        """Source and first token of samples that follow each other, from blocks that are worked out once."""
        first, last = start // BLOCK, (end - 1) // BLOCK
        blocks = [self._located(block) for block in range(first, last + 1)]
        inside = slice(start - first * BLOCK, end - first * BLOCK)
        source = blocks[0][0] if len(blocks) == 1 else np.concatenate([block[0] for block in blocks])
        begin = blocks[0][1] if len(blocks) == 1 else np.concatenate([block[1] for block in blocks])
        return source[inside], begin[inside]

    def _locate_block(self, block: int) -> tuple[Int64, Int64]:
        source_B, local_B = self._mixture.locate(np.arange(block * BLOCK, (block + 1) * BLOCK))
        begin_B = np.empty(BLOCK, np.int64)
        for number in np.unique(source_B).tolist():
            chosen = source_B == number
            begin_B[chosen] = self._orders[number].begins(local_B[chosen])
        return source_B, begin_B


def read_mixed(readers: Sequence[SampleReader], source_B: Int64, begin_B: Int64, config: DataConfig) -> Arrays:
    """The windows that begin at tokens `begin_B` of the readers `source_B`, in this order."""
    used: list[int] = np.unique(source_B).tolist()
    if len(used) == 1:
        return readers[used[0]].read(begin_B)
    size, length = len(begin_B), config.sequence_length
    documents = np.zeros((size, length), np.int32) if config.document_mask else None
    result = Arrays(np.zeros((size, length + 1), np.int64), np.zeros((size, length), np.float32), documents)
    for number in used:
        rows = source_B == number
        part = readers[number].read(begin_B[rows])
        result.tokens_BL[rows] = part.tokens_BL
        result.weights_BS[rows] = part.weights_BS
        if documents is not None and part.documents_BS is not None:
            documents[rows] = part.documents_BS
    return result
