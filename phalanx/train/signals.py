"""Stopping when asked to: SIGTERM, SIGINT and SIGUSR1 end a run after the step in progress, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from phalanx.core.peers import ALONE, Peers

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Context in which the three signals set `signal_number` instead of ending the process.

    Of several ranks some may be told and some not, or in different steps; `ask` and `agreed` make them stop together.

    A second SIGINT raises KeyboardInterrupt, for the person who will not wait. Outside the main thread, where Python
    delivers no signals, it does nothing.
    """

    def __init__(self, peers: Peers = ALONE) -> None:
        self.signal_number: int | None = None
        self._peers = peers
        self._answer: Callable[[], int] = lambda: 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        """Name of the signal that came, or an empty string."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name

    def ask(self) -> None:
        """At the beginning of a step: ask all ranks whether a signal has come, so that they stop together."""
        if self._peers.size > 1:
            self._answer = self._peers.ask_highest(self.signal_number or 0)

    def agreed(self) -> bool:
        """At the end of a step: whether to stop now. With several ranks, a signal during a step counts in the next."""
        if self._peers.size == 1:
            return bool(self)
        number = self._answer()
        if number:
            self.signal_number = number
        return bool(number)

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
