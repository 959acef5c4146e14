"""Memory that outlives the process which fills it: memfds, allocated and touched once. Torch-free."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from phalanx.core.host import available_bytes

_ALLOCATE_BYTES = 256 << 20  # at once, so that a lack of memory shows before all of it is gone
_RESERVE_BYTES = 64 << 20  # left to the host


class Block:
    """`size_bytes` of memory, all of it there, in one memfd. It cannot be made smaller, so no map loses its ground.

    Attributes:
        descriptor: can read and write; for whom the memory is leased to.
        reading: can only read; handed out to everyone else.
        memory: this process's own map.

    Raises:
        OSError: the memory cannot be had.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        length = max(size_bytes, 1)
        free = available_bytes()
        if free is not None and length + _RESERVE_BYTES > free:
            raise OSError(errno.ENOMEM, f"{name} needs {length} bytes of memory, and {free} are available")
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(self.descriptor, length, name)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.reading = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.memory = memoryview(mmap.mmap(self.descriptor, length))[:size_bytes]

    def close(self) -> None:
        """Give the memory back; who has mapped it keeps it until it lets go."""
        self.memory = memoryview(b"")  # the map ends with the last view of it
        os.close(self.reading)
        os.close(self.descriptor)


def _allocate(descriptor: int, length: int, name: str) -> None:
    """All of it now: memory that is missing is an error here, and would be a SIGBUS in the middle of a copy."""
    for start in range(0, length, _ALLOCATE_BYTES):
        try:
            os.posix_fallocate(descriptor, start, min(_ALLOCATE_BYTES, length - start))
        except OSError as error:
            why = os.strerror(error.errno or errno.ENOMEM)
            raise OSError(error.errno, f"{name} needs {length} bytes of memory: {why}") from None
