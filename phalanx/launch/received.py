"""Signals that the launcher gets and passes on to its ranks. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from phalanx.core.signals import STOP_SIGNALS

FORWARDED = STOP_SIGNALS


class ReceivedSignals:
    """Context that collects signals instead of acting on them: those that stop a run, and Ctrl-Z.

    `fileno` is readable when some have come; `take` gives them, each once. Outside the main thread, where Python
    delivers no signals, none ever comes.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._reader = self._writer = -1

    def fileno(self) -> int:
        """A descriptor to wait for."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """What has come since the last call, in order."""
        return [signal.Signals(number) for number in os.read(self._reader, 4096)]

    def __enter__(self) -> ReceivedSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (*FORWARDED, signal.SIGTSTP)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._writer, bytes([number]))
