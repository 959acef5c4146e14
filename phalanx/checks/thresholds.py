"""What a measured value is held against, where that comes from (never a guess), and how busy the host was meanwhile.

In this order: what the user gave; published figures of the same hardware; the first passes of this host itself. Where
none is known the value is shown without a verdict. Against other hosts, see `phalanx.checks.pairwise_tests`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.checks.check_host import CheckResult, CheckVerdict, Host, passed, recall, remember
from phalanx.checks.pairwise_tests import Threshold
from phalanx.core.host import cpu_line, parse_cpu_ticks, read_text

MOST_OTHER_WORK = 0.2
"""Share of the host's cores; with more of it, a value that was measured is not held against this host's own past."""


@dataclass
class OtherWork:
    """Measures, as a context, how many cores all other processes have kept busy, the hypervisor's other guests too.

    Attributes:
        cores: how many, once the block has ended; 0 where the system does not tell.
        share: of all cores of the host.
    """

    proc: Path = Path("/proc")
    cores: float = 0.0
    share: float = 0.0
    _began: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), repr=False)

    def __enter__(self) -> OtherWork:
        self._began = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, busy_s, own_s = (now - before for now, before in zip(self._read(), self._began, strict=True))
        if wall_s > 0:
            self.cores = max(0.0, (busy_s - own_s) / wall_s)
            self.share = self.cores / (os.cpu_count() or 1)

    def _read(self) -> tuple[float, float, float]:
        own_s = sum(os.times()[:4])  # with the children that it has waited for
        return time.monotonic(), busy_seconds(read_text(self.proc / "stat") or ""), own_s


def busy_seconds(stat: str) -> float:
    """CPU time of all cores since the boot that was not idle, from /proc/stat; 0 where it is not known."""
    ticks = parse_cpu_ticks(stat)
    return ticks[0] / os.sysconf("SC_CLK_TCK") if ticks else 0.0


OWN_SHARE = 0.7
"""Of the worst of the first passes: a shared machine varies, and a false verdict costs a host."""

FIRST_PASSES = 5
PUBLISHED_SHARE = 0.8

NO_OTHER_WORK = OtherWork()


# (part of the GPU's name, TFLOP/s of a bf16 product of over 1000 GFLOP, all-to-all in a host of 8 in GB/s per GPU).
# Medians measured by ai-dynamo/aiconfigurator (commit 095f58a). All-to-all of 512 MiB with NCCL: 7/8 of the message
# over its time.
_MEASURED: tuple[tuple[str, float, float], ...] = (
    ("H200", 0.734 * 989, 311.0),
    ("H100 80GB HBM3", 0.752 * 989, 315.0),
    ("A100-SXM4", 0.835 * 312, 203.0),
)

# (part of the GPU's name, GB/s from pinned host memory): the lines of Azure's node health checks.
_COPIES: tuple[tuple[str, float], ...] = (("H200", 55.0), ("H100", 52.0), ("A100", 23.0))


def gemm_threshold(gpu: str) -> Threshold | None:
    """TFLOP/s of a large bf16 product on this GPU, by its name; None: unknown."""
    for name, rate, _ in _MEASURED:
        if name in gpu:
            return Threshold(PUBLISHED_SHARE * rate, f"80 % of {rate:.0f}, the median measured on {name}")
    return None


def all_to_all_threshold(gpu: str, gpus: int) -> Threshold | None:
    """GB/s per GPU of an all-to-all among the 8 GPUs of a host; None: unknown, as for any other number of them."""
    for name, _, rate in _MEASURED:
        if name in gpu and gpus == 8:
            return Threshold(PUBLISHED_SHARE * rate, f"80 % of {rate:.0f}, measured among 8 {name}")
    return None


def copy_threshold(gpu: str) -> Threshold | None:
    """GB/s from pinned host memory to this GPU; None: unknown."""
    for name, rate in _COPIES:
        if name in gpu:
            return Threshold(rate, f"Azure's health check of hosts with {name}")
    return None


def judge(
    host: Host,
    name: str,
    value: float,
    unit: str,
    *,
    known: Threshold | None = None,
    action: str,
    hardware: str = "",
    other: OtherWork = NO_OTHER_WORK,
) -> CheckResult:
    """Hold `value`, of which more is better, against what is known; a pass is remembered for the next time.

    Args:
        known: what is published of this hardware.
        hardware: what the value depends on, by default the processor; when that changes, the host is learnt anew.
        other: what else the host did meanwhile; beside much of it, the host's own past is not a measure.
    """
    hardware = hardware or f"{cpu_line('model name')} {cpu_line('stepping')}".strip()
    first = first_passes(host, name, hardware)
    threshold = given_threshold(host, name) or known
    if threshold is None and other.share > MOST_OTHER_WORK:
        return passed(name, f"not judged: other work kept {other.cores:.1f} cores busy", value=value, unit=unit)
    if threshold is None and len(first) >= FIRST_PASSES:
        worst = min(first)
        source = f"{OWN_SHARE:.0%} of {worst:.3g}, the worst of this host's first {len(first)}"
        threshold = Threshold(OWN_SHARE * worst, source)
    result = hold(name, value, unit, threshold, action)
    if result.outcome == "pass" and len(first) < FIRST_PASSES:
        remember(host.cache, f"first-{name}", {"hardware": hardware, "values": [*first, value]})
    if threshold is None:
        left = FIRST_PASSES - len(first) - 1
        return replace(result, reason=f"no threshold is known; this host's own after {left} more" if left else "learnt")
    return result


def hold(name: str, value: float, unit: str, threshold: Threshold | None, action: str) -> CheckResult:
    """The verdict on `value`, of which more is better."""
    if threshold is None:
        return passed(name, "no threshold is known", value=value, unit=unit)
    good = value >= threshold.value
    reason = "" if good else f"{value:.3g} {unit} is less than {threshold.value:.3g}"
    outcome: CheckVerdict = "pass" if good else "fail"
    return CheckResult(name, outcome, reason, value, unit, threshold.value, threshold.source, "" if good else action)


def given_threshold(host: Host, name: str) -> Threshold | None:
    """What the user said to expect."""
    return Threshold(host.expected[name], "given with --expect") if name in host.expected else None


def first_passes(host: Host, name: str, hardware: str) -> list[float]:
    """What this host has shown before, while it was the same hardware."""
    kept = recall(host.cache, f"first-{name}")
    values = kept.get("values", []) if kept.get("hardware") == hardware else []
    return [float(value) for value in values if isinstance(value, int | float)]
