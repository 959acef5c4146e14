"""Classes of faults by their shares in production, and how each shows in the metrics of machines: by cause and effect.

A signature says what becomes of the processes on the faulty machine, what its counters show besides, and what the job
does: it hangs (all others spin in a collective that never ends) or becomes slow (all wait for one). Most classes have
several signatures, since "ECC error" is at one time a process that dies and at another a GPU that repeats itself.
Severity, 0 to 1, moves every amount from its subtle to its full value.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from phalanx.detect.monitoring.metric_catalogue import CATALOGUE

How = Literal["scale", "add", "vanish"]
JobEffect = Literal["none", "hang", "slow_compute", "slow_gradients"]

GPU_METRICS: tuple[str, ...] = tuple(name for name, metric in CATALOGUE.items() if metric.is_of_gpus)


@dataclass(frozen=True)
class Effect:
    """What one metric of the faulty machine shows besides what its processes do.

    Attributes:
        metric: of the catalogue.
        how: values are multiplied, added to (in the metric's unit), or no longer measured.
        subtle: amount at severity 0; of ``scale`` amounts between are geometric.
        full: amount at severity 1.
        delay_s: after the onset.
        ramp_s: until the amount is reached.
        flap_s: it comes and goes with about this period; 0: it stays.
    """

    metric: str
    how: How
    subtle: float = 0.0
    full: float = 0.0
    delay_s: float = 0.0
    ramp_s: float = 2.0
    flap_s: float = 0.0

    def amount(self, severity: float) -> float:
        """At a severity."""
        if self.how == "scale":
            return float(self.subtle * (self.full / self.subtle) ** severity)
        return self.subtle + severity * (self.full - self.subtle)


@dataclass(frozen=True)
class Signature:
    """One way in which a class of faults shows.

    Attributes:
        name: in labels.
        fault: its class, as in the table of shares.
        weight: among the signatures of the class.
        state: of the processes of the faulty machine: a name of `load_model.STATES`, or none: they go on.
        state_share: of the machine's GPUs that are in that state, subtle and full.
        effects: on the faulty machine.
        job: what becomes of the job.
        job_delay_s: until then, least and most.
        slowdown: of a slow job's steps, subtle and full.
        spread: share of the effects that its peers in the collective show too, least and most.
        spread_delay_s: until the first peer does; the next ones follow at the same distance.
        guilty: metrics that name the machine, the clearest first.
    """

    name: str
    fault: str
    weight: float
    guilty: tuple[str, ...]
    state: str = ""
    state_share: tuple[float, float] = (1.0, 1.0)
    effects: tuple[Effect, ...] = ()
    job: JobEffect = "hang"
    job_delay_s: tuple[float, float] = (0.0, 10.0)
    slowdown: tuple[float, float] = (1.03, 1.6)
    spread: tuple[float, float] = (0.0, 0.0)
    spread_delay_s: float = 20.0


_CRASH_GUILTY = ("gpu_duty_cycle", "cpu_usage", "gpu_power_draw", "memory_usage")


def _crash(name: str, fault: str, weight: float, *, core_dump: bool = False) -> Signature:
    """A process ends: its launcher ends the others of the machine too, but for those that the driver holds."""
    effects: tuple[Effect, ...] = (
        Effect("memory_usage", "scale", 0.9, 0.35, 3, 20),
        Effect("gpu_memory_used", "scale", 0.88, 0.02, 1, 4),
    )
    if core_dump:
        effects += (Effect("cpu_usage", "add", 0.03, 0.12, 1, 3), Effect("disk_usage", "add", 0.002, 0.03, 2, 90))
    return Signature(
        name, fault, weight, _CRASH_GUILTY, "dead", (0.6, 1.0), effects, "hang", (1, 12)
    )  # fmt: skip


def _pressure(pauses_per_s: tuple[float, float], ramp_s: float = 15.0, flap_s: float = 0.0) -> tuple[Effect, ...]:
    """A receiver that is too slow: its buffer stays full, it sends pause frames; senders are told by ECN and CNP."""
    low, high = pauses_per_s
    return (
        Effect("pfc_tx_packet_rate", "add", low, high, 2, ramp_s, flap_s),
        Effect("ecn_packet_rate", "add", low / 2, high / 2, 4, ramp_s, flap_s),
        Effect("cnp_packet_rate", "add", low / 2, high / 2, 6, ramp_s, flap_s),
    )


SIGNATURES: tuple[Signature, ...] = (
    _crash("uncorrectable error ends the process", "ECC error", 6, core_dump=True),
    Signature(
        "uncorrectable error, pages are retired again and again", "ECC error", 2,
        ("gpu_power_draw", "gpu_tensor_core_activity", "gpu_clocks"), "blocked", (0.4, 0.9),
        (Effect("cpu_usage", "add", 0.01, 0.06), Effect("gpu_memory_bandwidth_utilization", "scale", 0.95, 0.6)),
        "hang", (5, 40),
    ),
    Signature(
        "rows are remapped, one GPU repeats reads", "ECC error", 1,
        ("gpu_tensor_core_activity", "gpu_power_draw", "gpu_clocks"),
        effects=(Effect("gpu_clocks", "scale", 0.99, 0.9), Effect("gpu_power_draw", "scale", 0.98, 0.85)),
        job="slow_compute", slowdown=(1.05, 1.5),
    ),
    Signature(
        "PCIe trains at fewer lanes", "PCIe downgrading", 7, ("pfc_tx_packet_rate", "pcie_bandwidth"),
        effects=(
            *_pressure((900, 7000)),
            Effect("pcie_bandwidth", "scale", 0.9, 0.4, 0, 1),
            Effect("pcie_usage", "scale", 1.1, 2.4, 0, 1),
            Effect("cpu_usage", "add", 0.0, 0.02),
        ),
        job="slow_gradients", slowdown=(1.15, 2.2), spread=(0.1, 0.45),
    ),
    Signature(
        "PCIe trains at fewer lanes, below one of many NICs", "PCIe downgrading", 3, ("pfc_tx_packet_rate",),
        effects=(*_pressure((250, 2500)), Effect("pcie_bandwidth", "scale", 0.95, 0.7, 0, 1)),
        job="slow_gradients", slowdown=(1.05, 1.3), spread=(0.3, 0.9), spread_delay_s=6,
    ),
    Signature(
        "link flaps, buffers fill", "NIC dropout", 5, ("pfc_tx_packet_rate", "tcp_rdma_throughput"),
        effects=(
            *_pressure((900, 8000), 2, 7),
            Effect("tcp_rdma_throughput", "scale", 0.85, 0.4, 0, 1, 7),
            Effect("cpu_usage", "add", 0.0, 0.03),
        ),
        job="slow_gradients", slowdown=(1.2, 3.0),
    ),
    _crash("queue pairs fail, the process ends", "NIC dropout", 4),
    Signature(
        "the NIC is gone, processes wait", "NIC dropout", 1, ("tcp_rdma_throughput", "cpu_usage"),
        effects=(
            Effect("tcp_rdma_throughput", "scale", 0.5, 0.01, 0, 1),
            Effect("cpu_usage", "add", 0.02, 0.08, 2, 5),
            Effect("gpu_power_draw", "scale", 0.97, 0.9, 3, 6),
        ),
        job="hang", job_delay_s=(1, 4),
    ),
    Signature(
        "fallen off the bus, its exporter answers no more", "GPU card drop", 6,
        ("gpu_duty_cycle", "gpu_power_draw", "cpu_usage"), "dead", (0.6, 1.0),
        tuple(Effect(name, "vanish", delay_s=2) for name in GPU_METRICS), "hang", (1, 10),
    ),
    _crash("fallen off the bus, the others answer", "GPU card drop", 4),
    Signature(
        "lanes are down, rings go round", "NVLink error", 5, ("gpu_nvlink_bandwidth", "gpu_power_draw"),
        effects=(
            Effect("gpu_nvlink_bandwidth", "scale", 0.85, 0.4, 0, 1),
            Effect("pcie_bandwidth", "scale", 1.1, 1.8, 1, 2),
        ),
        job="slow_compute", slowdown=(1.08, 1.8),
    ),
    _crash("fatal error ends the process", "NVLink error", 5),
    Signature(
        "transceiver loses light now and then", "AOC error", 6, ("tcp_rdma_throughput", "pfc_tx_packet_rate"),
        effects=(*_pressure((40, 2500), 4, 40), Effect("tcp_rdma_throughput", "scale", 0.95, 0.5, 0, 1, 40)),
        job="slow_gradients", slowdown=(1.02, 1.4), spread=(0.2, 0.8), spread_delay_s=4,
    ),
    Signature(
        "link of one port is down", "AOC error", 4, ("pfc_tx_packet_rate", "tcp_rdma_throughput"),
        effects=(*_pressure((400, 4000)), Effect("tcp_rdma_throughput", "scale", 0.95, 0.8, 0, 1)),
        job="slow_gradients", slowdown=(1.1, 1.6), spread=(0.0, 0.3),
    ),
    _crash("illegal access ends the process", "CUDA execution error", 8, core_dump=True),
    Signature(
        "asynchronous error, the host waits", "CUDA execution error", 2, ("gpu_duty_cycle", "gpu_power_draw"),
        "blocked", (0.5, 1.0), (Effect("cpu_usage", "add", 0.01, 0.1),), "hang", (2, 15),
    ),
    Signature(
        "a kernel never ends, and its neighbours wait at once", "GPU execution error", 5,
        ("gpu_power_draw", "gpu_nvlink_bandwidth"), "spinning", (0.5, 1.0),
        (
            Effect("gpu_power_draw", "scale", 0.96, 0.72, 0, 2),
            Effect("gpu_sm_activity", "scale", 1.2, 4.0, 0, 2),
            Effect("cpu_usage", "add", 0.003, 0.04),
        ),
        "hang", (0, 3), spread=(0.3, 0.9), spread_delay_s=5,
    ),
    _crash("Xid, the process ends", "GPU execution error", 5),
    Signature(
        "reads of data block", "HDFS error", 6, ("gpu_duty_cycle", "cpu_usage", "tcp_throughput"), "blocked",
        (0.4, 1.0), (Effect("cpu_usage", "add", 0.02, 0.18, 1, 4), Effect("tcp_throughput", "scale", 0.5, 0.02)),
        "hang", (2, 20),
    ),
    Signature(
        "writes are tried again and again", "HDFS error", 4, ("cpu_usage", "tcp_throughput"), "blocked", (0.5, 1.0),
        (Effect("cpu_usage", "add", 0.06, 0.35, 1, 10), Effect("tcp_throughput", "scale", 1.5, 6, 1, 10)),
        "hang", (5, 30),
    ),
    Signature(
        "nothing is heard of it", "machine unreachable", 6, ("gpu_duty_cycle", "cpu_usage"),
        effects=tuple(Effect(name, "vanish", delay_s=1) for name in CATALOGUE), job="hang", job_delay_s=(1, 5),
    ),
    Signature(
        "heard of now and then, and idle", "machine unreachable", 4, ("gpu_duty_cycle", "cpu_usage"), "dead",
        (0.6, 1.0), tuple(Effect(name, "vanish", delay_s=2, flap_s=30) for name in CATALOGUE), "hang", (1, 5),
    ),
    Signature(
        "another program takes the processors", "other", 4, ("cpu_usage",),
        effects=(Effect("cpu_usage", "add", 0.08, 0.5, 0, 6), Effect("memory_usage", "add", 0.01, 0.2, 5, 60)),
        job="slow_compute", slowdown=(1.02, 1.3),
    ),
    Signature(
        "hot, clocks are throttled", "other", 3, ("gpu_clocks", "gpu_power_draw", "gpu_temperature"),
        effects=(
            Effect("gpu_clocks", "scale", 0.95, 0.55, 0, 30),
            Effect("gpu_power_draw", "scale", 0.93, 0.6, 0, 30),
            Effect("gpu_temperature", "add", 6, 20, 0, 60),
        ),
        job="slow_compute", slowdown=(1.06, 1.7),
    ),
    Signature(
        "memory runs out, the process is killed", "other", 3, _CRASH_GUILTY, "dead", (0.6, 1.0),
        (Effect("memory_usage", "add", 0.2, 0.5, 0, 90), Effect("cpu_usage", "add", 0.02, 0.1, 0, 90)), "hang", (2, 15),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FaultShare:
    """How often a class is, in per cent; None: not published."""

    fault: str
    group: str
    production_pct: float
    dataset_pct: float | None


@functools.cache
def fault_shares() -> tuple[FaultShare, ...]:
    """Minder's table 1 and the shares of its evaluation set (package data, with the source)."""
    text = files("phalanx.detect.monitoring").joinpath("fault_shares.csv").read_text("utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(
        FaultShare(
            row["fault"],
            row["group"],
            float(row["production_share_pct"]),
            float(row["dataset_share_pct"]) if row["dataset_share_pct"] else None,
        )
        for row in rows
    )


FAULTS: tuple[str, ...] = tuple(dict.fromkeys(one.fault for one in SIGNATURES))


def faults_in_shares(count: int, which: Literal["production", "dataset"] = "dataset") -> dict[str, int]:
    """So many faults, spread over the classes by their shares; largest remainders, so that each count is the nearest.

    Of the evaluation set four shares are published: the others divide the rest as they do in production.
    """
    shares = fault_shares()
    if which == "production":
        weights: Mapping[str, float] = {one.fault: one.production_pct for one in shares}
    else:
        rest = 100 - sum(one.dataset_pct or 0 for one in shares)
        unknown = sum(one.production_pct for one in shares if one.dataset_pct is None)
        weights = {
            one.fault: one.production_pct * rest / unknown if one.dataset_pct is None else one.dataset_pct
            for one in shares
        }
    exact = {fault: count * weight / sum(weights.values()) for fault, weight in weights.items()}
    counts = {fault: int(wanted) for fault, wanted in exact.items()}
    left = count - sum(counts.values())
    for fault in sorted(exact, key=lambda one: counts[one] - exact[one])[:left]:
        counts[fault] += 1
    return counts
