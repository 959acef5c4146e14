"""Rate of matrix products on all cores that this process may use, in fp32."""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.checks.busy import OtherWork
from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult
from phalanx.checks.thresholds import judge

_NAME = "gemm"
_SIZE = 1024
_BUDGET_S = 0.4
_ACTION = "look for other work on the host (top), heat, and a CPU governor that saves power"


def run(host: Host) -> CheckResult:
    """Multiply for a moment; the best product counts, since everything else only adds time."""
    import numpy as np

    a = np.random.default_rng(0).random((_SIZE, _SIZE), dtype=np.float32)
    out = np.empty_like(a)
    with OtherWork(host.proc) as other:
        seconds = best_time(lambda: np.matmul(a, a, out=out), _BUDGET_S)
    return judge(host, _NAME, 2 * _SIZE**3 / seconds / 1e9, "GFLOP/s", action=_ACTION, other=other)


def best_time(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest of as many runs as fit into the budget, after one to warm up; at least three."""
    work()
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began_s < budget_s:
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


CHECK = Check(_NAME, "rate of matrix products on the CPU", "quick", run, 20.0, isolated=True, uses=frozenset({"cpu"}))
