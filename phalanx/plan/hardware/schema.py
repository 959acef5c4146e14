"""The schemas of hardware files: devices, links and clusters in TOML, as pydantic classes."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from phalanx.plan.hardware.device import Format, Tile
from phalanx.plan.measured_numbers import (
    KIND,
    Axis,
    Count,
    Grid,
    Line,
    Measured,
    Numbers,
    Rows,
    SourceTexts,
    Table,
    Text,
    WholeAxis,
    check_size,
    grid_of,
    no_table,
    ratios_of,
    refusal,
    text_of,
)


def _tiles(grid: Grid) -> Grid:
    if len(grid.rows[0]) != len(fields(Tile)):
        cure = f"write rows of {', '.join(part.name for part in fields(Tile))}"
        raise refusal("is no list of tiles", cure)
    for row in grid.rows:
        tile = Tile(*row)
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
            height = len(self.tokens) * len(self.widths)
            check_size(key, getattr(self, key), height, len(self.widths), "tokens and of widths")
        return self


def _gemm_tag(tree: Any) -> str:
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


class StragglersTable(Table):
    """How far ranks and hosts differ."""

    rank_sigma_ratio: Measured
    slow_host_share_ratio: Measured
    slow_host_excess_ratio: Measured


class LoaderTable(Table):
    """Making batches; `in_step_s` is what a program loses that makes each batch before its step."""

    step_s: Measured
    copy_bytes_per_s: Measured
    in_step_s: Measured | None = None


class StartUpTable(Table):
    """From the start command to the first step."""

    process_s: Measured
    groups_s: Measured
    read_bytes_per_s: Measured


class PriceTable(Table):
    """What a device costs."""

    usd_per_device_hour: Measured


class ClusterFile(Table):
    """A file of ``clusters/``."""

    devices: Count
    devices_per_host: Count
    device: Annotated[str | dict[int, str], PlainValidator(_device)]
    nics_per_host: Count
    network: NetworkTable
    stragglers: StragglersTable
    loader: LoaderTable
    start_up: StartUpTable
    price: PriceTable
    efficiency_ratio: Measured | None = None
    links: Text
    sources: SourceTexts = Field(default_factory=dict)
