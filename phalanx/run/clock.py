"""The clocks of the run room."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

from phalanx.faults.host_faults import wall_clock


class Now(NamedTuple):
    """One moment: monotonic, for durations within this process; unix, for people and for events, which outlive it."""

    monotonic_s: float
    unix_s: float


def read_clocks() -> Now:
    """This moment."""
    return Now(time.monotonic(), unix_s())


def unix_s() -> float:
    """Seconds since 1970, by the wall clock of this process; a fault campaign can make it jump.

    Raises:
        UserError: the clock that it was given cannot be read.
    """
    return _wall()()


_wall = functools.cache(wall_clock)
