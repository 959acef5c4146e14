"""Peak arithmetic rates of devices, from their makers' data sheets: dense matrix work, without sparsity.

A device that is not here is unknown: its MFU prints "n/a" unless its rate was measured (CPUs are always measured).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.files import read_regular, write_json

_MOST_BYTES = 1 << 20
_NEAR = 0.8
"""Of the best rate that was seen: what is measured below this was measured beside other work."""


@dataclass(frozen=True)
class Peak:
    """A rate and where it comes from, so that an MFU can say what it was divided by."""

    flops_per_s: float
    source: str


# (substring of the device's name, bf16 FLOP/s, fp32 FLOP/s with TF32 off). Longer names
# go first: the first match wins.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500e12, 80e12),
    ("B200", 2250e12, 80e12),
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("GH200", 989e12, 67e12),
    ("H800", 989e12, 67e12),
    ("H20", 148e12, 44e12),
    ("A100", 312e12, 19.5e12),
    ("A800", 312e12, 19.5e12),
    ("A40", 149.7e12, 37.4e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L4", 121e12, 30.3e12),
    ("MI355X", 2500e12, 157.3e12),
    ("MI325X", 1307e12, 163.4e12),
    ("MI300X", 1307e12, 163.4e12),
    ("MI250X", 191.5e12, 23.9e12),
    ("RTX 4090", 165.2e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
)


def table_peak(device_name: str, *, bf16: bool) -> Peak | None:
    """The data-sheet peak of a GPU by the name its driver reports, or None where it is unknown.

    MI250X counts one of its two dies (GCD), as the driver does.
    """
    kind = "bf16" if bf16 else "fp32"
    for name, bf16_flops_per_s, fp32_flops_per_s in _PEAKS:
        if name.lower() in device_name.lower():
            return Peak(bf16_flops_per_s if bf16 else fp32_flops_per_s, f"{kind}, data sheet of {name}")
    return None


def best_peak(measured: Peak, key: str, environ: Mapping[str, str]) -> Peak:
    """The best rate that this host has ever shown: what is measured while others compute is too low, and says nothing
    of the device.

    It is kept in ``$XDG_CACHE_HOME/phalanx/peaks/HOST.json``; what cannot be kept is left out.

    Args:
        key: what was measured, and how.
    """
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    path = Path(base) / "phalanx" / "peaks" / f"{socket.gethostname()}.json"
    kept: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(path, _MOST_BYTES)) if base else None
        kept = found if isinstance(found, dict) else {}
    best = kept.get(key)
    if isinstance(best, float) and best > measured.flops_per_s:
        told = f"{measured.source}, the best that this host has shown"
        if measured.flops_per_s < _NEAR * best:
            told += f" ({measured.flops_per_s / best:.0%} of it now: others compute here)"
        return Peak(best, told)
    if base:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, kept | {key: measured.flops_per_s})
    if best is None and os.getloadavg()[0] > (os.cpu_count() or 1):
        return Peak(measured.flops_per_s, f"{measured.source}, doubtful: others compute here")
    return measured
