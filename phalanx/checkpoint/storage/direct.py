"""Writing large files past the page cache. Torch-free.

A checkpoint that goes through the page cache costs the cores of training a page for every 4 kB, and takes memory from
whatever else is cached. For 300 MB on a cloud machine with ext4 that was 0.11 to 1.4 s of system time (the more, the
less memory the host had lent to the machine by then), and 0.025 s with O_DIRECT.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from typing_extensions import Buffer

BUFFER_BYTES = 4 << 20
_BUFFERS = 2
_BLOCK_BYTES = 4096  # no file system wants more of addresses, offsets and lengths
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP)  # said by file systems that take the flag and then refuse the write


class Digest(Protocol):
    """What `hashlib.sha256()` returns."""

    def update(self, data: Buffer, /) -> None:
        """`data` comes next."""


def write_whole(descriptor: int, content: Iterable[Buffer], digest: Digest | None = None) -> None:
    """Write all of `content` to an empty file, from its start, and make it durable.

    What does not fill `BUFFER_BYTES` goes through the page cache, and so does everything where the file system cannot
    do without. Takes `_BUFFERS` times `BUFFER_BYTES`: one is filled while the others are written and summed, each in a
    thread of its own, since a disk may be as fast as a core sums.

    Args:
        digest: is given all that is written; None: nothing is.

    Raises:
        OSError: storage refuses.
    """
    with ThreadPoolExecutor(1, "write") as writing, ThreadPoolExecutor(1, "sum") as summing:
        writer = _Writer(descriptor, writing, summing, digest)
        try:
            for piece in content:
                writer.add(memoryview(piece).cast("B"))
            writer.finish()
        finally:
            for thread in (writing, summing):
                thread.shutdown(cancel_futures=True)


class _Writer:
    def __init__(
        self, descriptor: int, writing: ThreadPoolExecutor, summing: ThreadPoolExecutor, digest: Digest | None
    ) -> None:
        self._descriptor, self._writing, self._summing, self._digest = descriptor, writing, summing, digest
        self._buffer: mmap.mmap | None = None  # page-aligned, as O_DIRECT wants it
        self._filled = 0
        self._is_refused = False
        self._full: deque[tuple[mmap.mmap, list[Future[None]]]] = deque()

    def add(self, data: memoryview) -> None:
        """`data` comes next."""
        while data:
            buffer = self._filling()
            part = data[: BUFFER_BYTES - self._filled]
            buffer[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == BUFFER_BYTES:
                self._hand_over(buffer)

    def finish(self) -> None:
        """That was all."""
        while self._full:
            self._emptied()
        if self._filled:
            with memoryview(self._filling()) as buffer, buffer[: self._filled] as rest:
                _write_all(self._descriptor, rest)
                if self._digest is not None:
                    self._digest.update(rest)
        os.fsync(self._descriptor)

    def _filling(self) -> mmap.mmap:
        """The buffer that is filled: a new one, or that which was handed over first, once it is done with."""
        if self._buffer is None:
            self._buffer = mmap.mmap(-1, BUFFER_BYTES) if len(self._full) < _BUFFERS else self._emptied()
        return self._buffer

    def _hand_over(self, full: mmap.mmap) -> None:
        """Have it written and summed, in order, and go on with another one."""
        asked = [self._writing.submit(self._write, full)]
        if self._digest is not None:
            asked.append(self._summing.submit(self._digest.update, full))
        self._full.append((full, asked))
        self._buffer, self._filled = None, 0

    def _write(self, full: mmap.mmap) -> None:
        if self._is_refused:
            return  # what came before this is missing
        try:
            _write_full(self._descriptor, full)
        except BaseException:
            self._is_refused = True
            raise

    def _emptied(self) -> mmap.mmap:
        buffer, asked = self._full.popleft()
        for one in asked:
            one.result()
        return buffer


def _write_full(descriptor: int, buffer: mmap.mmap) -> None:
    """Past the cache if the file lies on a block boundary, as it does until a write was cut short."""
    with memoryview(buffer) as view:
        done = _write_direct(descriptor, view)
        with view[done:] as rest:
            _write_all(descriptor, rest)


def _write_direct(descriptor: int, view: memoryview) -> int:
    """How much of it could be written so; 0 where the file system cannot."""
    if not _DIRECT or os.lseek(descriptor, 0, os.SEEK_CUR) % _BLOCK_BYTES or not _set_direct(descriptor, wanted=True):
        return 0
    try:
        return os.write(descriptor, view)
    except OSError as error:
        if error.errno not in _NOT_SO:
            raise
        return 0


def _write_all(descriptor: int, view: memoryview) -> None:
    _set_direct(descriptor, wanted=False)
    while view:
        view = view[os.write(descriptor, view) :]


def _set_direct(descriptor: int, *, wanted: bool) -> bool:
    """Whether writes go past the cache from now on."""
    if not _DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & _DIRECT) == wanted:
        return wanted
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _DIRECT)
    except OSError:
        return False
    return wanted
