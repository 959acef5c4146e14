"""The clocks of the run room."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

from phalanx.core.host import boot_id
from phalanx.faults.host_faults import wall_clock


class Now(NamedTuple):
    """One moment: monotonic, for durations within this process; unix, for people and for events, which outlive it."""

    monotonic_s: float
    unix_s: float


def read_clocks() -> Now:
    """This moment."""
    return Now(time.monotonic(), unix_s())


MOST_BRIDGED_S = 7 * 86_400.0
"""From one boot to the next only the wall clock leads, which may be wrong then: it counts for so much at most."""


class JobClock(NamedTuple):
    """The time of a job: seconds since 1970 as they were when it began. It goes on with the clock since boot.

    So no jump of the wall clock makes anything late. All drivers of one boot (`boot`: its id) share it.
    """

    boot: str
    ahead_s: float  # of the clock since boot

    def read(self) -> Now:
        """This moment."""
        return Now(time.monotonic(), _since_boot_s() + self.ahead_s)


def job_clock(before: JobClock | None, last_unix_s: float | None) -> JobClock:
    """The clock of a job on this machine: as it was, where this boot has set it, else by the wall clock.

    Args:
        before: what was used last; None: the job begins.
        last_unix_s: its newest moment that is known, behind which it never goes; None: none is.
    """
    since_boot_s, boot, now_s = _since_boot_s(), boot_id(), unix_s()
    if before is not None and boot and before.boot == boot and before.ahead_s + since_boot_s >= (last_unix_s or 0.0):
        return before
    if last_unix_s is not None:
        now_s = last_unix_s + min(max(now_s - last_unix_s, 0.0), MOST_BRIDGED_S)
    return JobClock(boot, now_s - since_boot_s)


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # also while the machine sleeps


def unix_s() -> float:
    """Seconds since 1970, by the wall clock of this process; a fault campaign can make it jump.

    Raises:
        UserError: the clock that it was given cannot be read.
    """
    return _wall()()


_wall = functools.cache(wall_clock)
