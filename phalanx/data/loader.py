"""Samples in a global order that depends on the seed alone, and the thread that prepares them ahead of time.

Sample g of the order is a pure function of (prepared corpus, config, seed, g): `Mixture` says which source and which of
its samples, a `Permutation` per source and epoch says which window of its tokens. So a loader's state is one number,
any process can read any part of the order, and changing the batch size on the way is nothing special.

Shape letters: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.data.config import DataConfig
from phalanx.data.order import Int64, Mixture, derive_key
from phalanx.data.prefetch import Prefetcher
from phalanx.data.samples import Arrays, SampleOrder, SampleReader
from phalanx.data.sources.files import Split
from phalanx.data.tokens.prepared import Prepared

BLOCK = 1024


@dataclass(frozen=True)
class LoaderState:
    """Where reading stands: `samples` of the global order have been handed out. All a checkpoint needs to keep."""

    samples: int = 0

    def to_json(self) -> dict[str, int]:
        """As plain values."""
        return {"samples": self.samples}

    @staticmethod
    def from_json(value: dict[str, int]) -> LoaderState:
        """The state that `to_json` described."""
        return LoaderState(samples=int(value["samples"]))


class Loader:
    """Batches of one split of a prepared corpus.

    Args:
        prepared: the corpus.
        config: how to cut and order it.
        split: "train" or "validation".
        seed: of the order; None: `config.seed`.

    Raises:
        UserError: the split has no tokens, or a source has too few for one sample.
    """

    def __init__(
        self, prepared: Prepared, config: DataConfig, *, split: Split = "train", seed: int | None = None
    ) -> None:
        self.config = config
        self.prepared = prepared
        self.split = split
        seed = config.seed if seed is None else seed
        parts = prepared.split(split)
        if not parts:
            raise UserError(f"there are no {split} tokens", cure="prepare some: see data.sources", field="data")
        self._readers = [SampleReader(*part, config) for part in parts]
        self._orders = [
            SampleOrder(reader, key=derive_key(seed, i), random_offset=config.random_offset)
            for i, reader in enumerate(self._readers)
        ]
        self._mixture = Mixture([r.weight or o.num_samples for r, o in zip(self._readers, self._orders, strict=True)])
        self._located = lru_cache(maxsize=4)(self._locate_block)
        self._held_out = [SampleReader(*part, config) for part in prepared.split("validation")]

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which every source has been read once, on average."""
        return sum(order.num_samples for order in self._orders)

    def batch(self, start: int, count: int) -> Batch:
        """Samples ``start..start+count`` of the global order; a pure function."""
        index_B = np.arange(start, start + count)
        source_B, begin_B = self._windows(index_B)
        return self._read(self._readers, source_B, begin_B, index_B)

    def stream(
        self,
        state: LoaderState | None = None,
        *,
        counts: int | Iterable[int],
        rank: int = 0,
        ranks: int = 1,
        ahead: int = 2,
        pin_memory: bool = False,
    ) -> Prefetcher[tuple[Batch, LoaderState]]:
        """Batches from `state` on, prepared by a thread up to `ahead` steps before they are asked for.

        Args:
            state: where to start; None: at the start.
            counts: samples of each step over all ranks: one number for all steps, or one after the other. A lazy
                iterable is asked up to ``ahead + 1`` steps early.
            rank: this process; of each step it gets the `rank`-th of `ranks` equal runs.
            ranks: processes that share each step. `counts` must be multiples of it.
            ahead: steps to prepare early.
            pin_memory: whether to put batches into page-locked memory.

        Returns:
            An iterator of (batch, state after it), to be closed (it is a context manager too). The state counts the
            samples of all ranks, so it is the same on each. What goes wrong in the thread is raised in the consumer.
        """
        steps = _endless(counts) if isinstance(counts, int) else iter(counts)
        return Prefetcher(self._steps(state or LoaderState(), steps, rank, ranks, pin_memory), ahead)

    def validation_batches(self, batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
        """Held-out text in a fixed order, each token the target of at most one position; exactly one without a limit.

        With `max_batches`, samples are taken evenly from all of it. The last batch is filled up with rows of weight 0.

        Raises:
            UserError: nothing was held out.
        """
        if not self._held_out:
            cure = "set data.validation_fraction above 0 or give data.validation_sources"
            raise UserError("no text was held out", cure=cure, field="data.validation_fraction")
        borders = np.cumsum([0, *(reader.num_windows for reader in self._held_out)])
        total = int(borders[-1])
        wanted = total if max_batches is None else min(total, max_batches * batch_size)
        for first in range(0, wanted, batch_size):
            index_B = np.arange(first, min(first + batch_size, wanted)) * total // wanted
            source_B = np.searchsorted(borders, index_B, "right") - 1
            begin_B = (index_B - borders[source_B]) * self.config.sequence_length
            yield _padded(self._read(self._held_out, source_B, begin_B, index_B), batch_size)

    def _steps(
        self, state: LoaderState, counts: Iterator[int], rank: int, ranks: int, pin: bool
    ) -> Iterator[tuple[Batch, LoaderState]]:
        for count in counts:
            if count % ranks:
                raise ValueError(f"{count} samples a step cannot be shared by {ranks} ranks: make it a multiple")
            share = count // ranks
            batch = self.batch(state.samples + rank * share, share)
            state = LoaderState(state.samples + count)
            yield batch.pin_memory() if pin else batch, state

    def _windows(self, index_B: Int64) -> tuple[Int64, Int64]:
        """Source and first token of samples that follow each other, from blocks that are worked out once."""
        first, last = int(index_B[0]) // BLOCK, int(index_B[-1]) // BLOCK
        blocks = [self._located(block) for block in range(first, last + 1)]
        inside = slice(int(index_B[0]) - first * BLOCK, int(index_B[-1]) + 1 - first * BLOCK)
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

    def _read(self, readers: list[SampleReader], source_B: Int64, begin_B: Int64, index_B: Int64) -> Batch:
        used = np.unique(source_B).tolist()
        if len(used) == 1:
            return _to_batch(readers[used[0]].read(begin_B), index_B)
        size, length = len(index_B), self.config.sequence_length
        documents = np.zeros((size, length), np.int32) if self.config.document_mask else None
        result = Arrays(np.zeros((size, length + 1), np.int64), np.zeros((size, length), np.float32), documents)
        for number in used:
            rows = source_B == number
            for whole, part in zip(result, readers[number].read(begin_B[rows]), strict=True):
                if whole is not None:
                    whole[rows] = part
        return _to_batch(result, index_B)


def _to_batch(arrays: Arrays, index_B: Int64) -> Batch:
    tokens_BL, weights_BS, documents_BS = arrays
    return Batch(
        torch.from_numpy(tokens_BL[:, :-1].copy()),
        torch.from_numpy(tokens_BL[:, 1:].copy()),
        torch.from_numpy(weights_BS),
        None if documents_BS is None else torch.from_numpy(documents_BS),
        torch.from_numpy(index_B),
    )


def _padded(batch: Batch, size: int) -> Batch:
    """`batch` with `size` rows: those that are missing repeat the first with weight 0 and sample index -1."""
    missing = size - len(batch)
    if not missing:
        return batch

    def grow(rows: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.cat([rows, (rows[:1] * factor).to(rows.dtype).expand(missing, *rows.shape[1:])])

    return Batch(
        grow(batch.tokens_BS, 1),
        grow(batch.targets_BS, 1),
        grow(batch.weights_BS, 0),
        None if batch.documents_BS is None else grow(batch.documents_BS, 1),
        torch.cat([batch.sample_index_B, torch.full((missing,), -1)]),
    )


def _endless(count: int) -> Iterator[int]:
    while True:
        yield count
