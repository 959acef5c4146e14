"""Calls in the main thread after a while, wherever the program then is: by SIGALRM, without a thread. Torch-free."""

from __future__ import annotations

import atexit
import heapq
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.faults.disguise import Spot, disguised

Due = Callable[[], list[Callable[[], None]]]

_SOONEST_S = 1e-4  # a timer of 0 is none
_AGAIN_S = 0.001
_HERE = str(Path(__file__).parent)


class Alarms:
    """Calls that wait. For the main thread only; SIGALRM is its own while one waits."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Due]] = []
        self._numbers = itertools.count()
        self._previous: Any = None

    def add(self, delay_s: float, due: Due, spot: Spot) -> None:
        """After `delay_s`, ask `due` for functions and call them; the frame that does it looks like `spot`."""
        if not self._waiting:
            self._previous = signal.getsignal(signal.SIGALRM)
            atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # else SIGALRM would kill Python as it ends
        heapq.heappush(self._waiting, (time.monotonic() + delay_s, next(self._numbers), due))

        def rung(number: int, frame: FrameType | None) -> None:
            for act in self._ripe(frame):
                act()

        signal.signal(signal.SIGALRM, disguised(rung, spot))
        self._arm()

    def _ripe(self, frame: FrameType | None) -> Iterator[Callable[[], None]]:
        """All functions whose time has come, none while our own code runs; the timer is set for the others first."""
        if _is_ours(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return iter(())
        now_s, acts = time.monotonic(), []
        while self._waiting and self._waiting[0][0] <= now_s:
            acts += heapq.heappop(self._waiting)[2]()
        if self._waiting:
            self._arm()
        else:
            signal.signal(signal.SIGALRM, self._previous or signal.SIG_DFL)
        return iter(acts)

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(self._waiting[0][0] - time.monotonic(), _SOONEST_S))


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a function of this package that shows its own name is on the stack."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE):
            return True
        frame = frame.f_back
    return False
