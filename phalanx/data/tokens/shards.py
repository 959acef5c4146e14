"""Token shards on disk: one-dimensional ``.npy`` files written as a stream and read through memory maps.

One split of one source as one long row of tokens, whatever files it lies in.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.data.shuffle import Int64

_HEADER_BYTES = 128


@dataclass(frozen=True)
class TokenShard:
    """A run of tokens of one split: ids of type `dtype` from byte `offset_bytes` of the file `tokens` on. `starts`
    holds the positions at which documents begin (int64, ascending); `mask` is 1 where a token is trained on. Of both,
    position `starts_shift` is the first of the run."""

    tokens: Path
    dtype: str
    offset_bytes: int
    num_tokens: int
    starts: Path | None = None
    starts_begin: int = 0
    starts_end: int = 0
    starts_shift: int = 0
    mask: Path | None = None


def cut_shard(shard: TokenShard, place: int) -> tuple[TokenShard, TokenShard]:
    """The first `place` tokens of a shard, and those that follow, as they lie."""
    between = shard.starts_begin
    if shard.starts is not None:
        starts = map_npy(shard.starts).array[shard.starts_begin : shard.starts_end]
        between += int(starts.searchsorted(place + shard.starts_shift))
    first = replace(shard, num_tokens=place, starts_end=between)
    return first, replace(
        shard,
        offset_bytes=shard.offset_bytes + place * np.dtype(shard.dtype).itemsize,
        num_tokens=shard.num_tokens - place,
        starts_begin=between,
        starts_shift=shard.starts_shift + place,
    )


def trained_tokens(shard: TokenShard) -> int:
    """How many of a shard's tokens are trained on."""
    if shard.mask is None:
        return shard.num_tokens
    return int(np.count_nonzero(map_npy(shard.mask).array[shard.starts_shift :][: shard.num_tokens]))


class NpyWriter:
    """Appends to a one-dimensional ``.npy`` file whose length is known only at the end; `digest` is of the values."""

    def __init__(self, file: BinaryIO, dtype: DTypeLike) -> None:
        self.count = 0
        self._file = file
        self._dtype = np.dtype(dtype)
        self._hash = hashlib.blake2b(digest_size=16)
        file.write(self._header())

    def append(self, values: NDArray[Any]) -> None:
        """Write `values`, cast to the file's type (which must hold them)."""
        block = np.ascontiguousarray(values, self._dtype).tobytes()
        self._file.write(block)
        self._hash.update(block)
        self.count += len(values)

    @property
    def digest(self) -> str:
        """BLAKE2b of the values written so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Put the length into the header."""
        self._file.seek(0)
        self._file.write(self._header())

    def _header(self) -> bytes:
        buffer = io.BytesIO()
        entry = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(buffer, entry)
        header = buffer.getvalue()
        assert len(header) == _HEADER_BYTES, "numpy pads a header of one dimension to 128 bytes"
        return header


@contextmanager
def npy_writer(path: Path, dtype: DTypeLike) -> Iterator[NpyWriter]:
    """A `NpyWriter` whose file takes the name `path` only when the block ends without an error."""
    with atomic_writer(path) as file:
        writer = NpyWriter(file, dtype)
        yield writer
        writer.finish()


class Mapped:
    """A file's values as a read-only array that is not in memory until it is touched, and can be let go again."""

    def __init__(self, path: Path, dtype: DTypeLike, offset_bytes: int, count: int) -> None:
        needed = offset_bytes + count * np.dtype(dtype).itemsize
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from None
        if len(self._map) < needed:
            raise _damaged(path, f"it has {len(self._map)} bytes, {needed} are needed")
        self.array: NDArray[Any] = np.frombuffer(self._map, dtype, count, offset_bytes)

    def release(self) -> None:
        """Give the pages back to the system (they stay in its cache); the array stays valid."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def map_npy(path: Path) -> Mapped:
    """Map a one-dimensional ``.npy`` file; UserError: it is missing, cut short or not such a file."""
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if len(shape) != 1 or dtype.hasobject:
        raise _damaged(path, f"it holds {dtype} of shape {shape}")
    return Mapped(path, dtype, offset, shape[0])


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"a prepared file is missing or damaged ({why})",
        cure="delete its folder and run `phalanx data prepare` again",
        value=str(path),
    )


KEEP_BYTES = 256 << 20
RELEASE_WINDOWS = 256


class TokenStream:
    """The concatenation of `shards`, read in windows. Files are mapped when first touched.

    Windows may pass the end of the stream; what lies behind it is left as it was in the output.
    Shape letters: B windows, L length of a window.
    """

    def __init__(self, shards: Sequence[TokenShard]) -> None:
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

    def document_at(self, token: int) -> int:
        """The number, from 0, of the document that a token is of; counted over all shards."""
        shard = int(self._begins.searchsorted(token, "right")) - 1
        before = sum(len(self._values(earlier, "starts")) for earlier in range(shard))
        within = int(self._values(shard, "starts").searchsorted(token - int(self._begins[shard]), "right"))
        return max(before + within - 1, 0)

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
        """``tokens``, ``mask`` or ``starts`` of a shard, mapped when they are first touched."""
        self._touched.add(shard)
        found = self._open[what].get(shard)
        if found is None:
            found = self._open[what][shard] = self._opened(shard, what)
        return found

    def _opened(self, index: int, what: str) -> NDArray[Any]:
        shard = self.shards[index]
        if what == "tokens":
            mapped = Mapped(shard.tokens, shard.dtype, shard.offset_bytes, shard.num_tokens)
        elif what == "mask":
            if shard.mask is None:
                return np.broadcast_to(np.uint8(1), (shard.num_tokens,))
            mapped = map_npy(shard.mask)
        else:
            if shard.starts is None:
                return np.empty(0, np.int64)
            mapped = map_npy(shard.starts)
        self._maps.setdefault(index, []).append(mapped)
        self._mapped_bytes += mapped.array.nbytes
        if what == "tokens":
            return mapped.array
        if what == "mask":
            return mapped.array[shard.starts_shift :]
        starts = mapped.array[shard.starts_begin : shard.starts_end]
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
