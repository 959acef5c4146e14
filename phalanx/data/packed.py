"""Samples of a split, packed into arrays in the global order. Torch-free, so that a loader process needs no torch.

Shape letters: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig
from phalanx.data.order import Int64, Mixture, derive_key
from phalanx.data.samples import Arrays, SampleOrder, SampleReader
from phalanx.data.sources.files import Split
from phalanx.data.tokens.prepared import PreparedSource, PreparedSplit

BLOCK = 1024

Parts = Sequence[tuple[PreparedSource, PreparedSplit]]


class PackedSplit:
    """Any samples of one split of a prepared corpus: a pure function of (corpus, config, seed, place in the order).

    `Mixture` says which source a sample comes from and which of its samples it is, a `Permutation` per source and epoch
    says which window of its tokens.

    Args:
        parts: the sources that have tokens in the split (`Prepared.split`).
        config: how to cut and order it.
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
