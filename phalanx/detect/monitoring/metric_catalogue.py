"""Minder's 21 metrics of a machine: names, units and limits (arXiv 2411.01791, appendix), in which all tables are kept.

The paper uses the first seven, in the order of `DETECTED`; the others explain what was found. It names neither units
nor limits: those here are of hosts with eight GPUs, and limits are what values are scaled by (`normalise`), not what
is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.metric_table import MetricTable

Combine = Literal["mean", "sum", "max"]
"""How the values of a machine's devices (GPUs, ports, disks) become one."""


@dataclass(frozen=True)
class Metric:
    """One of the 21.

    Attributes:
        name: as columns and commands call it.
        title: as the paper calls it.
        unit: of its values; ``ratio`` is 0 to 1.
        lower: limit that becomes 0 when values are scaled.
        upper: limit that becomes 1.
        combine: over the devices of a machine.
        is_of_gpus: a detached GPU takes it along.
    """

    name: str
    title: str
    unit: str
    lower: float
    upper: float
    combine: Combine
    is_of_gpus: bool = False


_ALL = (
    Metric("cpu_usage", "CPU Usage", "ratio", 0, 1, "mean"),
    Metric("pfc_tx_packet_rate", "PFC Tx Packet Rate", "packets/s", 0, 10_000, "sum"),
    Metric("gpu_duty_cycle", "GPU Duty Cycle", "ratio", 0, 1, "mean", True),
    Metric("gpu_power_draw", "GPU Power Draw", "W", 0, 700, "mean", True),
    Metric("gpu_tensor_core_activity", "GPU Tensor Core Activity", "ratio", 0, 1, "mean", True),
    Metric("gpu_graphics_engine_activity", "GPU Graphics Engine Activity", "ratio", 0, 1, "mean", True),
    Metric("gpu_nvlink_bandwidth", "GPU NVLink Bandwidth", "bytes/s", 0, 300e9, "mean", True),
    Metric("memory_usage", "Memory Usage", "ratio", 0, 1, "mean"),
    Metric("disk_usage", "Disk Usage", "ratio", 0, 1, "max"),
    Metric("tcp_throughput", "TCP Throughput", "bytes/s", 0, 3e9, "sum"),
    Metric("tcp_rdma_throughput", "TCP+RDMA Throughput", "bytes/s", 0, 400e9, "sum"),
    Metric("gpu_memory_used", "GPU Memory Used", "bytes", 0, 80e9, "mean", True),
    Metric("gpu_temperature", "GPU Temperature", "celsius", 20, 95, "max", True),
    Metric("gpu_sm_activity", "GPU SM Activity", "ratio", 0, 1, "mean", True),
    Metric("gpu_clocks", "GPU Clocks", "Hz", 0, 2e9, "mean", True),
    Metric("gpu_fp_engine_activity", "GPU FP Engine Activity", "ratio", 0, 1, "mean", True),
    Metric("gpu_memory_bandwidth_utilization", "GPU Memory Bandwidth Utilization", "ratio", 0, 1, "mean", True),
    Metric("pcie_bandwidth", "PCIe Bandwidth", "bytes/s", 0, 64e9, "mean", True),
    Metric("pcie_usage", "PCIe Usage", "ratio", 0, 1, "mean", True),
    Metric("ecn_packet_rate", "ECN Packet Rate", "packets/s", 0, 20_000, "sum"),
    Metric("cnp_packet_rate", "CNP Packet Rate", "packets/s", 0, 20_000, "sum"),
)

CATALOGUE: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""By name, in the paper's order."""

DETECTED: tuple[str, ...] = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "gpu_graphics_engine_activity",
    "gpu_tensor_core_activity",
    "gpu_nvlink_bandwidth",
)
"""The seven that the paper detects by, in the order that its decision tree learnt."""


def known_metric(name: str) -> Metric:
    """The metric of this name.

    Raises:
        UserError: there is none.
    """
    if name not in CATALOGUE:
        raise UserError("is no metric of the catalogue", cure=f"use one of {', '.join(CATALOGUE)}", value=name)
    return CATALOGUE[name]


def normalise(table: MetricTable, limits: Mapping[str, tuple[float, float]] | None = None) -> MetricTable:
    """Values between 0 and 1 by each metric's limits; what lies beyond is cut off, what is missing stays missing.

    Args:
        limits: lower and upper limit of some metrics, in the units of the catalogue, in place of its own.
    """
    scaled = np.empty_like(table.values)
    for row, name in enumerate(table.metrics):
        lower, upper = (limits or {}).get(name) or (known_metric(name).lower, known_metric(name).upper)
        scaled[row] = scale(table.values[row], lower, upper)
    return MetricTable(scaled, table.metrics, table.machines, table.start_s, table.period_s)


def scale(values: NDArray[np.float32], lower: float, upper: float) -> NDArray[np.float32]:
    """Min-max, cut off at 0 and 1; in the shape given."""
    assert upper > lower, (lower, upper)
    found: NDArray[np.float32] = (values - np.float32(lower)) / np.float32(upper - lower)
    np.clip(found, 0, 1, out=found)
    return found
