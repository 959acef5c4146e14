"""Signals that ask processes to stop, and stopping together: for the trainer, foreign loops and what runs them.

`STOP_SIGNALS` mean "stop soon": launchers pass them on, ranks heed them, and helpers of ranks leave them to the ranks.
Slurm sends what its user chose (``--signal``; submitit chooses SIGUSR2), and SIGTERM before its SIGKILL in any case;
others send SIGUSR1, SIGUSR2 or SIGXCPU at their soft limits, the kernel SIGXCPU for CPU time. By default each of them
ends the process: heeding it loses nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, TypeVar

from phalanx.core.peers import ALONE, Peers

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Training ends after the step in progress, with a checkpoint, when one of these comes."""

# What ranks send each other instead of a signal's number: beyond all signals.
TIME_IS_UP = 1 << 16
CALLBACK = TIME_IS_UP + 1

_NAMES = {TIME_IS_UP: "the end of its time", CALLBACK: "a callback"}
# After the job's time, as after the SIGTERM that the scheduler would have sent; a callback stops a run that went well.
_STATUSES = {_NAMES[TIME_IS_UP]: 143, _NAMES[CALLBACK]: 0, "": 0}


def exit_status(stopped_by: str) -> int:
    """0; or, of what was stopped by a signal of this name, 128 and the signal's number."""
    return _STATUSES[stopped_by] if stopped_by in _STATUSES else 128 + signal.Signals[stopped_by]


class StopRequest:
    """Context in which the signals set `number` instead of ending the process.

    Of several ranks some may get a signal and some not, or in different steps; `ask` and `agreed` make them stop
    together. A second SIGINT raises KeyboardInterrupt, for the person who will not wait. Outside the main thread, where
    Python delivers no signals, it does nothing.

    Args:
        peers: the ranks that stop together.
        reason: asked once a step: `TIME_IS_UP` (the job will be ended before another step and a checkpoint are done),
            `CALLBACK`, or 0 to go on.
        catch: False: signals are left as they are, and only the reason counts.

    Attributes:
        number: of the signal that came, or the reason; None: nothing wants to stop.
        is_agreed: the ranks have agreed to stop; the same on all of them.
    """

    def __init__(self, peers: Peers = ALONE, reason: Callable[[], int] = lambda: 0, *, catch: bool = True) -> None:
        self.number: int | None = None
        self.is_agreed = False
        self._peers, self._reason, self._catch = peers, reason, catch
        self._answer: Callable[[], int] = lambda: 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        """Name of the signal that came, ``the end of its time``, ``a callback``, or an empty string."""
        if self.number is None:
            return ""
        return _NAMES.get(self.number) or signal.Signals(self.number).name

    def ask(self) -> None:
        """At the beginning of a step: ask all ranks whether to stop, so that they stop together."""
        if self.number is None:
            self.number = self._reason() or None
        if self._peers.size > 1:
            self._answer = self._peers.ask_highest(self.number or 0)

    def agreed(self) -> bool:
        """At the end of a step: whether to stop now. With several ranks, a signal during a step counts in the next."""
        if self._peers.size > 1:
            number = self._answer()
            self.number = number or self.number
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
        if self._catch and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


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
        """What has come since the last call, in order, after up to `timeout_s` (None: no limit); perhaps nothing."""
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
