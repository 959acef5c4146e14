"""Whether layers are compiled, where `train.compile` leaves that open, and what stands in the way. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

from phalanx.train.config import RunConfig


class Compiling(NamedTuple):
    """Whether layers are compiled.

    Attributes:
        why: what a reader of the settings would not expect; empty where there is nothing.
    """

    on: bool
    why: str = ""


def decide_compiling(config: RunConfig, on_gpu: bool) -> Compiling:
    """What `train.compile` comes to, with the layout known.

    On a CPU layers run as they are written unless compiling is asked for: its kernels are fused by hand, and a compiler
    takes tens of seconds.
    """
    wanted, opaque = config.train.compile, config.not_traced()
    if wanted is False or (wanted == "auto" and not on_gpu):
        return Compiling(False)
    if wanted == "auto":
        if opaque and config.train.recompute == "selective":
            return Compiling(False, f"layers are not compiled: train.recompute = 'selective' does not go with {opaque}")
        if lacking := lacking_for_a_gpu():
            return Compiling(False, f"layers are not compiled: {lacking}, which Triton needs to launch its kernels")
    return Compiling(True, f"layers are compiled in pieces, around {opaque}" if opaque else "")


def lacking_for_a_gpu() -> str:
    """What a compiler for GPUs needs on this machine and is not there; empty: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "there is no package triton here"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "there is no C compiler here (cc, gcc, clang, or the one named by CC)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"there is no {header} here"
