import ctypes
import resource
import subprocess
import sys

import pytest

from phalanx.kernels.host_memory import keep_freed_memory

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
