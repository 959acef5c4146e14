"""GPUs through NVML, one question at a time; what a GPU does not know is None.

A driver that is in trouble may never answer (after Xid 119 nvidia-smi hangs too): `Gpus` asks in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
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
        """Processes that compute on it, as far as the driver says."""
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


_LIMIT_S = 10.0
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # PCI classes of a VGA controller and of a 3D controller
_NVIDIA = "0x10de"


class NoGpusError(Exception):
    """Why GPUs cannot be asked: there is no driver here, or no way to talk to it. A reason to skip."""


class SilentGpusError(Exception):
    """The driver does not answer, or answers with an error. A reason to fail."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        ecc_uncorrected: errors since the driver was loaded; None: it has no ECC, or it is off.
        rows_pending: a row is to be remapped at the next reset.
        rows_failed: a row could not be remapped.
        throttled: reasons that lower its clock now, of those that hint at trouble.
    """

    index: int
    name: str
    memory_bytes: int
    memory_used_bytes: int = 0
    ecc_uncorrected: int | None = None
    rows_pending: bool = False
    rows_failed: bool = False
    throttled: tuple[str, ...] = ()
    links_up: int = 0
    links: int = 0
    temperature_c: float | None = None


class Gpus:
    """Asks once; everybody gets the same answer.

    Args:
        driver: the kernel's folder of NVIDIA's driver; without it there is nothing to ask.
    """

    def __init__(self, driver: Path = Path("/proc/driver/nvidia")) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._answer: tuple[Gpu, ...] | Exception | None = None

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs; raises `NoGpusError` where nothing can be asked, `SilentGpusError` where no answer comes."""
        with self._lock:
            if self._answer is None:
                self._answer = self._ask()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _ask(self) -> tuple[Gpu, ...] | Exception:
        if not self._driver.exists():
            return NoGpusError("no NVIDIA driver on this host")
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT_S)
            return gpus_from_json(output.decode())
        except subprocess.TimeoutExpired:
            process.kill()
            return SilentGpusError(f"the driver gave no answer within {_LIMIT_S:g} s")
        except (NoGpusError, SilentGpusError) as problem:
            return problem
        except ValueError:
            return SilentGpusError(f"asking the driver ended with status {process.returncode}")


def count_on_bus(sys_root: Path) -> int:
    """NVIDIA's GPUs on the PCI bus, whether the driver still speaks to them or not."""
    found = 0
    for device in (sys_root / "bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == _NVIDIA and kind[:6] in _DISPLAY_CLASSES
    return found


def count_files(dev: Path) -> int:
    """GPUs that this host, or this container, was given a device file for."""
    return sum(each.name.removeprefix("nvidia").isdigit() for each in dev.glob("nvidia[0-9]*"))


def gpus_from_json(text: str) -> tuple[Gpu, ...]:
    """What the process that asked has printed; raises as `Gpus.read` does, and ValueError where it is not an answer."""
    answer = json.loads(text)
    if "absent" in answer:
        raise NoGpusError(answer["absent"])
    if "problem" in answer:
        raise SilentGpusError(answer["problem"])
    return tuple(Gpu(**{**each, "throttled": tuple(each["throttled"])}) for each in answer["gpus"])


def _answer() -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"absent": "NVML is not installed (pip install 'phalanx-train[nvml]')"}
    try:
        return {"gpus": [asdict(read_gpu(device)) for device in open_devices(pynvml, missing(pynvml))]}
    except pynvml.NVMLError_LibraryNotFound:
        return {"absent": "NVML's library is not here"}
    except pynvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}


def read_gpu(device: Device) -> Gpu:
    """All that checks want to know of one."""
    memory_bytes, used_bytes = device.memory()
    rows_pending, rows_failed = device.rows() or (False, False)
    links = device.links()
    return Gpu(
        index=device.index,
        name=device.name,
        memory_bytes=memory_bytes,
        memory_used_bytes=used_bytes,
        ecc_uncorrected=device.ecc_uncorrected(),
        rows_pending=rows_pending,
        rows_failed=rows_failed,
        throttled=device.throttled() or (),
        links_up=sum(links),
        links=len(links),
        temperature_c=device.temperature_c(),
    )


if __name__ == "__main__":
    print(json.dumps(_answer()))
