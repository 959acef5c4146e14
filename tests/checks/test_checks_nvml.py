"""GPUs through NVML: a driver that is played, with the errors of the real library."""

# ruff: noqa: N802 - the names of NVML
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.checks.nvml import Gpu, missing, open_devices, read_gpu

pynvml = pytest.importorskip("pynvml", reason="NVML's package is not installed")


class Driver:
    """One GPU with two NVLinks, of which one is down; `lacks` are questions that it answers with an error."""

    NVML_NVLINK_MAX_LINKS = 4
    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_InvalidArgument = pynvml.NVMLError_InvalidArgument
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound

    def __init__(self, **lacks: int) -> None:
        self.lacks = lacks

    def __getattribute__(self, name: str) -> Any:
        lacks = object.__getattribute__(self, "__dict__").get("lacks", {})
        if name in lacks:
            raise pynvml.NVMLError(lacks[name])
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"  # as before pynvml 11.5

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=141 << 30, used=7)

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 61

    def nvmlDeviceGetTotalEccErrors(self, *_: object) -> int:
        return 3

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return 5, 6, 1, 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0x80 | 0x40 | 0x4 | 0x1  # a power cap and idleness are no trouble

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x8

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return link


def read(driver: Driver) -> Gpu:
    (device,) = open_devices(driver, missing(driver))
    return read_gpu(device)


def test_a_gpu_is_described() -> None:
    throttled = ("too hot (hardware)", "power brake")
    assert read(Driver()) == Gpu(0, "NVIDIA H200", 141 << 30, 7, 3, True, False, throttled, 1, 2, 61.0)


def test_what_a_gpu_does_not_have_is_no_fault() -> None:
    lacks = dict.fromkeys(
        [
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetTotalEccErrors",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ],
        pynvml.NVML_ERROR_NOT_SUPPORTED,
    )
    assert read(Driver(**lacks)) == Gpu(0, "NVIDIA H200", 141 << 30, 7)


def test_a_driver_before_535_has_another_name_for_what_slows_a_gpu_down() -> None:
    driver = Driver(nvmlDeviceGetCurrentClocksEventReasons=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert read(driver).throttled == ("hardware slowdown",)


def test_a_gpu_that_is_lost_is_not_taken_for_one_that_knows_little() -> None:
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        read(Driver(nvmlDeviceGetTotalEccErrors=pynvml.NVML_ERROR_GPU_IS_LOST))
