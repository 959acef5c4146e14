"""The accelerators of a host through NVML, if it is there; what cannot be asked is reported.

A driver that is in trouble may never answer (after Xid 119 nvidia-smi hangs too), nor may a file system whose server is
gone, so they are asked in threads (`LastAnswer`).
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phalanx.checks.nvml import Device, open_devices
from phalanx.core.units import size
from phalanx.run.messages import Accelerator

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LATE_S = 5.0


class LastAnswer(Generic[T]):
    """The newest answer of a function that is called in a thread of its own, never twice at a time.

    That it does not answer for long, answers again, or fails is written to the log once.

    Attributes:
        problem: why the last question had no answer: what it raised.

    Args:
        ask: may block for ever.
        first: the answer until there is one.
    """

    def __init__(self, ask: Callable[[], T], name: str, first: T, *, late_s: float = _LATE_S) -> None:
        self._ask = ask
        self._name = name
        self.answer = first
        self._late_s = late_s
        self._asked_s = 0.0
        self._is_reported = False
        self._idle = threading.Event()
        self._idle.set()
        self.problem = ""

    def take(self, within_s: float) -> T:
        """Ask, and wait at most `within_s` seconds; after that, and where asking fails, the last answer is given.

        While an earlier question is not answered, no other is asked or waited for.
        """
        if self._idle.is_set():
            self._idle.clear()
            self._asked_s = time.monotonic()
            self._is_reported = False
            threading.Thread(target=self._work, name=f"ask {self._name}", daemon=True).start()
            self._idle.wait(within_s)
        elif not self._is_reported and time.monotonic() - self._asked_s >= self._late_s:
            self._is_reported = True
            _log.warning("%s", self.silence)
        return self.answer

    @property
    def silence(self) -> str:
        """Since when it does not answer, or why, for people; empty: it does."""
        if not self._idle.is_set():
            return f"{self._name} does not answer since {time.monotonic() - self._asked_s:.1f} s"
        return self.problem

    def _work(self) -> None:
        before, self.problem = self.problem, ""
        try:
            self.answer = self._ask()
        except Exception as error:
            self.problem = f"{self._name}: {error}"
            if self.problem != before:
                _log.warning("%s", self.problem)
        if self._is_reported:
            _log.info("%s has answered after %.0f s", self._name, time.monotonic() - self._asked_s)
        self._idle.set()


_POLL_S = 0.05
_ASK_S = 1.0
_OPEN_S = 5.0
_SLACK_BYTES = 256 << 20  # by which a device's idle memory differs from time to time


@dataclass(frozen=True)
class DeviceUse:
    """The use of a device. `pids`: processes that compute on it; None: the driver does not report them."""

    name: str
    used_bytes: int
    pids: frozenset[int] | None


class Accelerators:
    """The accelerators of this host. `load`: gives the module ``pynvml``; what it raises is why there are none."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._devices: list[Device] = []
        self._idle_bytes: list[int] = []
        self._opened = LastAnswer(lambda: self._open(load), "NVML", "NVML has not answered yet")
        self._states: LastAnswer[list[Accelerator]] = LastAnswer(
            lambda: [_state(device) for device in self._devices], "NVML", []
        )
        self._uses: LastAnswer[list[DeviceUse] | None] = LastAnswer(
            lambda: [DeviceUse(f"{one.name} {one.index}", one.memory()[1], one.pids()) for one in self._devices],
            "NVML",
            None,
        )
        self._opened.take(_OPEN_S)

    @property
    def absent(self) -> str:
        """Why there are none, for people; empty: there are."""
        return self._opened.answer

    def read(self, within_s: float = 0.2) -> list[Accelerator]:
        """The state of all; the last one known where the driver does not answer in time."""
        return [] if self.absent else self._states.take(within_s)

    def mark_idle(self) -> None:
        """No rank of ours runs: what is in use now is not ours to wait for in `released`."""
        uses = None if self.absent else self._uses.take(_ASK_S)
        self._idle_bytes = [use.used_bytes for use in uses or []]

    def released(self, killed: Set[int], within_s: float) -> list[str]:
        """Wait until no device holds memory of processes that were killed; see `phalanx.run.executor.reaper.Release`.

        Returns:
            What is still held, for people; empty: nothing.
        """
        if self.absent:
            return []
        until_s = time.monotonic() + within_s
        while True:
            uses = self._uses.take(min(_ASK_S, max(0.0, until_s - time.monotonic())))
            silence = self._uses.silence
            held = [silence] if silence or uses is None else still_held(uses, self._idle_bytes, killed)
            if not held or time.monotonic() >= until_s:
                return held
            time.sleep(_POLL_S)

    def _open(self, load: Callable[[], Any]) -> str:
        try:
            self._devices = open_devices(load(), Exception)
        except Exception as error:  # NVMLError, and ImportError where the package is absent
            return f"no accelerators can be read: {error}"
        return "" if self._devices else "there are no accelerators"


def _state(device: Device) -> Accelerator:
    memory_bytes, used_bytes = device.memory()
    utilisation, temperature_c = device.utilisation(), device.temperature_c()
    memory_activity = device.memory_activity()
    return Accelerator(
        name=device.name,
        memory_bytes=memory_bytes,
        memory_used_bytes=used_bytes,
        utilisation=-1.0 if utilisation is None else utilisation,
        temperature_c=-1.0 if temperature_c is None else temperature_c,
        ecc_uncorrected=device.ecc_uncorrected() or 0,
        throttled=bool(device.throttled()),
        memory_activity=-1.0 if memory_activity is None else memory_activity,
    )


def still_held(uses: Sequence[DeviceUse], idle_bytes: Sequence[int], killed: Set[int]) -> list[str]:
    """What devices have not taken back of processes that were killed, for people.

    A device is free when none of these is listed on it, and no more memory is in use than when it was idle, or other
    processes are listed that may use it. Process numbers of a namespace may not be those that a driver lists, so a list
    without them is not enough.
    """
    held = []
    for index, use in enumerate(uses):
        ours = sorted((use.pids or frozenset()) & killed)
        idle = idle_bytes[index] if index < len(idle_bytes) else 0
        if ours:
            held.append(f"{use.name} is held by {', '.join(map(str, ours))}")
        elif use.used_bytes > idle + _SLACK_BYTES and not use.pids:
            held.append(f"{use.name} has {size(use.used_bytes)} in use, {size(idle)} when it was idle")
    return held
