"""Triton kernels compiled for A100 and H100, which are not here; what the interpreter takes need not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMPILED = """
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile


def compiled(kernel, kinds, given, others="*fp32", capabilities=(80, 90), **options):
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in given else kinds.get(name, others) for name in kernel.arg_names}
    for capability in capabilities:
        made = compile(ASTSource(kernel, types, given), target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        print(kernel, given, capability)
        yield capability, made


"""


def compile_offline(program: str, folder: Path) -> int:
    """Kernels made by `program`, for all GPUs together.

    Args:
        program: goes through ``compiled(kernel, types of arguments by name, values of constants, type of all other
            arguments, capabilities, options)``, which gives the compute capability and what was made. In a process of
            its own, since a kernel is either interpreted or compiled from its import on.
        folder: for what the compiler keeps.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run([sys.executable, "-c", _COMPILED + program], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return len(done.stdout.splitlines())
