"""Cores and what they compute: as many as there are, as fast as they were, and the same bits each time.

Silent corruption: the same product is made several times on each core that this process may use, alone on it. What most
of them have is taken for right; besides, a product of small whole numbers is compared with the exact one, in case that
all cores are wrong alike. It finds cores that err often; one that errs once in a day it does not.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.thresholds import OtherWork, given_threshold, hold, judge
from phalanx.core.host import own_groups, read_number, read_text

_CORES_NAME = "cores"


def check_cores(host: Host) -> CheckResult:
    """Count the cores that are present, online and allowed."""
    system = host.sys / "devices/system/cpu"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_quota(host)
    return judge_cores(
        count_list(read_text(system / "present") or ""),
        count_list(read_text(system / "online") or ""),
        allowed,
        quota,
        given_threshold(host, _CORES_NAME),
        smt_off=(read_text(system / "smt/control") or "") in ("off", "forceoff"),
    )


def judge_cores(
    present: int,
    online: int,
    allowed: int,
    quota: float | None,
    given: Threshold | None = None,
    *,
    smt_off: bool = False,
) -> CheckResult:
    """The verdict.

    Args:
        quota: cores' worth of time that the control group grants; None: no limit.
        smt_off: somebody switched off the second thread of each core; they are present and offline then.
    """
    notes = ["the second thread of each core is switched off"] if smt_off else []
    if allowed < online:
        notes.append(f"this process may use {allowed} of {online}")
    if quota is not None and quota < allowed:
        notes.append(f"its control group grants the time of {quota:g}")
    if given:
        action = "ask for more cores, or bring them online"
        return hold(_CORES_NAME, min(allowed, quota or allowed), "cores", given, action)
    threshold = Threshold(present, "cores that are present") if present and not smt_off else None
    action = "bring them online: /sys/devices/system/cpu/cpu*/online"
    result = hold(_CORES_NAME, online or allowed, "cores", threshold, action)
    return result.explained(result.reason, *notes)


def count_list(text: str) -> int:
    """How many numbers a list of the kernel names: ``0-3,8`` -> 5."""
    total = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def read_quota(host: Host) -> float | None:
    """Cores' worth of time that the control group of this process grants; None: no limit."""
    group = own_groups(host.proc).get("")
    text = read_text(host.sys / "fs/cgroup" / group.lstrip("/") / "cpu.max") if group is not None else None
    quota, _, period = (text or "max 1").partition(" ")
    if quota != "max":
        return int(quota) / int(period)
    quota_us = read_number(host.sys / "fs/cgroup/cpu/cpu.cfs_quota_us") or -1
    period_us = read_number(host.sys / "fs/cgroup/cpu/cpu.cfs_period_us") or 0
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


CORES = Check(_CORES_NAME, "all cores are online; how many this process may use", "passive", check_cores)


_GEMM_NAME = "gemm"
_GEMM_SIZE = 1024
_BUDGET_S = 0.4
_GEMM_ACTION = "look for other work on the host (top), heat, and a CPU governor that saves power"


def check_gemm(host: Host) -> CheckResult:
    """Multiply for a moment; the best product counts, since everything else only adds time."""
    import numpy as np

    a = np.random.default_rng(0).random((_GEMM_SIZE, _GEMM_SIZE), dtype=np.float32)
    out = np.empty_like(a)
    with OtherWork(host.proc) as other:
        seconds = best_time(lambda: np.matmul(a, a, out=out), _BUDGET_S)
    return judge(host, _GEMM_NAME, 2 * _GEMM_SIZE**3 / seconds / 1e9, "GFLOP/s", action=_GEMM_ACTION, other=other)


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


GEMM = Check(
    _GEMM_NAME, "rate of matrix products on the CPU", "quick", check_gemm, 20.0, isolated=True, uses=frozenset({"cpu"})
)


_GEMM_REPEAT_NAME = "gemm-repeat"
_GEMM_REPEAT_SIZE = 192
_REPEATS = 8
_GEMM_REPEAT_ACTION = "take the host out: its processor computes wrongly; test it with the maker's tool"

Multiply = Callable[[Any, Any], Any]


def check_gemm_repeat(host: Host) -> CheckResult:
    """Multiply on each core."""
    # Before numpy is loaded: only the thread that multiplies is bound to a core, so it must be the only one.
    os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_NUM_THREADS="1")
    import numpy as np

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    return test_cores(cores, np.matmul)


def test_cores(cores: Sequence[int], multiply: Multiply, repeats: int = _REPEATS) -> CheckResult:
    """The verdict on `multiply` on these cores. Afterwards the process may use all of them again."""
    import numpy as np

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, _GEMM_REPEAT_SIZE, _GEMM_REPEAT_SIZE), dtype=np.float32)
    # Sums stay below 2**24: exact in fp32.
    whole = generator.integers(-64, 64, (2, _GEMM_REPEAT_SIZE, _GEMM_REPEAT_SIZE))
    exact = (whole[0] @ whole[1]).astype(np.float32)
    floats = whole.astype(np.float32)
    digests: dict[int, list[str]] = {}
    inexact = []
    try:
        for core in cores:
            _pin([core])
            digests[core] = [hashlib.sha256(multiply(a, b).tobytes()).hexdigest() for _ in range(repeats)]
            if not np.array_equal(multiply(floats[0], floats[1]), exact):
                inexact.append(core)
    finally:
        _pin(cores)
    return judge_digests(digests, inexact)


def judge_digests(digests: Mapping[int, Sequence[str]], inexact: Sequence[int] = ()) -> CheckResult:
    """The verdict: which cores had bits that most products did not have."""
    counted = Counter(digest for each in digests.values() for digest in each)
    usual, _ = counted.most_common(1)[0]
    wrong = {core: sum(digest != usual for digest in each) for core, each in digests.items()}
    bad = [f"core {core}: {count} of {len(digests[core])}" for core, count in wrong.items() if count]
    bad += [f"core {core}: not the exact product" for core in inexact if not wrong[core]]
    total = sum(map(len, digests.values()))
    if bad:
        reason = f"products differ in their bits: {'; '.join(bad)}"
        return failed(_GEMM_REPEAT_NAME, reason, _GEMM_REPEAT_ACTION, value=sum(wrong.values()), unit="wrong products")
    return passed(_GEMM_REPEAT_NAME, f"{total} products on {len(digests)} cores", value=0.0, unit="wrong products")


def _pin(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


GEMM_REPEAT = Check(
    _GEMM_REPEAT_NAME,
    "the same product has the same bits on each core",
    "quick",
    check_gemm_repeat,
    60.0,
    isolated=True,
    uses=frozenset({"cpu"}),
)
