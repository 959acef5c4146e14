"""Counters of a host, once a second: processor, memory, disk, network, and GPUs where NVML is there.

Names and units are Prometheus's (`node_exporter`, DCGM): whoever knows those knows these. A counter that the host
does not have is left out, and so is one that does not answer: that a metric vanishes is evidence of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import psutil
import pyarrow as pa

COUNTERS = pa.schema(
    [
        ("host", pa.dictionary(pa.int32(), pa.string())),
        ("step", pa.int64()),  # 0: parts of all tables are named alike
        ("end_ns", pa.int64()),
        ("gpu", pa.int16()),  # -1: of the whole host
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("value", pa.float64()),
    ]
)

_GPU_PERIOD_S = 1.0
_STALE_S = 5.0


class HostCounters:
    """This host's counters; GPUs are asked in a thread of their own, since a sick driver may never answer."""

    def __init__(self, host: str, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._host, self._clock_ns = host, clock_ns
        self._gpus: list[tuple[int, str, float]] = []
        self._gpus_at_s = float("-inf")
        psutil.cpu_percent()  # the first call only begins to count
        if (nvml := _nvml()) is not None:
            threading.Thread(target=self._watch_gpus, args=(nvml,), daemon=True, name="nvml").start()

    def sample(self) -> list[dict[str, Any]]:
        """Rows of `COUNTERS`, as they are now."""
        now_ns = self._clock_ns()
        found = [(-1, name, value) for name, value in _of_host()]
        if time.monotonic() - self._gpus_at_s < _STALE_S:
            found += self._gpus
        return [
            {"host": self._host, "step": 0, "end_ns": now_ns, "gpu": gpu, "name": name, "value": value}
            for gpu, name, value in found
        ]

    def _watch_gpus(self, nvml: Any) -> None:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        while True:
            self._gpus = [
                (index, name, value) for index, handle in enumerate(handles) for name, value in _of_gpu(nvml, handle)
            ]
            self._gpus_at_s = time.monotonic()
            time.sleep(_GPU_PERIOD_S)


def _of_host() -> Iterator[tuple[str, float]]:
    yield "cpu_utilisation_ratio", psutil.cpu_percent() / 100
    yield "load1", psutil.getloadavg()[0]
    memory = psutil.virtual_memory()
    yield "memory_available_bytes", memory.available
    yield "memory_used_bytes", memory.total - memory.available
    network = psutil.net_io_counters()
    if network is not None:
        yield "network_receive_bytes_total", network.bytes_recv
        yield "network_transmit_bytes_total", network.bytes_sent
        yield "network_errors_total", network.errin + network.errout
        yield "network_drops_total", network.dropin + network.dropout
    with contextlib.suppress(Exception):  # some containers have no disks
        disk = psutil.disk_io_counters()
        if disk is not None:
            yield "disk_read_bytes_total", disk.read_bytes
            yield "disk_written_bytes_total", disk.write_bytes
    with contextlib.suppress(Exception):  # nor sensors
        hottest = [reading.current for each in psutil.sensors_temperatures().values() for reading in each]
        if hottest:
            yield "temperature_celsius", max(hottest)


def _of_gpu(nvml: Any, handle: Any) -> Iterator[tuple[str, float]]:
    def rates() -> Any:
        return nvml.nvmlDeviceGetUtilizationRates(handle)

    asked: dict[str, Callable[[], float]] = {
        "gpu_utilisation_ratio": lambda: rates().gpu / 100,
        "gpu_memory_activity_ratio": lambda: rates().memory / 100,
        "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "gpu_sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "gpu_pcie_receive_bytes_per_s": lambda: (
            1024 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        ),
        "gpu_pcie_transmit_bytes_per_s": lambda: (
            1024 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        ),
    }
    for name, ask in asked.items():
        with contextlib.suppress(nvml.NVMLError):
            yield name, float(ask())


def _nvml() -> Any:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no such package, no driver, or one that does not work
        return None
    return nvml
