"""What a rank reports to its supervisor: its step, its phase, its own time and its loss.

The page is that of `phalanx.core.progress`; without one nothing is reported. It costs some microseconds a step, and
never a synchronisation of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from phalanx.core.progress import ATTEMPT_VARIABLE, UNKNOWN, ProgressWriter, own_progress

START_S = 300.0
"""How long meeting the other ranks, building the model and restoring it may take before a supervisor should act."""

# A phase may take so many times as long as it usually does, and so many seconds more.
_PATIENCE = 3.0
_MARGIN_S = 30.0


class Pulse:
    """A rank's side.

    Args:
        waited_ns: how long this rank has waited for others so far; None: not known.
    """

    def __init__(
        self,
        page: ProgressWriter | None,
        waited_ns: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._page, self._waited_ns, self._clock_ns = page, waited_ns, clock_ns
        self._own_ns = 0
        self._since: tuple[int, int] | None = None
        self._took_s: dict[str, float] = {}

    @property
    def is_read(self) -> bool:
        """Whether a supervisor reads it."""
        return self._page is not None

    def without_own_time(self) -> None:
        """How long others are waited for cannot be measured here after all."""
        self._waited_ns = None

    def enter(self, name: str, expects_s: float = 0.0) -> None:
        """A phase without steps begins, which may take `expects_s`; 0: not known."""
        if self._page is not None:
            self._stop_clock()
            self._page.phase(name, expects_s)

    def resume(self, step: int) -> None:
        """Training goes on after this step; 0: it begins."""
        if self._page is not None:
            self._page.resume(step)

    def begin_steps(self) -> None:
        """From now on steps are made."""
        if self._page is not None:
            self._page.phase("step")
            self._start_clock()

    @contextmanager
    def aside(self, name: str, expected_s: float | None = None) -> Iterator[None]:
        """Between two steps something else is done, which usually takes `expected_s`; 0: not known; None: as long as it
        took here before."""
        if self._page is None:
            yield
            return
        usual_s = self._took_s.get(name, 0.0) if expected_s is None else expected_s
        self.enter(name, _PATIENCE * usual_s + _MARGIN_S if usual_s > 0 else 0.0)
        began_ns = self._clock_ns()
        try:
            yield
        finally:
            self._took_s[name] = max(self._took_s.get(name, 0.0), (self._clock_ns() - began_ns) * 1e-9)
            self.begin_steps()

    def step(self, step: int, loss: float | None) -> None:
        """A step has ended; `loss` None: not known yet."""
        if self._page is None:
            return
        was_measured = self._since is not None and self._waited_ns is not None
        self._stop_clock()
        self._page.step(step, busy_ns=max(self._own_ns, 0) if was_measured else UNKNOWN, loss=loss)
        self._own_ns = 0
        self._start_clock()

    def _start_clock(self) -> None:
        self._since = self._clock_ns(), self._waited_ns() if self._waited_ns is not None else 0

    def _stop_clock(self) -> None:
        """Count the time since the clock was started, without that in which others were waited for."""
        if self._since is not None:
            began_ns, waited_ns = self._since
            now_waited_ns = self._waited_ns() if self._waited_ns is not None else 0
            self._own_ns += self._clock_ns() - began_ns - (now_waited_ns - waited_ns)
            self._since = None


NO_PULSE = Pulse(None)


def open_page(environ: Mapping[str, str]) -> ProgressWriter | None:
    """The page of this rank, where somebody reads one; training goes on without one that cannot be written."""
    with suppress(OSError, ValueError):
        return own_progress(environ, int(environ.get(ATTEMPT_VARIABLE, "0")))
    return None
