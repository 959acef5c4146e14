"""Silent corruption: the same matrix product must have the same bits each time, on each core.

The product is made several times on each core that this process may use, alone on it. What most of them have is taken
for right; besides, a product of small whole numbers is compared with the exact one, in case that all cores are wrong
alike. It finds cores that err often; one that errs once in a day it does not.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed

_NAME = "gemm-repeat"
_SIZE = 192
_REPEATS = 8
_ACTION = "take the host out: its processor computes wrongly; test it with the maker's tool"

Multiply = Callable[[Any, Any], Any]


def run(host: Host) -> CheckResult:
    """Multiply on each core."""
    # Before numpy is loaded: only the thread that multiplies is bound to a core, so it must be the only one.
    os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_NUM_THREADS="1")
    import numpy as np

    return test_cores(_allowed_cores(), np.matmul)


def test_cores(cores: Sequence[int], multiply: Multiply, repeats: int = _REPEATS) -> CheckResult:
    """The verdict on `multiply` on these cores. Afterwards the process may use all of them again."""
    import numpy as np

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, _SIZE, _SIZE), dtype=np.float32)
    whole = generator.integers(-64, 64, (2, _SIZE, _SIZE))  # sums stay below 2**24: exact in fp32
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
        return failed(_NAME, reason, _ACTION, value=sum(wrong.values()), unit="wrong products")
    return passed(_NAME, f"{total} products on {len(digests)} cores", value=0.0, unit="wrong products")


def _allowed_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def _pin(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


CHECK = Check(
    _NAME, "the same product has the same bits on each core", "quick", run, 60.0, isolated=True, uses=frozenset({"cpu"})
)
