"""Numbers in TOML files that say how they are known, as pydantic types: value, mark, source and date.

Hardware files and fabrics are schemas of `Table` with these types. Each number is checked against its unit, which is
the ending of its key: gigabytes or microseconds are refused with the file, the key and the cure.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from phalanx.core.errors import UserError
from phalanx.plan.types import Mark, Number

MANY = 10_000_000
"""More cores or devices are none."""

# What numbers of a unit can be. The longest ending that a key has says its unit.
_RANGES: Mapping[str, tuple[float, float]] = {
    "flops_per_s": (1e7, 1e18),
    "bytes_per_s": (1e5, 1e15),
    "flops": (1, 1e18),
    "bytes": (1, 1e18),
    "usd_per_device_hour": (0, 1e4),
    "s": (0, 1e5),
    "ratio": (0, 100),
}

_AT_ONCE = (0, 1.0)
# Where a unit in general allows what cannot be right for this key, or cannot be computed with.
_OWN: Mapping[str, tuple[float, float]] = {
    "memory_bytes": (1e8, 1e18),
    **dict.fromkeys(("kernel_s", "kernel_gap_s", "host_launch_s", "launch_s", "latency_s"), _AT_ONCE),
    "host_compiled_launch_s": _AT_ONCE,
    **dict.fromkeys(("send_latency_s", "start_s", "hop_s", "inside_hop_s", "hop_latency_s"), _AT_ONCE),
    **dict.fromkeys(("clock_from_s", "clock_to_s", "time_s"), (1e-9, 1e5)),
    **dict.fromkeys(("achieved_ratio", "share_ratio"), (0.001, 1)),
    **dict.fromkeys(("rank_sigma_ratio", "slow_host_share_ratio"), (0, 1)),
    **dict.fromkeys(("weight_gradient_ratio", "correction_ratio"), (0.001, 100)),
    "memory_ratio": (0.01, 2),
    "efficiency_ratio": (0.1, 2),
    "softness": (1, 100),
}
KIND = "kind:"
"""Begins the tags of a union of tables, which are no part of where something is."""
_LONG = 80  # characters of a value that a message shows
_ABSENT: Any = object()
_SHAPE = '{ value = .., mark = "measured|derived|assumed", source = ".." }'


def unit_of(key: str) -> str:
    """The unit that the ending of `key` names; ``count`` where it names none."""
    for unit in _RANGES:
        if key == unit or key.endswith("_" + unit):
            return unit
    return "count"


def refusal(problem: str, cure: str, value: Any = _ABSENT, *, below: str = "") -> PydanticCustomError:
    """The error of a validator; `read_file` turns it into a `UserError` that says where.

    Args:
        value: what is wrong; left out: it is not shown. Tables and long lists are not shown either.
        below: the key within what is validated.
    """
    shown = {} if value is _ABSENT else {"value": value}
    return PydanticCustomError("refused", "refused", {"problem": problem, "cure": cure, "below": below, **shown})


class Table(BaseModel):
    """A table of a file: a missing key is told before an unknown one, which may be the same misspelt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            raise no_table(tree)
        _check_keys(tree, cls.model_fields, [key for key, field in cls.model_fields.items() if field.is_required()])
        return tree

    def numbers(self) -> dict[str, Number]:
        """The numbers of this table with mark and source, by key; those that the file leaves out are not there."""
        values = ((key, getattr(self, key)) for key in type(self).model_fields)
        return {key: value for key, value in values if isinstance(value, Number)}


T = TypeVar("T", bound=Table)


def read_tree(path: Path) -> dict[str, Any]:
    """What tomllib makes of the file at `path`.

    Raises:
        UserError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("cannot be read", cure=f"look at the file: {error.strerror}", field=str(path)) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, no TOML, endless digits or brackets
        raise UserError(f"is no TOML: {error}", cure="correct it there", field=str(path)) from error


def read_file(kind: type[T], path: Path) -> T:
    """The file at `path`, checked against its schema.

    Raises:
        UserError: it cannot be read, is no TOML, or the first thing that is wrong in it.
    """
    tree = read_tree(path)
    sources = tree.get("sources", {})
    try:
        listed = _SourcesAlone.model_validate({"sources": sources}).sources
        dated = {key: f"{source.text} ({source.date})" for key, source in listed.items()}
        return kind.model_validate(tree, context=dated)
    except ValidationError as error:
        raise _told(path, error.errors()[0]) from None


def _told(path: Path, item: Any) -> UserError:
    """The first problem of a file, with where it is: the union of two kinds of table has their tags in the way."""
    said = item["ctx"]
    keys = [str(part) for part in (*item["loc"], said["below"]) if part != "" and not str(part).startswith(KIND)]
    field = f"{path.name}: {'.'.join(keys)}"
    cure = said["cure"].replace("[TABLE]", f"[{'.'.join(keys)}]")
    value = said.get("value", _ABSENT)
    if value is _ABSENT or (isinstance(value, dict | list) and len(repr(value)) > _LONG):
        return UserError(said["problem"], cure=cure, field=field)
    return UserError(said["problem"], cure=cure, field=field, value=value)


def no_table(value: Any, below: str = "") -> PydanticCustomError:
    """The error where a table should stand; `read_file` puts its name in."""
    return refusal("is no table", "write [TABLE] with its keys below", value, below=below)


def _check_keys(tree: Mapping[str, Any], known: Mapping[str, Any], required: Sequence[str]) -> None:
    for key in required:
        if key not in tree:
            close = difflib.get_close_matches(key, [k for k in tree if k not in known], n=1, cutoff=0.5)
            hint = f" ({close[0]} is no known key: its name or unit is another)" if close else ""
            unit = "" if unit_of(key) == "count" else f" in {unit_of(key)}"
            raise refusal("is missing", f"add it{unit}{hint}", below=key)
    for key in tree:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            cure = f"did you mean {close[0]}?" if close else f"take it out; known: {', '.join(sorted(known))}"
            raise refusal("is no known key", cure, tree[key], below=key)


def text_of(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refusal("is no text", "write it in quotes", value)
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MANY:
        raise refusal("is no count", f"write a whole number from 1 to {MANY:,}", value)
    return value


@dataclass(frozen=True)
class _Marked:
    """What a table of value, mark, source and date says; the source is its text with the date."""

    value: Any
    mark: Mark
    source: str


_MARKED = dict.fromkeys(("value", "mark", "source", "date"))


def _marked(table: Any, info: ValidationInfo) -> _Marked:
    if not isinstance(table, dict):
        raise refusal("says not how it is known", f"write {_SHAPE}", table)
    _check_keys(table, _MARKED, ("value", "mark", "source"))
    for key in ("mark", "source", "date"):
        if key in table and not isinstance(table[key], str):
            raise refusal("is no text", "write it in quotes", table[key], below=key)
    mark, source = table["mark"], table["source"]
    if mark not in get_args(Mark):
        raise refusal("is no mark", f"write {_SHAPE}", mark, below="mark")
    if date := table.get("date"):
        source = f"{source} ({date})"
    elif source in (sources := cast(dict[str, str], info.context)):
        source = sources[source]
    else:
        known = ", ".join(sorted(sources)) or "none"
        cure = f'add date = "YYYY-MM", or name one of [sources]: {known}'
        raise refusal("has no date and is not in [sources]", cure, source, below="source")
    return _Marked(table["value"], cast(Mark, mark), source)


def _plausible(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal("is no number", "write it as a number", value)
    unit = unit_of(key)
    least, most = _OWN.get(key) or _RANGES.get(unit, (-1e18, 1e18))
    if not least <= value <= most:
        raise refusal(f"cannot be right in {unit}", f"give it in {unit}: between {least:g} and {most:g}", value)
    return float(value)


def _number(table: Any, info: ValidationInfo) -> Number:
    key, marked = str(info.field_name), _marked(table, info)
    return Number(_plausible(key, marked.value), unit_of(key), marked.mark, marked.source)


def ratios_of(tree: Any, info: ValidationInfo) -> dict[str, float]:
    """Ratios by kernel: ``rms_norm_forward_ratio`` is that of ``rms_norm_forward``."""
    if not isinstance(tree, dict):
        raise no_table(tree)
    found = {}
    for key, table in tree.items():
        try:
            found[key.removesuffix("_ratio")] = _plausible(key, _marked(table, info).value)
        except PydanticCustomError as error:
            said = dict(error.context or {})
            below = ".".join(part for part in (key, said.pop("below")) if part)
            raise PydanticCustomError("refused", "refused", {**said, "below": below}) from None
    return found


def _numbers(table: Any, info: ValidationInfo) -> tuple[float, ...]:
    values = _marked(table, info).value
    if not isinstance(values, list) or not values:
        raise refusal("is no list", "write value = [.., ..]", values)
    return tuple(_plausible(str(info.field_name), value) for value in values)


def _axis(table: Any, info: ValidationInfo) -> tuple[float, ...]:
    values = _numbers(table, info)
    if values[0] <= 0 or any(after <= before for before, after in pairwise(values)):
        raise refusal("does not ascend from above 0", "sort it, with each value once", list(values))
    return values


def _line(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) < 2:
        raise refusal("is too short to draw a line", "give 2 values at least", list(values))
    return values


def _whole_axis(table: Any, info: ValidationInfo) -> tuple[int, ...]:
    values = _axis(table, info)
    if any(value != int(value) for value in values):
        raise refusal("are no whole numbers", "count them", list(values))
    return tuple(int(value) for value in values)


@dataclass(frozen=True)
class Grid:
    """Rows of numbers of the same length under one mark and source."""

    rows: tuple[tuple[float, ...], ...]
    mark: Mark
    source: str


def grid_of(table: Any, info: ValidationInfo) -> Grid:
    """Rows of numbers, all of the same length."""
    marked = _marked(table, info)
    rows = marked.value
    is_rows = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_rows or len({len(row) for row in rows}) > 1:
        cure = "write value = [[.., ..], [.., ..]], every row as long as the others"
        raise refusal("is no list of equal rows", cure, rows)
    checked = tuple(tuple(_plausible(str(info.field_name), value) for value in row) for row in rows)
    return Grid(checked, marked.mark, marked.source)


def check_size(key: str, grid: Grid, height: int, width: int, of: str) -> None:
    """Refuse a grid with more or fewer rows or columns than its axes have; `of` says what there is a row for."""
    if (len(grid.rows), len(grid.rows[0])) != (height, width):
        cure = f"write {height} rows of {width}: a row for each of {of}"
        raise refusal("does not fit its axes", cure, below=key)


Text = Annotated[str, PlainValidator(text_of)]
Count = Annotated[int, PlainValidator(_count)]
Measured = Annotated[Number, PlainValidator(_number)]
Numbers = Annotated[tuple[float, ...], PlainValidator(_numbers)]
Axis = Annotated[tuple[float, ...], PlainValidator(_axis)]
Line = Annotated[tuple[float, ...], PlainValidator(_axis), AfterValidator(_line)]
WholeAxis = Annotated[tuple[int, ...], PlainValidator(_whole_axis)]
Rows = Annotated[Grid, PlainValidator(grid_of)]


class SourceText(Table):
    """What ``source = "id"`` stands for."""

    text: Text
    date: Text


def _tables(tree: Any) -> Any:
    if not isinstance(tree, dict):
        raise no_table(tree)
    return tree


SourceTexts = Annotated[dict[str, SourceText], BeforeValidator(_tables)]


class _SourcesAlone(Table):
    sources: SourceTexts
