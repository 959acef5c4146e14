"""Keep freed memory in the process: large tensors then cost no page faults.

glibc gives a freed block of more than a threshold back to the kernel, and the next tensor of that size is paid for page
by page. A step on a CPU frees and makes the same tensors over and over: with the thresholds raised, a training step's
elementwise operations run up to twice as fast (docs/kernels.md). The price is that the process stays at its peak size.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Tried in turn: some versions of glibc refuse thresholds above half of a heap (32 MiB on 64-bit systems).
_MMAP_THRESHOLDS_BYTES = (1 << 30, 32 << 20)
_TRIM_THRESHOLD_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory for the next allocation, from now on in this process.

    Returns:
        True where the C library took it (glibc); False where it has no such settings, and nothing was changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) != 1:
        return False
    return any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in _MMAP_THRESHOLDS_BYTES)
