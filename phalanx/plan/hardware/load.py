"""Devices and clusters by the name of a file that comes with Phalanx, or by the path of one's own."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import cast

from phalanx.core.errors import UserError
from phalanx.plan.hardware.attention import FusedAttention
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device import Device, Format
from phalanx.plan.hardware.either import LogCurve, LogGrid
from phalanx.plan.hardware.gemm import Clock, Tile, TileGemm
from phalanx.plan.hardware.links import GroupCurves, HostLinks
from phalanx.plan.hardware.network import Network, Protocol
from phalanx.plan.hardware.stream import Stream
from phalanx.plan.hardware.table_gemm import TableGemm
from phalanx.plan.hardware.toml_section import Section, read
from phalanx.plan.types import Number, weakest

_HERE = Path(__file__).parent
_DEVICE_NUMBERS = (
    "memory_bytes",
    "memory_bytes_per_s",
    "peak_half_flops_per_s",
    "peak_fp32_flops_per_s",
    "kernel_gap_s",
    "host_launch_s",
    "kernel_s",
)


def device_names() -> tuple[str, ...]:
    """Devices that come with Phalanx."""
    return tuple(sorted(path.stem for path in (_HERE / "devices").glob("*.toml")))


def cluster_names() -> tuple[str, ...]:
    """Clusters that come with Phalanx."""
    return tuple(sorted(path.stem for path in (_HERE / "clusters").glob("*.toml")))


def load_device(name_or_path: str | Path) -> Device:
    """The device of that name, or of that file.

    Raises:
        UserError: there is none, or a key of its file is unknown, missing, or cannot be right in its unit.
    """
    path = _find("devices", str(name_or_path), Path())
    file = read(path)
    file.expect(*_DEVICE_NUMBERS, "kind", "gemm", "attention", "stream", "sources")
    numbers = {key: file.number(key) for key in _DEVICE_NUMBERS}
    kind = file.text("kind")
    if kind not in ("gpu", "cpu"):
        raise UserError("is no kind of device", cure='write "gpu" or "cpu"', field=file.where("kind"), value=kind)
    device = Device(
        name=path.stem,
        kind=kind,  # type: ignore[arg-type]
        numbers=numbers,
        gemms={form: _gemm(file, form, numbers) for form in _formats(file, "gemm")},
        attentions={form: _attention(file, form, numbers) for form in _formats(file, "attention")},
        stream=_stream(file.sub("stream"), numbers),
    )
    file.done()
    return device


def load_cluster(name_or_path: str | Path, devices: int | None = None) -> Cluster:
    """The cluster of that name, or of that file.

    Args:
        devices: how many of its devices; as many as its file says where it is None.

    Raises:
        UserError: there is none, its file is refused as by `load_device`, or `devices` do not fill whole hosts.
    """
    path = _find("clusters", str(name_or_path), Path())
    file = read(path)
    count = _whole(file, "devices") if devices is None else devices
    per_host = _whole(file, "devices_per_host")
    device = load_device(_find("devices", _device_name(file, min(count, per_host)), path.parent))
    nics, numbers = _whole(file, "nics_per_host"), _cluster_numbers(file)
    cluster = Cluster(
        name=path.stem,
        device=device,
        devices=count,
        devices_per_host=per_host,
        nics_per_host=nics,
        links=_links(read(_find("links", file.text("links"), path.parent))),
        network=_network(file.sub("network"), nics / per_host, numbers),
        numbers=numbers,
    )
    file.raw("devices")
    file.done()
    _check_devices(cluster)
    return cluster


def _device_name(file: Section, used: int) -> str:
    """The device's file: one, or several by how many devices of a host are in use, where those share its cores; then
    the one for as many, or for the next larger number."""
    if isinstance(file.raw("device"), str):
        return file.text("device")
    table = file.sub("device")
    counts = sorted(int(key) for key in table.tree if key.isdigit())
    if not counts or len(counts) < len(table.tree):
        cure = 'write device = "NAME", or device = { 1 = "NAME", 2 = "NAME" } by devices in use on a host'
        raise UserError("names no device", cure=cure, field=table.where())
    return table.text(str(next((count for count in counts if count >= used), counts[-1])))


def _find(folder: str, name: str, beside: Path) -> Path:
    if name.endswith(".toml"):
        return beside / name
    path = _HERE / folder / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(found.stem for found in (_HERE / folder).glob("*.toml")))
        cure = f"take one of {known}, or the path of a .toml file"
        raise UserError(f"is none of the {folder} that come with Phalanx", cure=cure, value=name)
    return path


def _formats(file: Section, what: str) -> tuple[Format, ...]:
    table = file.sub(what)
    for key in table.tree:
        if key not in ("half", "fp32"):
            cure = "write half (bf16 and fp16) or fp32"
            raise UserError("is no format of numbers", cure=cure, field=table.where(key))
    return cast(tuple[Format, ...], tuple(table.tree))


def _gemm(file: Section, form: Format, numbers: dict[str, Number]) -> TileGemm | TableGemm:
    table = file.sub("gemm").sub(form)
    if table.has("widths"):
        return _table_gemm(table)
    tiles, mark, source = table.rows("tiles")
    if len(tiles[0]) != len(fields(Tile)):
        cure = f"write rows of {', '.join(part.name for part in fields(Tile))}"
        raise UserError("is no list of tiles", cure=cure, field=table.where("tiles"))
    gemm = TileGemm(
        peak_flops_per_s=numbers[f"peak_{form}_flops_per_s"].value,
        memory_bytes_per_s=numbers["memory_bytes_per_s"].value,
        element_bytes=2 if form == "half" else 4,
        cores=_whole(table, "cores"),
        tiles=tuple(Tile(*row) for row in tiles),
        split_ratio=table.number("split_ratio").value,
        memory_ratio=table.number("memory_ratio").value,
        softness=table.number("softness").value,
        launch_s=table.number("launch_s").value,
        clock=Clock(*(table.number(key).value for key in ("clock_slower_ratio", "clock_from_s", "clock_to_s"))),
        correction=_correction(table),
        weight_gradient_ratio=table.number("weight_gradient_ratio").value,
        mark=weakest([mark]),
        source=source,
    )
    table.done()
    return gemm


def _correction(table: Section) -> LogGrid | None:
    if not table.has("correction_ratio"):
        return None
    waves, _, _ = table.numbers("correction_waves")
    columns, _, _ = table.numbers("correction_columns")
    ratios, _, _ = table.rows("correction_ratio")
    if (len(ratios), len(ratios[0])) != (len(waves), len(columns)):
        cure = f"write {len(waves)} rows of {len(columns)}: a row for each of correction_waves"
        raise UserError("does not fit its axes", cure=cure, field=table.where("correction_ratio"))
    return LogGrid(waves, columns, ratios)


def _table_gemm(table: Section) -> TableGemm:
    tokens, _, _ = table.numbers("tokens")
    widths, _, _ = table.numbers("widths")
    products, mark, source = table.rows("product_flops_per_s")
    gradients, gradient_mark, _ = table.rows("weight_gradient_flops_per_s")
    for key, rows in (("product_flops_per_s", products), ("weight_gradient_flops_per_s", gradients)):
        if (len(rows), len(rows[0])) != (len(tokens) * len(widths), len(widths)):
            cure = f"write {len(tokens) * len(widths)} rows of {len(widths)}: a row for each of tokens and of widths"
            raise UserError("does not fit tokens and widths", cure=cure, field=table.where(key))
    table.done()
    return TableGemm(tokens, widths, products, gradients, weakest([mark, gradient_mark]), source)


def _attention(file: Section, form: Format, numbers: dict[str, Number]) -> FusedAttention:
    table = file.sub("attention").sub(form)
    queries, _, _ = table.numbers("queries")
    head_dims, _, _ = table.numbers("head_dims")
    forward, mark, source = table.rows("forward_flops_per_s")
    backward, backward_mark, backward_source = table.rows("backward_flops_per_s")
    attention = FusedAttention(
        head_dims=tuple(int(size) for size in head_dims),
        forward=tuple(LogCurve(queries, row) for row in forward),
        backward=tuple(LogCurve(queries, row) for row in backward),
        launch_s=numbers["kernel_s"].value,
        mark=weakest([mark, backward_mark]),
        source="; ".join(dict.fromkeys((source, backward_source))),
    )
    table.done()
    return attention


def _stream(table: Section, numbers: dict[str, Number]) -> Stream:
    rate = table.number("bytes_per_s")
    rates = None
    if table.has("kernel_bytes"):
        sizes, _, _ = table.numbers("kernel_bytes")
        achieved, _, _ = table.numbers("achieved_bytes_per_s")
        rates = LogCurve(sizes, achieved)
    ratios = _ratios(table.sub("ratios")) if table.has("ratios") else {}
    table.done()
    return Stream(rate.value, numbers["kernel_s"].value, rate.mark, rate.source, rates, ratios)


def _ratios(table: Section) -> dict[str, float]:
    """Ratios by kernel: ``rms_norm_forward_ratio`` is that of ``rms_norm_forward``."""
    found = {key.removesuffix("_ratio"): table.number(key).value for key in table.tree}
    table.done()
    return found


def _links(file: Section) -> HostLinks:
    numbers = {key: file.number(key) for key in ("send_latency_s", "send_bytes_per_s")}
    curves = {
        kind: _group_curves(file.sub(kind)) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    file.done()
    return HostLinks(file.file, {**curves, "broadcast": curves["all_gather"]}, numbers)


def _group_curves(table: Section) -> GroupCurves:
    sizes, _, _ = table.numbers("message_bytes")
    ranks, _, _ = table.numbers("ranks")
    rows, mark, source = table.rows("time_s")
    table.done()
    curves = tuple(LogCurve(sizes, row, grows=True) for row in rows)
    return GroupCurves(tuple(int(count) for count in ranks), curves, mark, source)


_CLUSTER_NUMBERS = {
    "network": ("nic_bytes_per_s", "achieved_ratio", "latency_s"),
    "stragglers": ("rank_sigma_ratio", "slow_host_share_ratio", "slow_host_excess_ratio"),
    "loader": ("step_s", "copy_bytes_per_s"),
    "start_up": ("process_s", "groups_s", "read_bytes_per_s"),
    "price": ("usd_per_device_hour",),
}


def _cluster_numbers(file: Section) -> dict[str, Number]:
    numbers = {}
    for part, keys in _CLUSTER_NUMBERS.items():
        table = file.sub(part)
        table.expect(*keys)
        numbers.update({f"{part}.{key}": table.number(key) for key in keys})
        if part != "network":  # it holds protocols besides
            table.done()
    return numbers


def _network(table: Section, nics_per_device: float, numbers: dict[str, Number]) -> Network:
    latency_s = numbers["network.latency_s"].value
    for key in _CLUSTER_NUMBERS["network"]:
        table.raw(key)
    rings, trees = (_protocols(table.sub(key)) if table.has(key) else () for key in ("ring", "tree"))
    table.done()
    achieved = numbers["network.nic_bytes_per_s"].value * numbers["network.achieved_ratio"].value
    return Network(nics_per_device * achieved, latency_s, rings or (Protocol(0.0, latency_s, 0.0, 1.0),), trees)


def _protocols(table: Section) -> tuple[Protocol, ...]:
    columns = [table.numbers(key)[0] for key in ("start_s", "hop_s", "inside_hop_s", "share_ratio")]
    if len({len(column) for column in columns}) > 1:
        raise UserError("lists differ in length", cure="write one number for each protocol", field=table.where())
    table.done()
    return tuple(Protocol(*each) for each in zip(*columns, strict=True))


def _whole(table: Section, key: str) -> int:
    value = table.raw(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError("is no count", cure="write a whole number, 1 or more", field=table.where(key), value=value)
    return value


def _check_devices(cluster: Cluster) -> None:
    per_host = cluster.devices_per_host
    if cluster.devices < 1 or (cluster.devices > per_host and cluster.devices % per_host):
        cure = f"take a multiple of {per_host}, the devices of a host, or fewer than a host has"
        raise UserError("devices do not fill whole hosts", cure=cure, field="devices", value=cluster.devices)
