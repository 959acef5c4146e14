"""Memory of the keeper as a rank sees it: mapped, and its page tables filled in the background. Torch-free."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

# From <linux/mman.h>, since Linux 5.14; in C because mmap.madvise holds the GIL.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_STEP_BYTES = 32 << 20  # at once, so that other threads can map memory in between, and `close` does not wait long


class Map:
    """`size_bytes` of the memory behind `descriptor`, which stays the caller's.

    Attributes:
        memory: the bytes.
        is_ready: whether touching them takes no page faults any more.

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
    pages = bytes_[:: os.sysconf("SC_PAGESIZE")]
    if writable:
        np.bitwise_or(pages, 0, out=pages)
    else:
        pages.max()
