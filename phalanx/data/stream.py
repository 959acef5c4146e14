"""One split of one source as one long row of tokens, whatever files it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from phalanx.data.order import Int64
from phalanx.data.shards import Mapped, Shard, map_npy

RELEASE_BYTES = 64 << 20


class TokenStream:
    """The concatenation of `shards`, read in windows. Files are mapped when first touched.

    Shape letters: B windows.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._begins = np.cumsum([0, *(s.num_tokens for s in shards)], dtype=np.int64)
        self._maps: dict[tuple[int, str], Mapped] = {}
        self._touched_bytes = 0

    def __len__(self) -> int:
        return int(self._begins[-1])

    @property
    def has_mask(self) -> bool:
        """Whether any token carries a loss mask."""
        return any(shard.mask is not None for shard in self.shards)

    def tokens(self, begins_B: Int64, length: int) -> NDArray[Any]:
        """Token ids of the windows ``[begin, begin + length)``, (B, length), in the type they are stored in."""
        return self._gather("tokens", begins_B, length)

    def mask(self, begins_B: Int64, length: int) -> NDArray[Any]:
        """1 where a token is trained on, else 0, (B, length)."""
        return self._gather("mask", begins_B, length)

    def document_starts(self, begins_B: Int64, length: int) -> tuple[Int64, Int64]:
        """``(window, position in it)`` of every token of the windows with which a document begins."""
        rows, columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for shard, low_B, high_B in self._touched(begins_B, length):
            starts = self._starts(shard)
            first_B, last_B = np.searchsorted(starts, low_B), np.searchsorted(starts, high_B)
            counts_B = last_B - first_B
            row = np.repeat(np.arange(len(begins_B)), counts_B)
            within = np.arange(len(row)) - np.repeat(np.cumsum(counts_B) - counts_B, counts_B)
            rows.append(row)
            columns.append(starts[first_B[row] + within] + self._begins[shard] - begins_B[row])
        return np.concatenate(rows), np.concatenate(columns)

    def _gather(self, what: str, begins_B: Int64, length: int) -> NDArray[Any]:
        result: NDArray[Any] | None = None
        for shard, low_B, high_B in self._touched(begins_B, length):
            values = self._values(shard, what)
            whole = high_B - low_B == length
            if result is None and whole.all():
                return self._count(sliding_window_view(values, length)[low_B])
            if result is None:
                result = np.empty((len(begins_B), length), self._widest(what))
            if whole.any():
                result[whole] = sliding_window_view(values, length)[low_B[whole]]
            for row in np.flatnonzero(~whole & (high_B > low_B)):
                at = int(self._begins[shard] + low_B[row] - begins_B[row])
                result[row, at : at + int(high_B[row] - low_B[row])] = values[low_B[row] : high_B[row]]
        assert result is not None, "windows lie inside the stream"
        return self._count(result)

    def _touched(self, begins_B: Int64, length: int) -> list[tuple[int, Int64, Int64]]:
        """Every shard that a window touches, with each window's part of it (empty for those that do not)."""
        first_B = np.searchsorted(self._begins, begins_B, "right") - 1
        last_B = np.searchsorted(self._begins, begins_B + length, "left") - 1
        shards = np.unique(np.concatenate([first_B, last_B]))
        if (last_B - first_B).max(initial=0) > 1:
            shards = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first_B, last_B, strict=True)]))
        result = []
        for shard in shards.tolist():
            begin, size = self._begins[shard], self.shards[shard].num_tokens
            low_B = np.clip(begins_B - begin, 0, size)
            result.append((shard, low_B, np.clip(begins_B + length - begin, low_B, size)))
        return result

    def _values(self, index: int, what: str) -> NDArray[Any]:
        key = (index, what)
        if key not in self._maps:
            shard = self.shards[index]
            if what == "mask":
                if shard.mask is None:
                    return np.broadcast_to(np.uint8(1), (shard.num_tokens,))
                self._maps[key] = map_npy(shard.mask)
            elif what == "starts":
                assert shard.starts is not None
                self._maps[key] = map_npy(shard.starts)
            else:
                self._maps[key] = Mapped(shard.tokens, shard.dtype, shard.offset_bytes, shard.num_tokens)
        return self._maps[key].array

    def _starts(self, index: int) -> Int64:
        shard = self.shards[index]
        if shard.starts is None:
            return np.empty(0, np.int64)
        starts: Int64 = self._values(index, "starts")[shard.starts_begin : shard.starts_end]
        return starts - shard.starts_shift if shard.starts_shift else starts

    def _widest(self, what: str) -> np.dtype[Any]:
        return np.dtype(np.uint8) if what == "mask" else np.result_type(*{shard.dtype for shard in self.shards})

    def _count(self, values: NDArray[Any]) -> NDArray[Any]:
        """Let mapped pages go now and then, so that a process' memory does not grow towards the size of the corpus."""
        self._touched_bytes += max(values.nbytes, 4096 * len(values))
        if self._touched_bytes > RELEASE_BYTES:
            self._touched_bytes = 0
            for mapped in self._maps.values():
                mapped.release()
        return values
