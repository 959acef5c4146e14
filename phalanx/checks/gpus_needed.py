"""What all checks of NVIDIA's GPUs have in common: no GPU is a reason to skip, a silent driver one to fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.checks.gpus import Gpu, NoGpusError, SilentGpusError
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, skipped


def of_gpus(name: str, host: Host, judge: Callable[[Sequence[Gpu]], CheckResult]) -> CheckResult:
    """The verdict on this host's GPUs."""
    try:
        gpus = host.gpus.read()
    except NoGpusError as absent:
        return skipped(name, str(absent))
    except SilentGpusError as silent:
        return failed(name, str(silent), "take the host out; reset the GPUs or reboot")
    return judge(gpus) if gpus else skipped(name, "the driver finds no GPU")


def with_torch(name: str, host: Host, measure: Callable[[Any], CheckResult]) -> CheckResult:
    """What `measure` finds with torch, which is given to it; skipped where that has no GPU."""
    if not (host.proc / "driver/nvidia").exists():
        return skipped(name, "no NVIDIA driver on this host")
    torch: Any = importlib.import_module("torch")  # by name: the rooms above do not know torch
    return measure(torch) if torch.cuda.is_available() else skipped(name, "torch cannot use CUDA here")
