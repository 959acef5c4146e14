"""Rate of large bf16 products on each GPU, and whether they have the same bits each time."""

from __future__ import annotations

from typing import Any

from phalanx.checks.contract import Check
from phalanx.checks.gpus_needed import with_torch
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed
from phalanx.checks.thresholds import gemm_threshold, judge

_NAME = "gpu-gemm"
_SIZE = 8192  # 1100 GFLOP in one product, as the published figures
_REPEATS = 20
_ACTION = "compare clocks and heat with the other GPUs (nvidia-smi -q -d CLOCK,PERFORMANCE); replace the GPU"


def run(host: Host) -> CheckResult:
    """Multiply on each GPU in turn; the slowest one is judged."""
    return with_torch(_NAME, host, lambda torch: _measure(torch, host))


def _measure(torch: Any, host: Host) -> CheckResult:
    rates, unstable = {}, []
    for index in range(torch.cuda.device_count()):
        seconds, same = _multiply(torch, torch.device("cuda", index))
        rates[index] = 2 * _SIZE**3 / seconds / 1e12
        unstable += [] if same else [index]
    slowest = min(rates, key=lambda index: rates[index])
    if unstable:
        reason = f"products differ in their bits on GPU {', '.join(map(str, unstable))}"
        return failed(_NAME, reason, "take the host out: a GPU computes wrongly", value=rates[slowest], unit="TFLOP/s")
    name = torch.cuda.get_device_name(slowest)
    result = judge(host, _NAME, rates[slowest], "TFLOP/s", known=gemm_threshold(name), action=_ACTION, hardware=name)
    return result.explained(f"GPU {slowest}", result.reason)


def _multiply(torch: Any, device: Any) -> tuple[float, bool]:
    """Median seconds of a product, and whether all had the same bits."""
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, generator=generator)
    first = a @ a
    times, same = [], True
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            begin.record()
            product = a @ a
            end.record()
            end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
        same = same and bool(torch.equal(product, first))
    return sorted(times)[len(times) // 2], same


CHECK = Check(
    _NAME, "rate and repeatability of products on each GPU", "full", run, 120.0, isolated=True, uses=frozenset({"gpu"})
)
