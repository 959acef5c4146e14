"""Reading an object of an object store as a file, by ranges, with a bounded read-ahead. Torch-free."""

from __future__ import annotations

import errno
import io
from collections import OrderedDict
from collections.abc import Callable

from typing_extensions import Buffer

WINDOW_BYTES = 1 << 19
"""How much a small read fetches, since the next one is likely to follow it."""

_KEPT = 4  # windows: the directory at the end of an archive, its beginning, and the same of another
_STRIDE_BYTES = 16 << 20  # fetched at a time for a large read, which bounds the memory it takes

Fetch = Callable[[int, int], bytes]
"""Bytes ``[start, end)`` of the object."""


class RangeFile(io.RawIOBase):
    """An object of `size_bytes` for reading anywhere in it.

    Large reads go straight to their place; small ones fetch a window, of which the last few are kept.

    Attributes:
        fetched_bytes: how much has been fetched.
    """

    def __init__(self, fetch: Fetch, size_bytes: int, name: str) -> None:
        self._fetch_range, self._size_bytes, self._at = fetch, size_bytes, 0
        self.name = name
        self.fetched_bytes = 0
        self._windows: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "before the beginning", self.name)
        self._at = at
        return at

    def readinto(self, buffer: Buffer) -> int:
        """Fill all of `buffer`, unless the object ends before."""
        target = memoryview(buffer).cast("B")[: max(0, self._size_bytes - self._at)]
        done = 0
        while done < len(target):
            piece = self._piece(self._at, len(target) - done)
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def readall(self) -> bytes:
        """The rest, in one piece."""
        content = bytearray(max(0, self._size_bytes - self._at))
        self.readinto(content)
        return bytes(content)

    def _piece(self, start: int, wanted: int) -> memoryview:
        """Some of the wanted bytes at `start`."""
        for first, window in self._windows.items():
            if first <= start < first + len(window):
                self._windows.move_to_end(first)
                return memoryview(window)[start - first : start - first + wanted]
        end = min(self._size_bytes, start + max(wanted, WINDOW_BYTES))
        if end - start > WINDOW_BYTES:
            return memoryview(self._fetch(start, min(end, start + _STRIDE_BYTES)))
        self._windows[start] = window = self._fetch(start, end)
        while len(self._windows) > _KEPT:
            self._windows.popitem(last=False)
        return memoryview(window)[:wanted]

    def _fetch(self, start: int, end: int) -> bytes:
        content = self._fetch_range(start, end)
        if len(content) != end - start:
            raise OSError(errno.EIO, f"{len(content)} of {end - start} bytes came", self.name)
        self.fetched_bytes += len(content)
        return content
