"""Functions whose frames look like the code that called them, in tracebacks and in the stacks that others dump.

A detector that reads stacks must find what a real fault leaves, not where it was injected. Torch-free.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# One entry of a location table (Objects/locations.md of CPython): no columns, then a signed distance of lines, here 0.
_NO_COLUMNS = 0x80 | 13 << 3
_UNITS_PER_ENTRY = 8


@dataclass(frozen=True)
class Spot:
    """A place in the source that a frame is shown to be at."""

    filename: str
    name: str
    line: int


BELOW_THE_SCRIPT = Spot("<frozen runpy>", "_run_code", 88)
"""What stands below any script that is run by a launcher; no source text is ever shown for it."""


def spot_of(frame: types.FrameType) -> Spot:
    """Where a frame stands now."""
    return Spot(frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or frame.f_code.co_firstlineno)


def disguised(function: F, spot: Spot) -> F:
    """A copy of a Python function, and of those defined in it, that is shown at `spot` wherever it stands."""
    plain = cast(types.FunctionType, function)
    copy = types.FunctionType(
        _moved(plain.__code__, spot), plain.__globals__, spot.name, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return cast(F, copy)


def _moved(code: types.CodeType, spot: Spot) -> types.CodeType:
    consts = tuple(_moved(c, spot) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    units = len(code.co_code) // 2
    lengths = [min(_UNITS_PER_ENTRY, units - start) for start in range(0, units, _UNITS_PER_ENTRY)]
    return code.replace(
        co_filename=spot.filename,
        co_name=spot.name,
        co_qualname=spot.name,
        co_firstlineno=spot.line,
        co_linetable=b"".join(bytes([_NO_COLUMNS | length - 1, 0]) for length in lengths),
        co_consts=consts,
    )
