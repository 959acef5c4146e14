"""Stopping when asked to: a signal, or the end of the job's time, ends a run after the step in progress.

Which signals those are is said in `phalanx.ipc.processes`; the run ends with a checkpoint.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from phalanx.core.peers import ALONE, Peers
from phalanx.ipc.processes import STOP_SIGNALS

T = TypeVar("T")

TIME_IS_UP = 1 << 16
"""Beyond all signals: what ranks tell each other instead of a signal's number when the job's time ends."""


END_OF_TIME = "the end of its time"
_EXIT_AT_END_OF_TIME = 143  # as after the SIGTERM that the scheduler would have sent


def exit_status(stopped_by: str) -> int:
    """0; or, of what was stopped by a signal of this name, 128 and the signal's number."""
    if not stopped_by:
        return 0
    return _EXIT_AT_END_OF_TIME if stopped_by == END_OF_TIME else 128 + signal.Signals[stopped_by]


def no_deadline() -> bool:
    """There is no end of the job's time."""
    return False


class StopRequest:
    """Context in which the signals set `signal_number` instead of ending the process.

    Of several ranks some may be told and some not, or in different steps; `ask` and `agreed` make them stop together.

    `is_agreed` says, the same on all ranks, whether they have agreed to.

    A second SIGINT raises KeyboardInterrupt, for the person who will not wait. Outside the main thread, where Python
    delivers no signals, it does nothing.

    Args:
        peers: the ranks that stop together.
        time_is_up: whether the job will be ended before another step and a checkpoint are done; asked once a step.
    """

    def __init__(self, peers: Peers = ALONE, time_is_up: Callable[[], bool] = no_deadline) -> None:
        self.signal_number: int | None = None
        self.is_agreed = False
        self._peers, self._time_is_up = peers, time_is_up
        self._answer: Callable[[], int] = lambda: 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        """Name of the signal that came, ``the end of its time``, or an empty string."""
        if self.signal_number is None:
            return ""
        return END_OF_TIME if self.signal_number == TIME_IS_UP else signal.Signals(self.signal_number).name

    def ask(self) -> None:
        """At the beginning of a step: ask all ranks whether a signal has come, so that they stop together."""
        if self.signal_number is None and self._time_is_up():
            self.signal_number = TIME_IS_UP
        if self._peers.size > 1:
            self._answer = self._peers.ask_highest(self.signal_number or 0)

    def agreed(self) -> bool:
        """At the end of a step: whether to stop now. With several ranks, a signal during a step counts in the next."""
        if self._peers.size > 1:
            number = self._answer()
            self.signal_number = number or self.signal_number
            self.is_agreed = bool(number)
        else:
            self.is_agreed = bool(self)
        return self.is_agreed

    def until_asked(self, items: Iterable[T]) -> Iterator[T]:
        """`items` up to the one during which all agree to stop; every rank has as many, and gets as many."""
        for item in items:
            self.ask()
            yield item
            if self.agreed():
                return

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number
