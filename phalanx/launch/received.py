"""Signals that a process which keeps others gets, and passes on to them. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing.connection import wait
from typing import Any


class ReceivedSignals:
    """Context that collects signals instead of acting on them, whichever thread of the process takes them.

    They come through a pipe (`signal.set_wakeup_fd`) as the kernel delivers them. What waits for a pipe misses none,
    which `sigwaitinfo` does: a signal to a process goes to any of its threads that does not block it, and numpy alone
    starts one per core. Outside the main thread, where Python delivers no signals, none ever comes.

    Args:
        numbers: to be collected; what the process ignores too.
    """

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(numbers)
        self._before: dict[signal.Signals, Any] = {}
        self._mask: set[int | signal.Signals] = set()
        self._reader = self._writer = self._pipe = -1

    def fileno(self) -> int:
        """A descriptor to wait for; it may be readable for other signals, too."""
        return self._reader

    def take(self, timeout_s: float | None = 0.0) -> list[signal.Signals]:
        """What has come since the last call, in order.

        Args:
            timeout_s: waited until something has come; None: without end. What comes may be none of `numbers`.
        """
        if not wait([self._reader], timeout_s):
            return []
        return [signal.Signals(number) for number in os.read(self._reader, 4096) if number in self._numbers]

    def __enter__(self) -> ReceivedSignals:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._pipe = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._pipe)
        os.close(self._reader)
        os.close(self._writer)
