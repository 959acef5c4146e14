"""Devices, links and clusters from TOML files: those that come with Phalanx by their name, a user's own by their path.

The schemas of the files are pydantic classes, in the second half; the first turns them into `Device` and `Cluster`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PlainValidator, Tag, model_validator

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, GroupCurves, HostLinks, Network, Protocol
from phalanx.plan.hardware.device_model import Clock, Device, Format, FusedAttention, Stream, TableGemm, Tile, TileGemm
from phalanx.plan.hardware.formula import LogCurve, LogGrid
from phalanx.plan.measured_numbers import (
    KIND,
    MANY,
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
    read_file,
    refusal,
    text_of,
)
from phalanx.plan.types import Number, weakest

_HERE = Path(__file__).parent

EFFICIENCY = "efficiency_ratio"
"""Share of the predicted speed that steps on a cluster reach, which its file may say (`phalanx.plan.overheads`)."""


def device_names() -> tuple[str, ...]:
    """Devices that come with Phalanx."""
    return _names("devices")


def cluster_names() -> tuple[str, ...]:
    """Clusters that come with Phalanx."""
    return _names("clusters")


def load_device(name_or_path: str | Path) -> Device:
    """The device of that name, or of that file.

    Raises:
        UserError: there is none, or a key of its file is unknown, missing, or cannot be right in its unit.
    """
    path = _find("devices", str(name_or_path), Path(), "device")
    file = read_file(DeviceFile, path)
    return Device(
        name=path.stem,
        kind=file.kind,
        numbers=file.numbers(),
        gemms={form: _gemm(file, form, table) for form, table in file.gemm.items()},
        attentions={form: _attention(file, table) for form, table in file.attention.items()},
        stream=_stream(file),
    )


def load_cluster(name_or_path: str | Path, devices: int | None = None) -> Cluster:
    """The cluster of that name, or of that file.

    Args:
        devices: how many of its devices; as many as its file says where it is None.

    Raises:
        UserError: there is none, its file is refused as by `load_device`, or `devices` do not fill whole hosts.
    """
    path = _find("clusters", str(name_or_path), Path(), "--cluster")
    file = read_file(ClusterFile, path)
    count = file.devices if devices is None else devices
    used = _device_name(file.device, min(count, file.devices_per_host))
    device = load_device(_find("devices", used, path.parent, f"{path.name}: device"))
    links = _find("links", file.links, path.parent, f"{path.name}: links")
    cluster = Cluster(
        name=path.stem,
        device=device,
        devices=count,
        devices_per_host=file.devices_per_host,
        nics_per_host=file.nics_per_host,
        links=_links(links.name, read_file(LinksFile, links)),
        network=_network(file.network, file.nics_per_host / file.devices_per_host),
        numbers=_cluster_numbers(file),
    )
    _check_devices(cluster)
    return cluster


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_HERE / folder).glob("*.toml")))


def _find(folder: str, name: str, beside: Path, field: str) -> Path:
    if name.endswith(".toml"):
        return beside / name
    if name not in (known := _names(folder)):
        cure = f"take one of {', '.join(known)}, or the path of a .toml file"
        raise UserError(f"is none of the {folder} that come with Phalanx", cure=cure, field=field, value=name)
    return _HERE / folder / f"{name}.toml"


def _check_devices(cluster: Cluster) -> None:
    per_host = cluster.devices_per_host
    too_many = cluster.devices > MANY
    if too_many or cluster.devices < 1 or (cluster.devices > per_host and cluster.devices % per_host):
        cure = f"take a multiple of {per_host}, the devices of a host, or fewer than a host has; {MANY:,} at most"
        raise UserError("devices do not fill whole hosts", cure=cure, field="devices", value=cluster.devices)


def _device_name(names: str | dict[int, str], used: int) -> str:
    """The file for as many devices in use, or for the next larger number."""
    if isinstance(names, str):
        return names
    counts = sorted(names)
    return names[next((count for count in counts if count >= used), counts[-1])]


def _gemm(file: DeviceFile, form: Format, table: TileTable | RateTable) -> TileGemm | TableGemm:
    if isinstance(table, RateTable):
        products, gradients = table.product_flops_per_s, table.weight_gradient_flops_per_s
        mark = weakest([products.mark, gradients.mark])
        return TableGemm(table.tokens, table.widths, products.rows, gradients.rows, mark, products.source)
    peak = file.peak_half_flops_per_s if form == "half" else file.peak_fp32_flops_per_s
    correction = None
    if table.correction_ratio is not None:
        assert table.correction_waves is not None and table.correction_columns is not None
        correction = LogGrid(table.correction_waves, table.correction_columns, table.correction_ratio.rows)
    return TileGemm(
        peak_flops_per_s=peak.value,
        memory_bytes_per_s=file.memory_bytes_per_s.value,
        element_bytes=2 if form == "half" else 4,
        cores=table.cores,
        tiles=tuple(Tile(*row) for row in table.tiles.rows),
        split_ratio=table.split_ratio.value,
        memory_ratio=table.memory_ratio.value,
        softness=table.softness.value,
        launch_s=table.launch_s.value,
        clock=Clock(table.clock_slower_ratio.value, table.clock_from_s.value, table.clock_to_s.value),
        correction=correction,
        weight_gradient_ratio=table.weight_gradient_ratio.value,
        mark=table.tiles.mark,
        source=table.tiles.source,
    )


def _attention(file: DeviceFile, table: AttentionTable) -> FusedAttention:
    forward, backward = table.forward_flops_per_s, table.backward_flops_per_s
    return FusedAttention(
        head_dims=table.head_dims,
        forward=tuple(LogCurve(table.queries, row) for row in forward.rows),
        backward=tuple(LogCurve(table.queries, row) for row in backward.rows),
        launch_s=file.kernel_s.value,
        mark=weakest([forward.mark, backward.mark]),
        source="; ".join(dict.fromkeys((forward.source, backward.source))),
    )


def _stream(file: DeviceFile) -> Stream:
    table, rates = file.stream, None
    if table.kernel_bytes is not None and table.achieved_bytes_per_s is not None:
        rates = LogCurve(table.kernel_bytes, table.achieved_bytes_per_s)
    rate = table.bytes_per_s
    return Stream(rate.value, file.kernel_s.value, rate.mark, rate.source, rates, table.ratios)


def _links(name: str, file: LinksFile) -> HostLinks:
    curves = {
        kind: _curves(getattr(file, kind)) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    return HostLinks(name, {**curves, "broadcast": curves["all_gather"]}, file.numbers())


def _curves(table: GroupTable) -> GroupCurves:
    curves = tuple(LogCurve(table.message_bytes, row, grows=True) for row in table.time_s.rows)
    return GroupCurves(table.ranks, curves, table.time_s.mark, table.time_s.source)


def _cluster_numbers(file: ClusterFile) -> dict[str, Number]:
    parts = ("network", "stragglers", "loader", "start_up", "price")
    numbers = {f"{part}.{key}": number for part in parts for key, number in getattr(file, part).numbers().items()}
    return {**numbers, **file.numbers()}


def _network(table: NetworkTable, nics_per_device: float) -> Network:
    latency_s = table.latency_s.value
    rings, trees = (_protocols(protocols) for protocols in (table.ring, table.tree))
    achieved = table.nic_bytes_per_s.value * table.achieved_ratio.value
    return Network(nics_per_device * achieved, latency_s, rings or (Protocol(0.0, latency_s, 0.0, 1.0),), trees)


def _protocols(table: ProtocolTable | None) -> tuple[Protocol, ...]:
    if table is None:
        return ()
    columns = (table.start_s, table.hop_s, table.inside_hop_s, table.share_ratio)
    return tuple(Protocol(*each) for each in zip(*columns, strict=True))


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
