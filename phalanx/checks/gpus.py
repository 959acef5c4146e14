"""NVIDIA's GPUs as their driver tells of them, asked in a process of its own: a sick driver hangs. Torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.checks.nvml import Device, missing, open_devices

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
