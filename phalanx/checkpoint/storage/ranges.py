"""Reading objects of an object store as files, by ranges, with a bounded read-ahead of several streams. Torch-free."""

from __future__ import annotations

import errno
import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Buffer

from phalanx.checkpoint.format.files import Span

WINDOW_BYTES = 1 << 19
"""How much a small read fetches, since the next one is likely to follow it."""

STREAMS = 8
"""Ranges that are fetched, and parts that are sent, at a time."""

SEGMENT_BYTES = 16 << 20
"""Most that is asked for at once: enough that waiting for an answer to begin hardly counts, and few enough that those
of all streams fit into memory."""

ROOM_BYTES = (STREAMS + 2) * SEGMENT_BYTES
"""Memory for what is ahead: what all streams fetch, and what is being read."""

_LEAST_BYTES = 4 << 20  # of the pieces into which less is divided, so that all streams have something to do
_KEPT = 4  # windows: the directory at the end of an archive, its beginning, and the same of another
_GAP_BYTES = 1 << 16  # between two spans: fetching it costs less than another request
_SMALL_BYTES = 1 << 20  # what is smaller takes no longer than its answer takes to begin, however many are under way
_SMALL_STREAMS = 4 * STREAMS

Fetch = Callable[[int, int], bytes]
"""Bytes ``[start, end)`` of the object."""

Take = Callable[[int, int], "memoryview | None"]
"""Some of the wanted number of bytes from a place on; None: they are not fetched ahead."""


class RangeFile(io.RawIOBase):
    """An object of `size_bytes` for reading anywhere in it.

    Large reads go straight to their place; small ones fetch a window, of which the last few are kept.

    Args:
        take: is asked before anything is fetched.

    Attributes:
        fetched_bytes: how much has been fetched, beside what `take` gave.
    """

    def __init__(self, fetch: Fetch, size_bytes: int, name: str, take: Take = lambda start, wanted: None) -> None:
        self._fetch_range, self._size_bytes, self._at, self._take = fetch, size_bytes, 0, take
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
        ahead = self._take(start, wanted)
        if ahead is not None:
            return ahead
        for first, window in self._windows.items():
            if first <= start < first + len(window):
                self._windows.move_to_end(first)
                return memoryview(window)[start - first : start - first + wanted]
        end = min(self._size_bytes, start + max(wanted, WINDOW_BYTES))
        if end - start > WINDOW_BYTES:
            return memoryview(self._fetch(start, min(end, start + SEGMENT_BYTES)))
        self._windows[start] = window = self._fetch(start, end)
        while len(self._windows) > _KEPT:
            self._windows.popitem(last=False)
        return memoryview(window)[:wanted]

    def _fetch(self, start: int, end: int) -> bytes:
        content = _all(self._fetch_range(start, end), end - start, self.name)
        self.fetched_bytes += len(content)
        return content


@dataclass(eq=False)
class _Segment:
    """Part of a file that is fetched by one request."""

    file: str
    start: int
    end: int
    content: Future[bytes] | None = None
    taken_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class Ahead:
    """Spans of files that several streams fetch before they are asked for, in the order in which they are given.

    What is asked for out of this order is fetched at once, and what was read is forgotten. For one reader; leaving the
    context lets go of what it has not read.

    Args:
        fetch: the bytes ``[start, end)`` of a file; called in threads.
        spans: of files; best in the order in which they will be read.
    """

    def __init__(self, fetch: Callable[[str, int, int], bytes], spans: Iterable[Span]) -> None:
        self._fetch = fetch
        self._segments = _segments(spans)
        self._places: dict[str, list[_Segment]] = {}
        for segment in sorted(self._segments, key=lambda one: one.start):
            self._places.setdefault(segment.file, []).append(segment)
        self._begun = self._held_bytes = 0
        is_small = all(segment.size_bytes < _SMALL_BYTES for segment in self._segments)
        self._pool = ThreadPoolExecutor(_SMALL_STREAMS if is_small else STREAMS, "ahead")

    def __enter__(self) -> Ahead:
        self._fill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take(self, file: str, start: int, wanted: int) -> memoryview | None:
        """Some of the `wanted` bytes of `file` from `start` on, when they have come; None: they are in none of the
        spans, or were taken before.

        Raises:
            OSError: they could not be fetched.
        """
        segment = self._at(file, start)
        if segment is None:
            return None
        if segment.content is None:
            self._begin(segment)
        assert segment.content is not None
        try:
            content = _all(segment.content.result(), segment.size_bytes, file)
        except BaseException:
            self._drop(segment)
            raise
        part = memoryview(content)[start - segment.start :][:wanted]
        segment.taken_bytes += len(part)
        if segment.taken_bytes >= segment.size_bytes:
            self._drop(segment)
        return part

    def _at(self, file: str, start: int) -> _Segment | None:
        places = self._places.get(file, [])
        number = bisect_right(places, start, key=lambda one: one.start) - 1
        return places[number] if number >= 0 and start < places[number].end else None

    def _begin(self, segment: _Segment) -> None:
        self._held_bytes += segment.size_bytes
        segment.content = self._pool.submit(self._fetch, segment.file, segment.start, segment.end)

    def _fill(self) -> None:
        """Begin what there is room for."""
        while self._begun < len(self._segments):
            segment = self._segments[self._begun]
            if segment.content is None:
                if self._held_bytes and self._held_bytes + segment.size_bytes > ROOM_BYTES:
                    return
                self._begin(segment)
            self._begun += 1

    def _drop(self, segment: _Segment) -> None:
        self._places[segment.file].remove(segment)
        self._held_bytes -= segment.size_bytes
        self._fill()


def _segments(spans: Iterable[Span]) -> list[_Segment]:
    """What is asked for at once: spans that follow one another together, long ones in pieces."""
    joined: list[_Segment] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.file == span.file and 0 <= span.start - last.end <= _GAP_BYTES:
            last.end = max(last.end, span.end)
        elif span.end > span.start:
            joined.append(_Segment(*span))
    fair_bytes = sum(one.size_bytes for one in joined) // (4 * STREAMS)
    most_bytes = min(max(fair_bytes, _LEAST_BYTES), SEGMENT_BYTES)
    return [
        _Segment(one.file, start, min(start + most_bytes, one.end))
        for one in joined
        for start in range(one.start, one.end, most_bytes)
    ]


def _all(content: bytes, size_bytes: int, name: str) -> bytes:
    if len(content) != size_bytes:
        raise OSError(errno.EIO, f"{len(content)} of {size_bytes} bytes came", name)
    return content
