"""The files that describe hardware: TOML whose numbers say how they are known, as pydantic schemas.

Each number has value, mark, source and date, and is checked against its unit, which is the ending of its key: gigabytes
or microseconds are refused with the file, the key and the cure. `phalanx.simulate` reads its fabrics with `Table` too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from phalanx.core.config import read_toml
from phalanx.core.errors import UserError
from phalanx.plan.types import Format, Mark, Number, Tile

MANY = 10_000_000  # more cores or devices are none

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

# Seconds of one kernel, launch or message. More than one of them is a number of microseconds in a key of seconds.
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
KIND = "kind:"  # begins the tags of a union of tables; tags are not part of where something is
_LONG = 80  # characters of a value that a message shows
_ABSENT: Any = object()
_SHAPE = '{ value = .., mark = "measured|derived|assumed", source = ".." }'


def unit_of(key: str) -> str:
    """The unit that the ending of `key` names; ``count`` where it names none."""
    # Longer endings stand first there: `_flops_per_s` would fit `_s` too.
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
    """A table of a file: a missing key is reported before an unknown one, which may be the same misspelt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            raise no_table(tree)
        # Before pydantic does, which would report all of them together, in its own words.
        _check_keys(tree, cls.model_fields, [key for key, field in cls.model_fields.items() if field.is_required()])
        return tree

    def numbers(self) -> dict[str, Number]:
        """The numbers of this table with mark and source, by key; those that the file leaves out are not there."""
        values = ((key, getattr(self, key)) for key in type(self).model_fields)
        return {key: value for key, value in values if isinstance(value, Number)}


T = TypeVar("T", bound=Table)


def read_file(kind: type[T], path: Path) -> T:
    """The file at `path`, checked against its schema."""
    tree = read_toml(path)
    sources = tree.get("sources", {})
    try:
        # Sources come first: numbers name them, and a validator of a number sees nothing of the file but its own table.
        listed = _SourcesAlone.model_validate({"sources": sources}).sources
        dated = {key: f"{source.text} ({source.date})" for key, source in listed.items()}
        return kind.model_validate(tree, context=dated)
    except ValidationError as error:
        # One at a time: a misspelt table makes all that it should hold wrong too.
        raise _first_problem(path, error.errors()[0]) from None


def _first_problem(path: Path, item: Any) -> UserError:
    """The first problem of a file, with where it is: the union of two kinds of table has their tags in the way."""
    context = item["ctx"]
    keys = [str(part) for part in (*item["loc"], context["below"]) if part != "" and not str(part).startswith(KIND)]
    field = f"{path.name}: {'.'.join(keys)}"
    cure = context["cure"].replace("[TABLE]", f"[{'.'.join(keys)}]")
    value = context.get("value", _ABSENT)
    if value is _ABSENT or (isinstance(value, dict | list) and len(repr(value)) > _LONG):
        return UserError(context["problem"], cure=cure, field=field)
    return UserError(context["problem"], cure=cure, field=field, value=value)


def no_table(value: Any, below: str = "") -> PydanticCustomError:
    """The error where a table should stand; `read_file` puts its name in."""
    return refusal("is no table", "write [TABLE] with its keys below", value, below=below)


def _check_keys(tree: Mapping[str, Any], known: Mapping[str, Any], required: Sequence[str]) -> None:
    for key in required:
        if key not in tree:
            # The unit is part of the name, so a rate in GB/s shows up as a missing key and an unknown one that is like
            # it.
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


_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")


def _date_of(value: Any, *, below: str = "") -> str:
    if not _DATE.fullmatch(text_of(value)):
        raise refusal("is no date", 'write it as "YYYY-MM", such as "2026-11"', value, below=below)
    return str(value)


def _count(value: Any) -> int:
    # To Python true is the number 1.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MANY:
        raise refusal("is no count", f"write a whole number from 1 to {MANY:,}", value)
    return value


@dataclass(frozen=True)
class _Marked:
    """A table of value, mark, source and date; the source is its text with the date."""

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
    # A number without a date cannot be looked up again; it has its own, or that of a source of [sources].
    if "date" in table:
        source = f"{source} ({_date_of(table['date'], below='date')})"
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
        # pydantic knows where `ratios` is, not the key in it.
        except PydanticCustomError as error:
            context = dict(error.context or {})
            below = ".".join(part for part in (key, context.pop("below")) if part)
            raise PydanticCustomError("refused", "refused", {**context, "below": below}) from None
    return found


def _numbers(table: Any, info: ValidationInfo) -> tuple[float, ...]:
    values = _marked(table, info).value
    if not isinstance(values, list) or not values:
        raise refusal("is no list", "write value = [.., ..]", values)
    return tuple(_plausible(str(info.field_name), value) for value in values)


def _axis(table: Any, info: ValidationInfo) -> tuple[float, ...]:
    values = _numbers(table, info)
    # Numbers between the points are interpolated, along logarithms too.
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
    """Refuse a grid with more or fewer rows or columns than its axes have; `of`: what each row is for."""
    if (len(grid.rows), len(grid.rows[0])) != (height, width):
        cure = f"write {height} rows of {width}: a row for each of {of}"
        raise refusal("does not fit its axes", cure, below=key)


# Plain validators take the place of pydantic's own, whose errors name neither the unit nor a cure.
Text = Annotated[str, PlainValidator(text_of)]
Count = Annotated[int, PlainValidator(_count)]
Measured = Annotated[Number, PlainValidator(_number)]
Numbers = Annotated[tuple[float, ...], PlainValidator(_numbers)]
Axis = Annotated[tuple[float, ...], PlainValidator(_axis)]
Line = Annotated[tuple[float, ...], PlainValidator(_axis), AfterValidator(_line)]
WholeAxis = Annotated[tuple[int, ...], PlainValidator(_whole_axis)]
Rows = Annotated[Grid, PlainValidator(grid_of)]


class _SourceText(Table):
    text: Text
    date: Annotated[str, PlainValidator(_date_of)]


def _tables(tree: Any) -> Any:
    if not isinstance(tree, dict):
        raise no_table(tree)
    return tree


SourceTexts = Annotated[dict[str, _SourceText], BeforeValidator(_tables)]


class _SourcesAlone(Table):
    sources: SourceTexts


def _tiles(grid: Grid) -> Grid:
    if len(grid.rows[0]) != len(fields(Tile)):
        cure = f"write rows of {', '.join(part.name for part in fields(Tile))}"
        raise refusal("is no list of tiles", cure)
    for row in grid.rows:
        tile = Tile(*row)
        # What the model divides by is 1 or more, or above 0.
        sizes = tile.rows >= 1 and tile.columns >= 1 and tile.splits >= 1 and tile.start_columns >= 0
        if not sizes or not 0 < tile.share <= 1:
            cure = "give rows, columns and splits of 1 or more, a share above 0 and up to 1, and start_columns from 0"
            raise refusal("is no tile", cure, list(row))
    return grid


def _kind(value: Any) -> str:
    if text_of(value) not in ("gpu", "cpu"):
        raise refusal("is no kind of device", 'write "gpu" or "cpu"', value)
    return str(value)


def _formats(tree: Any) -> Any:
    if not isinstance(tree, dict):
        raise no_table(tree)
    for key in tree:
        if key not in get_args(Format):
            raise refusal("is no format of numbers", "write half (bf16 and fp16) or fp32", below=key)
    return tree


def _device(value: Any) -> str | dict[int, str]:
    """The device's file: one, or several by how many devices of a host are in use, where those share its cores."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise no_table(value)
    # Keys of TOML are text, numbers too.
    if not value or not all(key.isdecimal() and int(key) > 0 for key in value):
        cure = 'write device = "NAME", or device = { 1 = "NAME", 2 = "NAME" } by devices in use on a host'
        raise refusal("names no device", cure)
    for key, name in value.items():
        if not isinstance(name, str):
            raise refusal("is no text", "write it in quotes", name, below=key)
    return {int(key): name for key, name in value.items()}


class TileTable(Table):
    """Matrix products as tiles over a device's cores; see `TileGemm`."""

    tiles: Annotated[Grid, PlainValidator(grid_of), AfterValidator(_tiles)]
    cores: Count
    split_ratio: Measured
    memory_ratio: Measured
    softness: Measured
    launch_s: Measured
    clock_slower_ratio: Measured
    clock_from_s: Measured
    clock_to_s: Measured
    correction_waves: Line | None = None
    correction_columns: Line | None = None
    correction_ratio: Rows | None = None
    weight_gradient_ratio: Measured

    @model_validator(mode="after")
    def _fits(self) -> TileTable:
        # The clock falls from one time to the other, so the second is later.
        if self.clock_from_s.value >= self.clock_to_s.value:
            cure = f"give more than clock_from_s, {self.clock_from_s.value:g}"
            raise refusal("is no later than it begins", cure, self.clock_to_s.value, below="clock_to_s")
        if self.correction_ratio is not None:
            if self.correction_waves is None or self.correction_columns is None:
                missing = "correction_waves" if self.correction_waves is None else "correction_columns"
                raise refusal("is missing", "add it", below=missing)
            size = len(self.correction_waves), len(self.correction_columns)
            check_size("correction_ratio", self.correction_ratio, *size, "correction_waves")
        return self


class RateTable(Table):
    """Matrix products measured size by size; see `TableGemm`."""

    tokens: Axis
    widths: Axis
    product_flops_per_s: Rows
    weight_gradient_flops_per_s: Rows

    @model_validator(mode="after")
    def _fits(self) -> RateTable:
        for key in ("product_flops_per_s", "weight_gradient_flops_per_s"):
            # A row for each pair of tokens and width of the input, a column for each width of the output.
            height = len(self.tokens) * len(self.widths)
            check_size(key, getattr(self, key), height, len(self.widths), "tokens and of widths")
        return self


def _gemm_tag(tree: Any) -> str:
    # Without a tag pydantic would try both kinds and report the errors of both.
    return KIND + "rates" if isinstance(tree, dict) and "widths" in tree else KIND + "tiles"


GemmTable = Annotated[
    Annotated[TileTable, Tag(KIND + "tiles")] | Annotated[RateTable, Tag(KIND + "rates")], Discriminator(_gemm_tag)
]


class AttentionTable(Table):
    """Rates of fused attention, measured over the number of queries and the width of a head."""

    queries: Axis
    head_dims: WholeAxis
    forward_flops_per_s: Rows
    backward_flops_per_s: Rows

    @model_validator(mode="after")
    def _fits(self) -> AttentionTable:
        for key in ("forward_flops_per_s", "backward_flops_per_s"):
            check_size(key, getattr(self, key), len(self.head_dims), len(self.queries), "head_dims")
        return self


class StreamTable(Table):
    """Kernels that only move bytes: a rate, or rates over the bytes of a kernel, and ratios of single kernels."""

    bytes_per_s: Measured
    kernel_bytes: Axis | None = None
    achieved_bytes_per_s: Numbers | None = None
    ratios: Annotated[dict[str, float], PlainValidator(ratios_of)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> StreamTable:
        if self.kernel_bytes is None:
            return self
        # Either both lists or neither: a rate alone has no size that it was measured at.
        if self.achieved_bytes_per_s is None:
            raise refusal("is missing", "add it in bytes_per_s", below="achieved_bytes_per_s")
        if len(self.achieved_bytes_per_s) != len(self.kernel_bytes):
            cure = f"give {len(self.kernel_bytes)} rates, one for each of kernel_bytes"
            raise refusal("does not fit its axis", cure, below="achieved_bytes_per_s")
        return self


class DeviceFile(Table):
    """A file of ``devices/``."""

    memory_bytes: Measured
    memory_bytes_per_s: Measured
    peak_half_flops_per_s: Measured
    peak_fp32_flops_per_s: Measured
    kernel_gap_s: Measured
    host_launch_s: Measured
    kernel_s: Measured
    host_compiled_launch_s: Measured | None = None
    kind: Annotated[Literal["gpu", "cpu"], PlainValidator(_kind)]
    gemm: Annotated[dict[Format, GemmTable], BeforeValidator(_formats)]
    attention: Annotated[dict[Format, AttentionTable], BeforeValidator(_formats)]
    stream: StreamTable
    sources: SourceTexts = Field(default_factory=dict)


class GroupTable(Table):
    """Times of a collective inside a host, over the bytes of a message and the number of ranks."""

    message_bytes: Line
    ranks: WholeAxis
    time_s: Rows

    @model_validator(mode="after")
    def _fits(self) -> GroupTable:
        check_size("time_s", self.time_s, len(self.ranks), len(self.message_bytes), "ranks")
        return self


class LinksFile(Table):
    """A file of ``links/``."""

    send_latency_s: Measured
    send_bytes_per_s: Measured
    all_reduce: GroupTable
    all_gather: GroupTable
    reduce_scatter: GroupTable
    all_to_all: GroupTable
    sources: SourceTexts = Field(default_factory=dict)


class ProtocolTable(Table):
    """Protocols of a ring or a tree between hosts, one number for each in every list."""

    start_s: Numbers
    hop_s: Numbers
    inside_hop_s: Numbers
    share_ratio: Numbers

    @model_validator(mode="after")
    def _fits(self) -> ProtocolTable:
        # NCCL's protocols (such as LL, LL128 and Simple) are one number in each list.
        if len({len(column) for column in (self.start_s, self.hop_s, self.inside_hop_s, self.share_ratio)}) > 1:
            raise refusal("lists differ in length", "write one number for each protocol")
        return self


class NetworkTable(Table):
    """The network between hosts."""

    nic_bytes_per_s: Measured
    achieved_ratio: Measured
    latency_s: Measured
    ring: ProtocolTable | None = None
    tree: ProtocolTable | None = None


class _Stragglers(Table):
    rank_sigma_ratio: Measured
    slow_host_share_ratio: Measured
    slow_host_excess_ratio: Measured


class _Loader(Table):
    step_s: Measured
    copy_bytes_per_s: Measured
    in_step_s: Measured | None = None  # what a program loses that makes each batch before its step


class _StartUp(Table):
    process_s: Measured
    groups_s: Measured
    read_bytes_per_s: Measured


class _Price(Table):
    usd_per_device_hour: Measured


class ClusterFile(Table):
    """A file of ``clusters/``."""

    devices: Count
    devices_per_host: Count
    device: Annotated[str | dict[int, str], PlainValidator(_device)]
    nics_per_host: Count
    network: NetworkTable
    stragglers: _Stragglers
    loader: _Loader
    start_up: _StartUp
    price: _Price
    efficiency_ratio: Measured | None = None
    links: Text
    sources: SourceTexts = Field(default_factory=dict)
