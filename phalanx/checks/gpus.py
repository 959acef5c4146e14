"""NVIDIA's GPUs as their driver tells of them, asked in a process of its own: a sick driver hangs. Torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        links_up, links: of NVLink.
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
    """Asks once, whoever asks first; all others get the same answer.

    Args:
        driver: the kernel's folder of NVIDIA's driver; without it there is nothing to ask.
    """

    def __init__(self, driver: Path = Path("/proc/driver/nvidia")) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._answer: tuple[Gpu, ...] | Exception | None = None

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs; raises `NoGpusError` where there is nobody to ask, `SilentGpusError` where no answer comes."""
        with self._lock:
            if self._answer is None:
                self._answer = self._ask()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def _ask(self) -> tuple[Gpu, ...] | Exception:
        if not self._driver.exists():
            return NoGpusError("no NVIDIA driver on this host")
        try:
            return _ask_in_process()
        except (NoGpusError, SilentGpusError) as problem:
            return problem


class KnownGpus(Gpus):
    """GPUs that are given."""

    def __init__(self, *gpus: Gpu) -> None:
        super().__init__()
        self._answer = gpus


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


def _ask_in_process() -> tuple[Gpu, ...]:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise SilentGpusError(f"the driver gave no answer within {_LIMIT_S:g} s") from None
    try:
        return gpus_from_json(output.decode())
    except ValueError:
        raise SilentGpusError(f"asking the driver ended with status {process.returncode}") from None


def gpus_from_json(text: str) -> tuple[Gpu, ...]:
    """What the process that asked has printed; raises as `Gpus.read` does, and ValueError where it is no answer."""
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
        pynvml.nvmlInit()
        return {"gpus": [asdict(_read(pynvml, index)) for index in range(pynvml.nvmlDeviceGetCount())]}
    except pynvml.NVMLError_LibraryNotFound:
        return {"absent": "NVML's library is not here"}
    except pynvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    ecc = _ask(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0)
    rows = _ask(nvml, nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    links = [_ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    present = [state for state in links if state is not None]
    return Gpu(
        index=index,
        name=name if isinstance(name, str) else name.decode(),
        memory_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        ecc_uncorrected=ecc,
        rows_pending=bool(rows[2]),
        rows_failed=bool(rows[3]),
        throttled=_throttled(nvml, handle),
        links_up=sum(map(bool, present)),
        links=len(present),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _ask(nvml: Any, function: Any, *arguments: Any) -> Any:
    """The answer, or None where this GPU has no such thing."""
    try:
        return function(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
        return None


def _throttled(nvml: Any, handle: Any) -> tuple[str, ...]:
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    named = {
        "hardware slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
        "too hot (hardware)": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "too hot (driver)": nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    }
    return tuple(name for name, bit in named.items() if reasons & bit)


if __name__ == "__main__":
    print(json.dumps(_answer()))
