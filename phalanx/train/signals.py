"""Stopping when asked to: SIGTERM, SIGINT and SIGUSR1 end a run after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Context in which the three signals set `signal_number` instead of ending the process.

    A second SIGINT raises KeyboardInterrupt, for the person who will not wait. Outside the main thread, where Python
    delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        """Name of the signal that came, or an empty string."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
