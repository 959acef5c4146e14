"""GPUs: all there, no errors, links and clocks as they should be, products fast and of the same bits.

A host without GPUs is a reason to skip, a silent driver one to fail. What each Xid (a fault that NVIDIA's driver has
written into the kernel's log) means and asks for: https://docs.nvidia.com/deploy/xid-errors/. Those that a program
causes (13, 31, 43, 45) are not the host's fault.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, recall, remember, skipped
from phalanx.checks.cpu import best_time
from phalanx.checks.kernel_lines import KernelLine
from phalanx.checks.nvml import Gpu, NoGpusError, SilentGpusError, count_files, count_on_bus
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.thresholds import copy_threshold, gemm_threshold, given_threshold, hold, judge
from phalanx.core.units import duration


def _of_gpus(name: str, host: Host, judge: Callable[[Sequence[Gpu]], CheckResult]) -> CheckResult:
    try:
        gpus = host.gpus.read()
    except NoGpusError as absent:
        return skipped(name, str(absent))
    except SilentGpusError as silent:
        return failed(name, str(silent), "take the host out; reset the GPUs or reboot")
    return judge(gpus) if gpus else skipped(name, "the driver finds no GPU")


def _with_torch(name: str, host: Host, measure: Callable[[Any], CheckResult]) -> CheckResult:
    if not (host.proc / "driver/nvidia").exists():
        return skipped(name, "no NVIDIA driver on this host")
    torch: Any = importlib.import_module("torch")  # by name: the rooms above do not know torch
    return measure(torch) if torch.cuda.is_available() else skipped(name, "torch cannot use CUDA here")


_COUNT_NAME = "gpu-count"
_COUNT_ACTION = "take the host out; reset the GPU (nvidia-smi -r) or reboot; look for Xid 79 in dmesg"


def check_count(host: Host) -> CheckResult:
    """Compare how many GPUs the driver speaks to with device files and earlier checks."""
    files = count_files(host.dev)
    most = int(recall(host.cache, _COUNT_NAME).get("most", 0))
    try:
        gpus: tuple[Gpu, ...] = host.gpus.read()
    except NoGpusError as absent:
        if most == 0 and files == 0:
            return skipped(_COUNT_NAME, str(absent))
        reason = f"{max(most, files)} GPUs should be here, but: {absent}"
        return failed(_COUNT_NAME, reason, "load or install the driver")
    except SilentGpusError as silent:
        return failed(_COUNT_NAME, str(silent), _COUNT_ACTION)
    remember(host.cache, _COUNT_NAME, {"most": max(most, len(gpus))})
    here, before = Threshold(files, "device files of GPUs"), Threshold(most, "most that were seen here")
    threshold = given_threshold(host, _COUNT_NAME) or max(here, before, key=lambda each: each.value)
    result = hold(_COUNT_NAME, len(gpus), "GPUs", threshold if threshold.value else None, _COUNT_ACTION)
    # The PCI bus shows all of the host's, also in a container that was given some of them, so that is a note only.
    on_bus = count_on_bus(host.sys)
    return result.explained(result.reason, f"{on_bus} are on the bus" if on_bus > len(gpus) else "")


COUNT = Check(_COUNT_NAME, "the driver speaks to every GPU that should be here", "passive", check_count, limit_s=15.0)


_MEMORY_NAME = "gpu-memory"
_SHARE = 0.98


def judge_memory(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on the GPU with the least memory among those of one name."""
    names = {gpu.name for gpu in gpus}
    if len(names) > 1:
        return failed(_MEMORY_NAME, f"this host mixes {', '.join(sorted(names))}", "use hosts whose GPUs are alike")
    least = min(gpus, key=lambda gpu: gpu.memory_bytes)
    most_gib = max(gpu.memory_bytes for gpu in gpus) / 2**30
    threshold = Threshold(_SHARE * most_gib, f"{_SHARE:.0%} of the largest of this host's {len(gpus)}")
    own_gib = least.memory_bytes / 2**30
    result = hold(
        _MEMORY_NAME, own_gib, "GiB", threshold if len(gpus) > 1 else None, "reset the GPU; check MIG and ECC"
    )
    used = [f"GPU {gpu.index}: {gpu.memory_used_bytes / 2**30:.1f} GiB" for gpu in gpus if gpu.memory_used_bytes]
    reason = f"GPU {least.index}: {result.reason}" if result.outcome == "fail" else ""
    return result.explained(reason, f"in use: {', '.join(used)}" if used else "")


def _check_memory(host: Host) -> CheckResult:
    return _of_gpus(_MEMORY_NAME, host, judge_memory)


MEMORY = Check(_MEMORY_NAME, "GPUs of one host have the same memory", "passive", _check_memory, limit_s=15.0)


_ECC_NAME = "gpu-ecc"


def judge_ecc(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs."""
    counted = [gpu for gpu in gpus if gpu.ecc_uncorrected is not None]
    if not counted:
        return skipped(_ECC_NAME, "no GPU here has ECC, or it is off")
    bad = [gpu for gpu in counted if gpu.ecc_uncorrected]
    total = float(sum(gpu.ecc_uncorrected or 0 for gpu in bad))
    reason = ", ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected}" for gpu in bad)
    common = (total, "uncorrected", 0.0, "no error that ECC cannot correct is tolerable")
    action = "reset the GPU (nvidia-smi -r); if it comes back, replace it"
    return CheckResult(_ECC_NAME, "fail" if bad else "pass", reason, *common, action if bad else "")


def _check_ecc(host: Host) -> CheckResult:
    return _of_gpus(_ECC_NAME, host, judge_ecc)


ECC = Check(_ECC_NAME, "no GPU memory error that ECC could not correct", "passive", _check_ecc, limit_s=15.0)


_ROWS_NAME = "gpu-rows"


def judge_rows(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs."""
    broken = [f"GPU {gpu.index}" for gpu in gpus if gpu.rows_failed]
    if broken:
        return failed(_ROWS_NAME, f"{', '.join(broken)}: a row could not be remapped", "replace the GPU")
    pending = [f"GPU {gpu.index}" for gpu in gpus if gpu.rows_pending]
    if pending:
        return failed(_ROWS_NAME, f"{', '.join(pending)}: a row waits to be remapped", "reset the GPU: nvidia-smi -r")
    return passed(_ROWS_NAME)


def _check_rows(host: Host) -> CheckResult:
    return _of_gpus(_ROWS_NAME, host, judge_rows)


ROWS = Check(
    _ROWS_NAME, "no row of GPU memory waits for, or has failed, its remapping", "passive", _check_rows, limit_s=15.0
)


_THROTTLE_NAME = "gpu-throttle"


def judge_throttle(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs; the value is the hottest one's temperature. A power cap by software is normal."""
    known = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    hottest = max(known) if known else None
    slow = [f"GPU {gpu.index}: {', '.join(gpu.throttled)}" for gpu in gpus if gpu.throttled]
    if slow:
        action = "check fans, inlet temperature and power supplies"
        return failed(_THROTTLE_NAME, "; ".join(slow), action, value=hottest, unit="°C")
    return passed(_THROTTLE_NAME, value=hottest, unit="°C")


def _check_throttle(host: Host) -> CheckResult:
    return _of_gpus(_THROTTLE_NAME, host, judge_throttle)


THROTTLE = Check(_THROTTLE_NAME, "no GPU is slowed down by heat or power", "passive", _check_throttle, limit_s=15.0)


_NVLINK_NAME = "gpu-nvlink"


def judge_nvlink(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on the GPU with the fewest links up.

    A GPU that has no link up at all is not judged where none has: PCIe cards have links without a bridge.
    """
    most = max(gpu.links_up for gpu in gpus)
    if not most:
        return skipped(_NVLINK_NAME, "no NVLink is in use here")
    worst = min(gpus, key=lambda gpu: gpu.links_up)
    bad = [f"GPU {gpu.index}: {gpu.links_up} of {most}" for gpu in gpus if gpu.links_up < most]
    action = "check fabric manager (systemctl status nvidia-fabricmanager) and Xid 74 in dmesg; reset the GPU"
    source = f"the most of any of this host's {len(gpus)} GPUs"
    common = (float(worst.links_up), "links up", most, source)
    return CheckResult(_NVLINK_NAME, "fail" if bad else "pass", "; ".join(bad), *common, action if bad else "")


def _check_nvlink(host: Host) -> CheckResult:
    return _of_gpus(_NVLINK_NAME, host, judge_nvlink)


NVLINK = Check(_NVLINK_NAME, "every GPU has as many NVLinks up as the others", "passive", _check_nvlink, limit_s=15.0)


_XID_NAME = "gpu-xid"

WINDOW_S = 86400.0
"""A fault that was a day ago and did not come back has been dealt with, or was none."""

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")

_RESET, _REBOOT, _REPLACE = "reset the GPU: nvidia-smi -r", "reboot the host", "take the host out and test its hardware"

# Number -> (what it means, what to do).
FAULTS: dict[int, tuple[str, str]] = {
    46: ("the GPU stopped processing", _RESET),
    48: ("a memory error that ECC could not correct", _RESET),
    62: ("its microcontroller halted", _RESET),
    64: ("a row could not be remapped", _REPLACE),
    74: ("NVLink error", _REPLACE),
    79: ("it has fallen off the bus", _REPLACE),
    92: ("many memory errors that were corrected", _REPLACE),
    94: ("a memory error that was contained", _RESET),
    95: ("a memory error that was not contained", _RESET),
    109: ("it could not switch contexts in time", _RESET),
    110: ("security fault", _REBOOT),
    119: ("its system processor (GSP) does not answer", _RESET),
    120: ("its system processor (GSP) has failed", _RESET),
    136: ("link training failed", _REPLACE),
    140: ("a memory error that ECC could not correct", _RESET),
    143: ("it could not be initialised", _RESET),
    154: ("the driver asks for a recovery", _RESET),
}


@dataclass(frozen=True)
class Xid:
    """One line of the log: which GPU by its place on the bus, and which fault."""

    device: str
    number: int
    age_s: float | None = None


def check_xid(host: Host) -> CheckResult:
    """Read the kernel's log."""
    if not (host.proc / "driver/nvidia").exists():
        return skipped(_XID_NAME, "no NVIDIA driver on this host")
    lines = host.read_kernel_lines()
    if lines is None:
        return skipped(_XID_NAME, f"this user may not read {host.dev / 'kmsg'}")
    return judge_xids(find_xids(lines))


def find_xids(lines: Iterable[KernelLine]) -> list[Xid]:
    """All of them, in order."""
    matches = ((_LINE.search(line.text), line.age_s) for line in lines)
    return [Xid(match[1].lower(), int(match[2]), age_s) for match, age_s in matches if match]


def judge_xids(found: Iterable[Xid]) -> CheckResult:
    """The verdict on those of the last day, or whose time is not known."""
    found = list(found)
    recent = [xid for xid in found if xid.age_s is None or xid.age_s <= WINDOW_S]
    bad = list(dict.fromkeys((xid.device, xid.number) for xid in recent if xid.number in FAULTS))
    if not bad:
        others = sorted({xid.number for xid in found})
        note = f"seen, but caused by programs or long past: {', '.join(map(str, others))}" if others else ""
        return passed(_XID_NAME, note, value=0.0, unit="faults")
    reason = "; ".join(f"GPU {device}: Xid {number}, {FAULTS[number][0]}" for device, number in bad)
    actions = list(dict.fromkeys(FAULTS[number][1] for _, number in bad))
    last = min((xid.age_s for xid in recent if xid.number in FAULTS and xid.age_s is not None), default=None)
    when = "" if last is None else f"; the last one {duration(max(0.0, last))} ago"
    return failed(_XID_NAME, reason + when, "; ".join(actions), value=float(len(bad)), unit="faults")


XID = Check(_XID_NAME, "no fault of a GPU in the kernel's log of the last day", "passive", check_xid)


_COPY_NAME = "gpu-copy"
_BYTES = 256 << 20
_BUDGET_S = 0.3


def check_copy(host: Host) -> CheckResult:
    """Copy to and from each GPU in turn, over its PCIe link; the slowest one to copy to is judged."""

    def measure(torch: Any) -> CheckResult:
        rates = {index: _copy(torch, index) for index in range(torch.cuda.device_count())}
        slowest = min(rates, key=lambda index: rates[index][0])
        there, back = rates[slowest]
        name = torch.cuda.get_device_name(slowest)
        action = "compare the GPU's PCIe link with the others (lspci -vv, LnkSta): speed and width; reseat it"
        result = judge(host, _COPY_NAME, there, "GB/s", known=copy_threshold(name), action=action, hardware=name)
        return result.explained(result.reason, f"GPU {slowest}", f"back at {back:.1f} GB/s")

    return _with_torch(_COPY_NAME, host, measure)


def _copy(torch: Any, index: int) -> tuple[float, float]:
    """GB/s to the GPU and back."""
    with torch.cuda.device(index):
        here = torch.ones(_BYTES, dtype=torch.uint8).pin_memory()
        there = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")

        def timed(target: Any, source: Any) -> float:
            def work() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return _BYTES / best_time(work, _BUDGET_S) / 1e9

        return timed(there, here), timed(here, there)


COPY = Check(
    _COPY_NAME,
    "copies between host and each GPU",
    "full",
    check_copy,
    120.0,
    isolated=True,
    uses=frozenset({"gpu", "memory"}),
)


_PRODUCTS_NAME = "gpu-gemm"
_SIZE = 8192  # 1100 GFLOP in one product, as the published figures
_REPEATS = 20


def check_products(host: Host) -> CheckResult:
    """Multiply on each GPU in turn; the slowest one is judged."""

    def measure(torch: Any) -> CheckResult:
        rates, unstable = {}, []
        for index in range(torch.cuda.device_count()):
            seconds, same = _multiply(torch, torch.device("cuda", index))
            rates[index] = 2 * _SIZE**3 / seconds / 1e12
            unstable += [] if same else [index]
        slowest = min(rates, key=lambda index: rates[index])
        rate, unit, name = rates[slowest], "TFLOP/s", torch.cuda.get_device_name(slowest)
        if unstable:
            reason = f"products differ in their bits on GPU {', '.join(map(str, unstable))}"
            action = "take the host out: a GPU computes wrongly"
            return failed(_PRODUCTS_NAME, reason, action, value=rate, unit=unit)
        action = "compare clocks and heat with the other GPUs (nvidia-smi -q -d CLOCK,PERFORMANCE); replace the GPU"
        known = gemm_threshold(name)
        result = judge(host, _PRODUCTS_NAME, rate, unit, known=known, action=action, hardware=name)
        return result.explained(f"GPU {slowest}", result.reason)

    return _with_torch(_PRODUCTS_NAME, host, measure)


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


PRODUCTS = Check(
    _PRODUCTS_NAME,
    "rate and repeatability of products on each GPU",
    "full",
    check_products,
    120.0,
    isolated=True,
    uses=frozenset({"gpu"}),
)
