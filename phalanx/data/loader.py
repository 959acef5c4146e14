"""Batches of samples in a global order that depends on the seed alone, and the thread that prepares them ahead of time.

Sample g of the order is a pure function of (prepared corpus, config, seed, g): see `phalanx.data.samples`. So a
loader's state is one number, any process can read any part of the order, and the batch size may change on the way.

Shape letters: B samples, S positions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Generic, TypeVar, cast

import numpy as np
import torch

from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.data.config import DataConfig, Split
from phalanx.data.samples import Arrays, PackedSplit, SampleReader, read_mixed
from phalanx.data.shuffle import Int64
from phalanx.data.tokens.prepared_corpus import Prepared

T = TypeVar("T")
_END = object()


class Prefetcher(Generic[T]):
    """Iterates over `items` in a thread, at most `ahead` items before they are asked for.

    An exception of `items` is raised at the place where its item would have come. `close` (or leaving the ``with``
    block) stops and joins the thread; the thread is a daemon, so that an abandoned one cannot keep the process alive.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items = items
        # Bounded: the thread would otherwise read the whole corpus into memory.
        self._ready: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(maxsize=max(ahead, 1))
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._work, name="phalanx-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        item, error = self._ready.get()  # waits only where the thread is slower than training
        if item is _END:
            self._done = True
            self._thread.join()
            if error is not None:
                raise error
            raise StopIteration
        return cast(T, item)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it; further items are not made."""
        self._done = True
        self._stop.set()
        while self._thread.is_alive():
            # The thread may wait for room in a full queue, again and again until it sees that it shall stop.
            with suppress(queue.Empty):
                while True:
                    self._ready.get_nowait()
            self._thread.join(timeout=0.05)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                if self._stop.is_set():
                    return
                self._ready.put((item, None))
        # Raised again by `__next__`, at the place of the item that is missing.
        except BaseException as caught:
            error = caught
        if not self._stop.is_set():
            self._ready.put((_END, error))


@dataclass(frozen=True)
class LoaderState:
    """How many samples of the global order were handed out: all that a checkpoint keeps of a loader."""

    samples: int = 0

    def to_json(self) -> dict[str, int]:
        """As plain values."""
        return {"samples": self.samples}

    @staticmethod
    def from_json(value: dict[str, int]) -> LoaderState:
        """The state that `to_json` described."""
        return LoaderState(samples=int(value["samples"]))


class Loader:
    """Batches of one split of a prepared corpus, in the order of `seed` (None: `config.seed`).

    Raises:
        UserError: the split has no tokens, or a source has too few for one sample.
    """

    def __init__(
        self, prepared: Prepared, config: DataConfig, *, split: Split = "train", seed: int | None = None
    ) -> None:
        self.config = config
        self.prepared = prepared
        self.split = split
        self._packed = PackedSplit(prepared.split(split), config, split=split, seed=seed)
        self._held_out = [SampleReader(*part, config) for part in prepared.split("validation")]

    @property
    def samples_per_epoch(self) -> int:
        """Samples after which every source has been read once, on average."""
        return self._packed.samples_per_epoch

    @property
    def validation_samples(self) -> int:
        """Samples that hold all of the held-out text, each token once."""
        return sum(reader.num_windows for reader in self._held_out)

    def batch(self, start: int, count: int) -> Batch:
        """Samples ``start..start+count`` of the global order; a pure function."""
        return _to_batch(self._packed.read(start, count), np.arange(start, start + count))

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
        state = state or LoaderState()
        steps = repeat(counts) if isinstance(counts, int) else iter(counts)
        return Prefetcher(self._steps(state, steps, rank, ranks, pin_memory), ahead)

    def validation_batches(self, batch_size: int, max_samples: int | None = None) -> Iterator[Batch]:
        """Held-out text in a fixed order, each token the target of at most one position; exactly one without a limit.

        `max_samples` are taken evenly from all of it, the same whatever the batch size. The last batch is
        filled up with rows of weight 0.

        Raises:
            UserError: nothing was held out.
        """
        if not self._held_out:
            cure = "set data.validation_fraction above 0 or give data.validation_sources"
            raise UserError("no text was held out", cure=cure, field="data.validation_fraction")
        # The windows of all sources in one row; with a limit, windows at equal distances in it.
        borders = np.cumsum([0, *(reader.num_windows for reader in self._held_out)])
        total = self.validation_samples
        wanted = total if max_samples is None else min(total, max_samples)
        for first in range(0, wanted, batch_size):
            index_B = np.arange(first, min(first + batch_size, wanted)) * total // wanted
            source_B = np.searchsorted(borders, index_B, "right") - 1
            begin_B = (index_B - borders[source_B]) * self.config.sequence_length
            arrays = read_mixed(self._held_out, source_B, begin_B, self.config)
            yield _to_batch(arrays, index_B).filled(batch_size)

    def _steps(
        self, state: LoaderState, counts: Iterator[int], rank: int, ranks: int, pin: bool
    ) -> Iterator[tuple[Batch, LoaderState]]:
        # The state goes with the batch that it follows: a checkpoint after that step knows nothing of batches made
        # ahead.
        for count in counts:
            # Ranks take runs of the global order, so the samples of a step do not depend on how many ranks share it.
            share = share_of(count, ranks)
            batch = self.batch(state.samples + rank * share, share)
            state = LoaderState(state.samples + count)
            yield batch.pin_memory() if pin else batch, state


def _to_batch(arrays: Arrays, index_B: Int64) -> Batch:
    # Inputs and targets are the same tokens, shifted by one: each gets contiguous memory of its own.
    tokens_BL, weights_BS, documents_BS = arrays
    return Batch(
        torch.from_numpy(tokens_BL[:, :-1].copy()),
        torch.from_numpy(tokens_BL[:, 1:].copy()),
        torch.from_numpy(weights_BS),
        None if documents_BS is None else torch.from_numpy(documents_BS),
        torch.from_numpy(index_B),
    )


def share_of(count: int, ranks: int) -> int:
    """Samples of each rank; ValueError: they cannot be shared equally."""
    if count % ranks:
        raise ValueError(f"{count} samples a step cannot be shared by {ranks} ranks: make it a multiple")
    return count // ranks
