"""Memory that processes of a host share: memfds, which have no name and are gone with the last process that has them.

They are handed over a local socket. None can be made smaller (sealed), so that no other process's map loses its ground.
All of a segment is allocated before it is used: memory that is missing is an error there, and would be a SIGBUS in the
middle of a copy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from phalanx.core.host import available_bytes

if TYPE_CHECKING:
    import numpy as np

_ALLOCATE_BYTES = 256 << 20  # at once, so that a lack of memory shows before all of it is gone
_RESERVE_BYTES = 64 << 20  # left to the host
_READ_BYTES = 1 << 20


class Segment:
    """A memfd that can grow until it is `seal`ed.

    Attributes:
        descriptor: can read and write; for the process to which the memory is leased.
        reading: can only read; handed out to everyone else.
        memory: this process's own map.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.reading = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self.memory = memoryview(b"")

    def grow(self, size_bytes: int) -> memoryview:
        """The memory, of at least so many bytes.

        Raises:
            OSError: the memory cannot be had.
        """
        if len(self.memory) < size_bytes:
            for start in range(0, size_bytes, _ALLOCATE_BYTES):
                try:
                    os.posix_fallocate(self.descriptor, start, min(_ALLOCATE_BYTES, size_bytes - start))
                except OSError as error:
                    why = os.strerror(error.errno or errno.ENOMEM)
                    raise OSError(error.errno, f"{self._name} needs {size_bytes} bytes of memory: {why}") from None
            self.memory = memoryview(mmap.mmap(self.descriptor, size_bytes))
        return self.memory

    def close(self) -> None:
        """Give the memory back; whatever has mapped it keeps it until it lets go."""
        self.memory = memoryview(b"")  # the map ends with the last view of it
        os.close(self.reading)
        os.close(self.descriptor)


class MemoryBlock(Segment):
    """A segment of exactly `size_bytes`, allocated and sealed.

    Raises:
        OSError: the memory cannot be had.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        length = max(size_bytes, 1)
        free = available_bytes()
        if free is not None and length + _RESERVE_BYTES > free:
            raise OSError(errno.ENOMEM, f"{name} needs {length} bytes of memory, and {free} are available")
        super().__init__(name)
        self.size_bytes = size_bytes
        try:
            self.memory = self.grow(length)[:size_bytes]
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        except BaseException:
            self.close()
            raise


# From <linux/mman.h>, since Linux 5.14; in C because mmap.madvise holds the GIL.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_STEP_BYTES = 32 << 20  # at once, so that other threads can map memory in between, and `close` does not wait long


class Map:
    """`size_bytes` of the memory behind `descriptor`, which stays the caller's; page tables are filled in a thread.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, max(size_bytes, 1), prot=protection)
        self._map.madvise(mmap.MADV_DONTFORK)  # the memory is not a loader's or any other child's to hold on to
        self._writable = writable
        self._ready = threading.Event()
        self._closing = False
        self.memory = memoryview(self._map)[:size_bytes]
        self._thread = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether touching the memory takes no page faults any more."""
        return self._ready.is_set()

    def close(self) -> None:
        """Let go of it; it is unmapped when nobody has a view of it any more."""
        self._closing = True
        self._thread.join()
        self.memory.release()
        with suppress(BufferError):
            self._map.close()

    def _populate(self) -> None:
        import numpy as np  # the keeper, which maps nothing, starts without it

        bytes_ = np.frombuffer(self._map, np.uint8)
        advice = _MADV_POPULATE_WRITE if self._writable else _MADV_POPULATE_READ
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for start in range(0, len(bytes_), _STEP_BYTES):
            if self._closing:
                return
            step = bytes_[start : start + _STEP_BYTES]
            if madvise(ctypes.c_void_p(step.ctypes.data), ctypes.c_size_t(len(step)), advice) != 0:
                _touch(step, writable=self._writable)
        self._ready.set()


def _touch(bytes_: np.ndarray, *, writable: bool) -> None:
    """What madvise does, on a kernel that cannot; the bytes stay what they are."""
    import numpy as np

    pages = bytes_[:: os.sysconf("SC_PAGESIZE")]
    if writable:
        np.bitwise_or(pages, 0, out=pages)
    else:
        pages.max()


def write_document(content: bytes) -> int:
    """The descriptor of new memory that holds `content`, for another process to read; to be closed."""
    descriptor = os.memfd_create("phalanx document", os.MFD_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_document(descriptor: int) -> bytes:
    """All that is in a document, which stays open."""
    content = bytearray()
    while part := os.pread(descriptor, _READ_BYTES, len(content)):
        content += part
    return bytes(content)
