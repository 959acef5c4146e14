"""Peak arithmetic rates of devices, from their makers' data sheets: dense matrix work, without sparsity.

A device that is not here is unknown: its MFU prints "n/a" unless its rate was measured (CPUs are always measured).
"""

from __future__ import annotations

from dataclasses import dataclass


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
