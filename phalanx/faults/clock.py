"""A wall clock that a campaign can make jump, without touching that of the machine. Torch-free.

Programs that take the time from here, by `wall_clock` at their start, see the machine's clock plus the offset in the
file that ``PHALANX_CLOCK`` names; without the variable it is the machine's clock, at no cost. Monotonic clocks never
jump.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from phalanx.core.errors import UserError

VARIABLE = "PHALANX_CLOCK"

_OFFSET = struct.Struct("<d")


def wall_clock(environ: Mapping[str, str] = os.environ) -> Callable[[], float]:
    """A function that says the seconds since 1970.

    Raises:
        UserError: the variable names no file with an offset.
    """
    name = environ.get(VARIABLE)
    if not name:
        return time.time
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="unset it", field=VARIABLE, value=name) from None

    def now() -> float:
        return time.time() + _read(file, name)

    now()
    return now


def set_offset(path: Path, seconds: float) -> None:
    """Set what all that read this file are ahead of the machine's clock; in place, so that they see it at once."""
    if not math.isfinite(seconds):
        raise ValueError(f"set_offset({seconds}): needs a number")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(file, _OFFSET.pack(seconds), 0)
    finally:
        os.close(file)


@contextmanager
def jumped(path: Path, seconds: float) -> Iterator[None]:
    """The clocks that read this file are `seconds` ahead meanwhile, behind where negative; 0 afterwards."""
    set_offset(path, seconds)
    try:
        ahead_s = wall_clock({VARIABLE: str(path)})() - time.time()
        if abs(ahead_s - seconds) > 1:
            raise RuntimeError(f"the clock is {ahead_s} s ahead, not {seconds} s")
        yield
    finally:
        set_offset(path, 0.0)


def _read(file: int, name: str) -> float:
    content = os.pread(file, _OFFSET.size, 0)
    if len(content) != _OFFSET.size:
        raise UserError("holds no offset", cure="write it with set_offset", field=VARIABLE, value=name)
    return float(_OFFSET.unpack(content)[0])
