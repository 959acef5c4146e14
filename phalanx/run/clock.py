"""The clocks of the run room."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

from phalanx.faults.host_faults import wall_clock


class Now(NamedTuple):
    """One moment, of the driver's two clocks.

    Attributes:
        monotonic_s: for durations; means nothing to another process.
        unix_s: for people, and for events, which outlive this process.
    """

    monotonic_s: float
    unix_s: float


def read_clocks() -> Now:
    """This moment."""
    return Now(time.monotonic(), unix_s())


def unix_s() -> float:
    """Seconds since 1970, by the wall clock that this process was given at its start; a campaign can make it jump.

    Raises:
        UserError: it was given none that can be read.
    """
    return _wall()()


_wall = functools.cache(wall_clock)
