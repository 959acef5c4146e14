"""The lines of a run's ``metrics.jsonl`` for judges: a value that no judge can count with is refused by line and value.

for entry in read_entries(run):
    figure(entry, "loss")
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError, not_permitted
from phalanx.core.files import open_regular
from phalanx.telemetry.loggers import parse_line

MOST_STEPS = 1 << 53
"""A step beyond it is none: floats and Parquet's integers no longer hold its neighbours."""

_SHOWN = 128


def read_entries(run: Path) -> Iterator[Mapping[str, Any]]:
    """Its whole lines; torn ones, and what is no line of ours, are left out.

    Raises:
        FileNotFoundError: it is not there.
        UserError: it is no regular file, or cannot be read; a line has a step or a number that is beyond what a float
            holds.
    """
    path = run / "metrics.jsonl"
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if (entry := parse_line(line)) is not None:
                    _refuse_too_large(path, number, entry)
                    yield entry
    except FileNotFoundError:
        raise
    except PermissionError:
        raise not_permitted(path) from None
    except OSError as error:
        cure = "give the folder of a run whose figures can be read"
        raise UserError(f"its metrics.jsonl cannot be read ({error.strerror})", cure=cure, field=str(run)) from None


def _refuse_too_large(path: Path, line: int, entry: Mapping[str, Any]) -> None:
    if not -MOST_STEPS < entry["step"] < MOST_STEPS:
        raise _refused(path, line, "step", entry["step"])
    for name, value in entry.items():
        if isinstance(value, int) and abs(value) > MOST_STEPS and not _is_float(value):
            raise _refused(path, line, name, value)


def figure(entry: Mapping[str, Any], name: str) -> float:
    """A number of a line; what was not finite is as it was; NaN: it is not there, or is no number."""
    return math.nan if (found := number_of(entry, name)) is None else found


def number_of(entry: Mapping[str, Any], name: str) -> float | None:
    """The same, but None where it is not there or no number: what training wrote as NaN, it wrote as a number."""
    value = entry.get(name)
    if value is None:
        strange = entry.get("not_finite")
        value = strange.get(name) if isinstance(strange, dict) else None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def _is_float(value: int) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _refused(path: Path, line: int, name: str, value: int) -> UserError:
    # Python writes no integer of very many digits as text.
    shown = str(value) if value.bit_length() < _SHOWN else f"{hex(value)[:40]}… ({value.bit_length():,} bits)"
    problem = f"{name} in line {line:,} is {shown}, which is too large to be judged"
    return UserError(problem, cure="correct or remove that line", field=str(path))
