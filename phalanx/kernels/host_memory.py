"""Keep freed memory in the process: large tensors then cost no page faults.

glibc gives a freed block of more than a threshold back to the kernel, and the next tensor of that size is paid for page
by page. A step on a CPU frees and makes the same tensors over and over: with the thresholds raised, a training step's
elementwise operations run up to twice as fast (docs/kernels.md). The price is that the process stays at its peak size.

Where that memory lies in huge pages (2 MiB on x86), address translation misses less: 2 to 3 % of a step's CPU time in a
virtual machine, whose misses cost double (docs/benchmarks/train_cpu.md). Many systems give huge pages only to those who
ask ("madvise" in /sys/kernel/mm/transparent_hugepage/enabled), so the heap is asked for.
"""

from __future__ import annotations

import ctypes
import mmap

# Parameters of mallopt(3) in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Tried in turn: some versions of glibc refuse thresholds above half of a heap (32 MiB on 64-bit systems).
_MMAP_THRESHOLDS_BYTES = (1 << 30, 32 << 20)
_TRIM_THRESHOLD_BYTES = (1 << 31) - 1

# From <sys/mman.h> of Linux.
_MADV_HUGEPAGE = 14

# The heap is grown by blocks of this size: below every mmap threshold that is set above.
_BLOCK_BYTES = 16 << 20


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory from now on; False where it has no such settings (glibc has)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) != 1:
        return False
    return any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in _MMAP_THRESHOLDS_BYTES)


def use_huge_pages(heap_bytes: int) -> bool:
    """Ask the kernel to put the next `heap_bytes` of this process' heap into huge pages; False where it cannot.

    Call it after :func:`keep_freed_memory`, or the heap would be given back at once. The heap is grown by that much
    address space and freed again; none of it takes memory before it is used.
    """
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("malloc", "free", "madvise", "mallopt")):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.restype, libc.madvise.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [libc.malloc(_BLOCK_BYTES) for _ in range(max(1, heap_bytes // _BLOCK_BYTES))]
    taken = all(block is not None for block in blocks)
    for block in blocks if taken else ():
        # All pages that the block touches: whole ones, so that neighbours join into one region.
        begin = block // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(block + _BLOCK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        taken = taken and libc.madvise(begin, end - begin, _MADV_HUGEPAGE) == 0
    for block in blocks:
        libc.free(block)
    return taken
