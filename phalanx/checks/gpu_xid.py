"""Xid: faults of GPUs that NVIDIA's driver has written into the kernel's log.

What each means and asks for: https://docs.nvidia.com/deploy/xid-errors/. Those that a program causes (13, 31, 43, 45)
are no fault of the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.kernel_lines import KernelLine
from phalanx.checks.result import CheckResult, failed, passed, skipped
from phalanx.core.units import duration

_NAME = "gpu-xid"

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


def run(host: Host) -> CheckResult:
    """Read the kernel's log."""
    if not (host.proc / "driver/nvidia").exists():
        return skipped(_NAME, "no NVIDIA driver on this host")
    lines = host.read_kernel_lines()
    if lines is None:
        return skipped(_NAME, f"this user may not read {host.dev / 'kmsg'}")
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
        return passed(_NAME, note, value=0.0, unit="faults")
    told = "; ".join(f"GPU {device}: Xid {number}, {FAULTS[number][0]}" for device, number in bad)
    actions = list(dict.fromkeys(FAULTS[number][1] for _, number in bad))
    last = min((xid.age_s for xid in recent if xid.number in FAULTS and xid.age_s is not None), default=None)
    when = "" if last is None else f"; the last one {duration(max(0.0, last))} ago"
    return failed(_NAME, told + when, "; ".join(actions), value=float(len(bad)), unit="faults")


CHECK = Check(_NAME, "no fault of a GPU in the kernel's log of the last day", "passive", run)
