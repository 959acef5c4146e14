"""What all checks of NVIDIA's GPUs have in common: no GPU is a reason to skip, a silent driver one to fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
