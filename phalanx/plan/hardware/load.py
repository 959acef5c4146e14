"""Loads devices and clusters by the name of a file that comes with Phalanx, or by the path of a user's own."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, GroupCurves, HostLinks, Network, Protocol
from phalanx.plan.hardware.device import Clock, Device, Format, FusedAttention, Stream, TableGemm, Tile, TileGemm
from phalanx.plan.hardware.formula import LogCurve, LogGrid
from phalanx.plan.hardware.schema import (
    AttentionTable,
    ClusterFile,
    DeviceFile,
    GroupTable,
    LinksFile,
    NetworkTable,
    ProtocolTable,
    RateTable,
    TileTable,
)
from phalanx.plan.measured_numbers import MANY, read_file
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
