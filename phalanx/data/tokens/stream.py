"""One split of one source as one long row of tokens, whatever files it lies in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order import Int64
from phalanx.data.tokens.shards import Mapped, Shard, map_npy

KEEP_BYTES = 256 << 20
RELEASE_WINDOWS = 256


class TokenStream:
    """The concatenation of `shards`, read in windows. Files are mapped when first touched.

    Windows may pass the end of the stream; what lies behind it is left as it was in the output.
    Shape letters: B windows, L length of a window.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._begins = np.cumsum([0, *(s.num_tokens for s in shards)], dtype=np.int64)
        self._open: dict[str, dict[int, NDArray[Any]]] = {"tokens": {}, "mask": {}, "starts": {}}
        self._maps: dict[int, list[Mapped]] = {}
        self._mapped_bytes = 0
        self._touched: set[int] = set()
        self._windows = 0
        self.has_mask = any(shard.mask is not None for shard in shards)
        self.has_documents = any(shard.starts is not None for shard in shards)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def read_tokens(self, begins_B: Int64, out_BL: NDArray[Any]) -> None:
        """Put the ids of the windows that begin at `begins_B` into `out_BL`."""
        self._copy("tokens", begins_B, out_BL)

    def read_mask(self, begins_B: Int64, out_BL: NDArray[Any]) -> None:
        """Put 1 where a token is trained on, else 0, into `out_BL`."""
        self._copy("mask", begins_B, out_BL)

    def document_starts(self, begins_B: Int64, length: int) -> tuple[list[int], list[int]]:
        """``(window, position in it)`` of every token of the windows with which a document begins."""
        rows: list[int] = []
        columns: list[int] = []

        def note(row: int, shard: int, low: int, high: int, at: int) -> None:
            starts = self._values(shard, "starts")
            first, last = starts.searchsorted((low, high)).tolist()
            if first < last:
                rows.extend([row] * (last - first))
                columns.extend((starts[first:last] + (at - low)).tolist())

        self._each(begins_B, length, note)
        return rows, columns

    def _copy(self, what: str, begins_B: Int64, out_BL: NDArray[Any]) -> None:
        def copy(row: int, shard: int, low: int, high: int, at: int) -> None:
            out_BL[row, at : at + high - low] = self._values(shard, what)[low:high]

        self._each(begins_B, out_BL.shape[1], copy)
        self._release_now_and_then(len(begins_B))

    def _each(self, begins_B: Int64, length: int, visit: Callable[[int, int, int, int, int], None]) -> None:
        """Call ``visit(window, shard, low, high, at)`` for each part of a window: ``[low, high)`` of a shard, at `at`.

        A loop over windows, on purpose: they are long, so that a plain copy of each beats an indexed gather of all.
        """
        shard_B = (self._begins.searchsorted(begins_B, "right") - 1).tolist()
        for row, (begin, shard) in enumerate(zip(begins_B.tolist(), shard_B, strict=True)):
            at = 0
            while at < length and shard < len(self.shards):
                low = begin + at - int(self._begins[shard])
                high = min(low + length - at, self.shards[shard].num_tokens)
                visit(row, shard, low, high, at)
                at += high - low
                shard += 1

    def _values(self, shard: int, what: str) -> NDArray[Any]:
        self._touched.add(shard)
        found = self._open[what].get(shard)
        if found is None:
            found = self._open[what][shard] = _READERS[what](self, shard)
        return found

    def _map(self, shard: int, mapped: Mapped) -> NDArray[Any]:
        self._maps.setdefault(shard, []).append(mapped)
        self._mapped_bytes += mapped.array.nbytes
        return mapped.array

    def _tokens(self, index: int) -> NDArray[Any]:
        shard = self.shards[index]
        return self._map(index, Mapped(shard.tokens, shard.dtype, shard.offset_bytes, shard.num_tokens))

    def _mask(self, index: int) -> NDArray[Any]:
        shard = self.shards[index]
        if shard.mask is None:
            return np.broadcast_to(np.uint8(1), (shard.num_tokens,))
        return self._map(index, map_npy(shard.mask))

    def _starts(self, index: int) -> NDArray[Any]:
        shard = self.shards[index]
        if shard.starts is None:
            return np.empty(0, np.int64)
        starts = self._map(index, map_npy(shard.starts))[shard.starts_begin : shard.starts_end]
        return starts - shard.starts_shift if shard.starts_shift else starts

    def _release_now_and_then(self, windows: int) -> None:
        """Let mapped pages go, so that the process' memory does not grow towards the size of the corpus.

        A window makes the system map many pages around those it touches (64 KiB at each place on Linux), so windows are
        counted and not bytes. A corpus that is small altogether stays mapped.
        """
        self._windows += windows
        if self._mapped_bytes > KEEP_BYTES and self._windows >= RELEASE_WINDOWS:
            for mapped in (mapped for shard in self._touched for mapped in self._maps.get(shard, ())):
                mapped.release()
            self._touched.clear()
            self._windows = 0


_READERS: dict[str, Callable[[TokenStream, int], NDArray[Any]]] = {
    "tokens": TokenStream._tokens,
    "mask": TokenStream._mask,
    "starts": TokenStream._starts,
}
