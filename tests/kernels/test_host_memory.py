import ctypes
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.kernels.host_memory import keep_freed_memory, use_huge_pages

PROGRAM = """
import resource
from phalanx.kernels.host_memory import keep_freed_memory
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4 << 20).add(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
first = faults()
assert keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_large_tensors_stop_costing_page_faults():
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    pages = 20 * 2 * (16 << 20) // resource.getpagesize()
    assert after < 0.02 * pages, f"{before} faults before, {after} after, for {pages} pages"


def test_a_c_library_without_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
    assert use_huge_pages(1 << 20) is False


HUGE = """
from pathlib import Path
from phalanx.kernels.host_memory import keep_freed_memory, use_huge_pages

def huge_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))

assert keep_freed_memory()
assert use_huge_pages(256 << 20)
before = huge_kib()
kept = [b"x" * (3 << 19) for _ in range(64)]
print(huge_kib() - before)
"""
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not _SWITCH.exists() or "[never]" in _SWITCH.read_text(),
    reason="this system has no transparent huge pages",
)
def test_the_heap_comes_in_huge_pages():
    out = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True).stdout
    assert int(out) > 0.5 * 96 * 1024, f"{out} KiB of 96 MiB are in huge pages"


LIMITED = """
import resource
from phalanx.kernels.host_memory import keep_freed_memory, use_huge_pages

assert keep_freed_memory()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
assert not use_huge_pages(4 << 30)
assert len(b"x" * (256 << 20)) == 256 << 20
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library has no mallopt")
def test_too_little_address_space_leaves_the_process_well():
    subprocess.run([sys.executable, "-c", LIMITED], check=True)
