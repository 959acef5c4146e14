"""The driver's two clocks, read together. Torch-free."""

from __future__ import annotations

import time
from typing import NamedTuple


class Now(NamedTuple):
    """One moment.

    Attributes:
        monotonic_s: for durations; means nothing to another process.
        unix_s: for people, and for events, which outlive this process.
    """

    monotonic_s: float
    unix_s: float


def read_clocks() -> Now:
    """This moment."""
    return Now(time.monotonic(), time.time())
