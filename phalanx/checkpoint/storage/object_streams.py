"""Objects as streams with bounded memory: read by ranges with read-ahead, written in parts, several at a time on S3.

An object that is written is there only when all of its parts are.
"""

from __future__ import annotations

import errno
import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from phalanx.checkpoint.format.checkpoint_files import Span
from phalanx.checkpoint.format.run_sums import SeekableFile
from phalanx.core.object_requests import LISTING_S, bounded, retried

WINDOW_BYTES = 1 << 19  # a small read fetches so much, since the next one is likely to follow it
STREAMS = 8  # ranges that are fetched, and parts that are sent, at a time
# Most that is asked for at once: enough that waiting for an answer to begin hardly counts, and few enough that those of
# all streams fit into memory.
SEGMENT_BYTES = 16 << 20
ROOM_BYTES = (STREAMS + 2) * SEGMENT_BYTES  # memory for what is ahead: what all streams fetch, and what is being read
_LEAST_BYTES = 4 << 20  # of the pieces into which less is divided, so that all streams have something to do
_KEPT = 4  # windows: the directory at the end of an archive, its beginning, and the same of another
_GAP_BYTES = 1 << 16  # between two spans: fetching it costs less than another request
_SMALL_BYTES = 1 << 20  # what is smaller takes no longer than its answer takes to begin, however many are under way
_SMALL_STREAMS = 4 * STREAMS

Fetch = Callable[[int, int], bytes]
"""Bytes ``[start, end)`` of the object."""

Take = Callable[[int, int], "memoryview | None"]
"""Some of the wanted number of bytes from a place on; None: they are not fetched ahead."""


class RangeFile(SeekableFile):
    """An object of `size_bytes` for reading anywhere in it.

    Large reads go straight to their place; small ones fetch a window, of which the last few are kept. `take` is called
    before anything is fetched; `fetched_bytes` counts what it did not give.
    """

    def __init__(self, fetch: Fetch, size_bytes: int, name: str, take: Take = lambda start, wanted: None) -> None:
        super().__init__(size_bytes, name)
        self._fetch_range, self._take = fetch, take
        self.fetched_bytes = 0
        self._windows: OrderedDict[int, bytes] = OrderedDict()

    def readinto(self, buffer: Buffer) -> int:
        """Fill all of `buffer`, unless the object ends before."""
        target = self.left(buffer)
        done = 0
        while done < len(target):
            piece = self._piece(self.at, len(target) - done)
            target[done : done + len(piece)] = piece
            done += len(piece)
            self.at += len(piece)
        return done

    def readall(self) -> bytes:
        """The rest, in one piece."""
        content = bytearray(max(0, self._size_bytes - self.at))
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
            end = min(end, start + SEGMENT_BYTES)
        content = _all(self._fetch_range(start, end), end - start, self.name)
        self.fetched_bytes += len(content)
        if end - start <= WINDOW_BYTES:
            self._windows[start] = content
            while len(self._windows) > _KEPT:
                self._windows.popitem(last=False)
        return memoryview(content)[:wanted]


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
    context drops what it has not read. `fetch` gives the bytes ``[start, end)`` of a file; it is called in threads.
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
        spans, or were taken before. OSError: they could not be fetched."""
        places = self._places.get(file, [])
        number = bisect_right(places, start, key=lambda one: one.start) - 1
        if number < 0 or start >= places[number].end:
            return None
        segment = places[number]
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


# Parts of a multipart upload, of which S3 allows 10,000: up to which number they have how many bytes. Small ones first,
# so that all streams have something to do; later such that waiting for an answer hardly counts, and an object can have
# 540 GB.
PARTS = ((32, 5 << 20), (128, 8 << 20), (2000, 16 << 20), (10_000, 64 << 20))
FIXED_BYTES = 32 << 20  # of a part where all have to be of one length, or go one by one
MEMORY_BYTES = STREAMS * (16 << 20)  # of parts that are being sent, beside the one that is being filled
_PIECE_BYTES = 4 << 20  # summed at a time, while the processor still has it in its cache


def upload(fs: Any, path: str, content: Iterable[Buffer]) -> tuple[int, str]:
    """Write an object; its length and SHA-256.

    Raises:
        OSError: storage refused, also after some tries; names `path`. Nothing is there then.
    """
    digest, size_bytes = hashlib.sha256(), 0

    def summed() -> Iterator[memoryview]:
        nonlocal size_bytes
        for buffer in content:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                size_bytes += len(piece)
                yield piece

    parts = _parts(summed(), fixed=getattr(fs, "fixed_upload_size", not hasattr(fs, "call_s3")))
    begun = list(islice(parts, 2))
    if len(begun) < 2:
        whole = begun[0] if begun else b""
        retried(path, lambda: bounded(fs, fs.pipe_file, path, whole, size_bytes=len(whole)))
        return size_bytes, digest.hexdigest()

    def all_parts() -> Iterator[bytes]:
        while begun:  # without keeping the first ones in memory
            yield begun.pop(0)
        yield from parts

    if hasattr(fs, "call_s3"):
        _Multipart(fs, path).send(all_parts())
    else:
        _one_by_one(fs, path, all_parts())
    return size_bytes, digest.hexdigest()


def abandon(fs: Any, root: str, is_dead: Callable[[str], bool]) -> None:
    """Give up the uploads that killed writers left half way: S3 keeps their parts, unseen and paid for, for ever.

    Args:
        fs: the file system; of others than S3 nothing is done.
        root: prefix of the areas.
        is_dead: whether nobody writes into the area of a name any more.
    """
    if not hasattr(fs, "call_s3"):
        return
    bucket, key, _ = fs.split_path(root)
    prefix = f"{key}/" if key else ""
    ask = partial(bounded, fs, fs.call_s3, limit_s=LISTING_S)
    try:
        listed = retried(root, lambda: ask("list_multipart_uploads", Bucket=bucket, Prefix=prefix))
        for one in listed.get("Uploads", []):
            area, slash, _ = one["Key"].removeprefix(prefix).partition("/")
            if one["Key"].startswith(prefix) and slash and is_dead(area):
                retried(one["Key"], partial(bounded, fs, fs.abort_mpu, bucket, one["Key"], one["UploadId"]))
    except OSError:
        return  # it may be forbidden to list them, and it is only for tidiness


def _parts(pieces: Iterator[memoryview], *, fixed: bool) -> Iterator[bytes]:
    """The content in parts; all but the last of one length where storage wants that (`fixed`)."""
    part, number = bytearray(), 1
    for piece in pieces:
        while piece:
            limit = FIXED_BYTES if fixed else next((size for last, size in PARTS if number <= last), PARTS[-1][1])
            more = piece[: limit - len(part)]
            part += more
            piece = piece[len(more) :]
            if len(part) == limit:
                yield bytes(part)
                part.clear()
                number += 1
    if part:
        yield bytes(part)


class _Multipart:
    """A multipart upload to S3: its parts are sent several at a time, each with its own tries."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._tags: dict[int, str] = {}
        self._under_way: dict[Future[str], tuple[int, int]] = {}
        self._size_bytes = 0

    def send(self, parts: Iterator[bytes]) -> None:
        """Send all, and make them one object; where one cannot be sent, nothing is left of the others."""
        self._object["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        pool = ThreadPoolExecutor(STREAMS, "upload")
        try:
            for number, part in enumerate(parts, 1):
                while self._under_way and sum(n for _, n in self._under_way.values()) + len(part) > MEMORY_BYTES:
                    self._take_answers()
                self._size_bytes += len(part)
                self._under_way[pool.submit(self._send, number, part)] = number, len(part)
            while self._under_way:
                self._take_answers()
            self._complete()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            wait(list(self._under_way))  # a part that came after the end would be kept for ever
            with suppress(Exception):
                self._call("abort_multipart_upload")
            raise
        finally:
            pool.shutdown(wait=False)

    def _take_answers(self) -> None:
        for sent in wait(list(self._under_way), return_when=FIRST_COMPLETED).done:
            number, _ = self._under_way.pop(sent)
            self._tags[number] = sent.result()

    def _send(self, number: int, part: bytes) -> str:
        answer = self._call("upload_part", PartNumber=number, Body=part, size_bytes=len(part))
        return str(answer["ETag"])

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except OSError:
            # The answer to a try may have been lost; a further one then finds no such upload, but the object.
            there = None
            with suppress(OSError):
                there = int(retried(self._path, lambda: bounded(self._fs, self._fs.info, self._path))["size"])
            if there != self._size_bytes:
                raise

    def _call(self, method: str, *, size_bytes: int = 0, **options: Any) -> Any:
        given = {**self._object, **options}
        return retried(self._path, lambda: bounded(self._fs, self._fs.call_s3, method, size_bytes=size_bytes, **given))


def _one_by_one(fs: Any, path: str, parts: Iterator[bytes]) -> None:
    """By a file of the client library, which sends one part after the other."""
    file = retried(path, partial(_begin, fs, path, next(parts)))
    try:
        for part in parts:
            try:
                file.write(part)
            except Exception:
                retried(path, file.flush)  # the file keeps what it could not send, so it must not be written again
        _end(file, path)
    except BaseException:
        _give_up(file)
        raise


def _begin(fs: Any, path: str, first: bytes) -> Any:
    """Open the object and send its first part: what begins a multipart upload cannot be tried again by itself."""
    file = fs.open(path, "wb", block_size=FIXED_BYTES, autocommit=False)
    try:
        file.write(first)
    except BaseException:
        _give_up(file)
        raise
    return file


def _end(file: Any, path: str) -> None:
    def flush() -> None:
        file.forced = False  # of a try that failed
        file.flush(force=True)

    if isinstance(file, AbstractBufferedFile):
        retried(path, flush)
        retried(path, file.commit)
        file.closed = True  # closing would send again
    else:
        file.close()


def _give_up(file: Any) -> None:
    if isinstance(file, AbstractBufferedFile):
        with suppress(Exception):
            file.discard()
        file.closed = True  # or what is left would be sent when the file is collected
    else:
        with suppress(Exception):
            file.fs.rm_file(file.path)
