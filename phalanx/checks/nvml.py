"""GPUs through NVML, one question at a time; what a GPU does not know is None. Torch-free.

A driver that is in trouble may never answer (after Xid 119 nvidia-smi hangs too): who asks has to allow for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# nvmlClocksEventReason…: the hardware slows down, by heat or by the power supply; a power cap is no fault.
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x40: "too hot (hardware)",
    0x80: "power brake",
    0x20: "too hot (driver)",
}


class Device:
    """One GPU. All questions but `memory` are answered by None where it has no such thing.

    Args:
        nvml: the module ``pynvml``, initialised.
        unknown: errors that mean that; others are raised.
    """

    def __init__(self, nvml: Any, index: int, unknown: type[Exception] | tuple[type[Exception], ...]) -> None:
        self._nvml = nvml
        self._unknown = unknown
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.index = index

    @property
    def name(self) -> str:
        """As its maker calls it."""
        name = self._nvml.nvmlDeviceGetName(self._handle)
        return name.decode() if isinstance(name, bytes) else str(name)

    def memory(self) -> tuple[int, int]:
        """Bytes of all memory, and of what is in use."""
        found = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(found.total), int(found.used)

    def utilisation(self) -> float | None:
        """Share of the last second in which it computed, 0 to 1."""
        return self._asked(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)

    def memory_activity(self) -> float | None:
        """Share of the last second in which its memory was read or written, 0 to 1; a kernel that waits does not."""
        return self._asked(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).memory / 100)

    def temperature_c(self) -> float | None:
        """Of its chip."""
        nvml = self._nvml
        return self._asked(lambda: float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)))

    def ecc_uncorrected(self) -> int | None:
        """Errors since the driver was loaded."""
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return self._asked(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, *kinds)))

    def rows(self) -> tuple[bool, bool] | None:
        """Whether a row is to be remapped at the next reset, and whether one could not be remapped."""
        rows = self._asked(lambda: self._nvml.nvmlDeviceGetRemappedRows(self._handle))
        return None if rows is None else (bool(rows[2]), bool(rows[3]))

    def throttled(self) -> tuple[str, ...] | None:
        """Reasons that lower its clock now, of those that hint at trouble."""
        nvml = self._nvml
        reasons = self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        if reasons is None:  # as drivers before 535 call it
            reasons = self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if reasons is None else tuple(name for bit, name in _SLOWED_BY.items() if reasons & bit)

    def links(self) -> list[bool]:
        """Of NVLink, those that it has: whether they are up."""
        states = (self._link(number) for number in range(self._nvml.NVML_NVLINK_MAX_LINKS))
        return [state for state in states if state is not None]

    def pids(self) -> frozenset[int] | None:
        """Processes that compute on it, as far as the driver tells."""
        ask = self._nvml.nvmlDeviceGetComputeRunningProcesses
        return self._asked(lambda: frozenset(int(process.pid) for process in ask(self._handle)))

    def _link(self, number: int) -> bool | None:
        return self._asked(lambda: bool(self._nvml.nvmlDeviceGetNvLinkState(self._handle, number)))

    def _asked(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except self._unknown:
            return None


def open_devices(nvml: Any, unknown: type[Exception] | tuple[type[Exception], ...]) -> list[Device]:
    """All GPUs of this host.

    Args:
        nvml: the module ``pynvml``, or what plays it.
        unknown: see `Device`.

    Raises:
        Exception: ``pynvml.NVMLError``; there is no driver, or it does not work.
    """
    nvml.nvmlInit()
    return [Device(nvml, index, unknown) for index in range(nvml.nvmlDeviceGetCount())]


def missing(nvml: Any) -> tuple[type[Exception], ...]:
    """The errors by which a GPU, its driver, or an older package says that it has no such thing."""
    own = nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound
    return *own, AttributeError
