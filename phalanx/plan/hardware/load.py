"""Reads devices, links and clusters from TOML: files that come with Phalanx, or a user's own by their path.

In these files every number says how it is known: value, mark, source and date. `Section` reads one table a key at a
time, checks each number against its unit, and refuses keys that nothing asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster, GroupCurves, HostLinks, Network, Protocol
from phalanx.plan.hardware.device import Clock, Device, Format, FusedAttention, Stream, TableGemm, Tile, TileGemm
from phalanx.plan.hardware.formula import LogCurve, LogGrid
from phalanx.plan.toml_tree import read_tree
from phalanx.plan.types import Mark, Number, weakest

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
_DEVICE_EXTRAS = ("host_compiled_launch_s",)
"""Numbers that a device's file may leave out."""


EFFICIENCY = "efficiency_ratio"
"""Share of the predicted speed that steps on a cluster reach, which its file may say (`phalanx.plan.overheads`)."""

_MANY = 10_000_000
"""More cores or devices are none."""


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
    path = _find("devices", str(name_or_path), Path(), "device")
    file = read(path)
    file.expect(*_DEVICE_NUMBERS, *_DEVICE_EXTRAS, "kind", "gemm", "attention", "stream", "sources")
    extras = [key for key in _DEVICE_EXTRAS if file.has(key)]
    numbers = {key: file.number(key) for key in (*_DEVICE_NUMBERS, *extras)}
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
    path = _find("clusters", str(name_or_path), Path(), "--cluster")
    file = read(path)
    given, per_host = _whole(file, "devices"), _whole(file, "devices_per_host")
    count = given if devices is None else devices
    device = load_device(_find("devices", _device_name(file, min(count, per_host)), path.parent, file.where("device")))
    nics, numbers = _whole(file, "nics_per_host"), _cluster_numbers(file)
    if file.has(EFFICIENCY):
        numbers[EFFICIENCY] = file.number(EFFICIENCY)
    cluster = Cluster(
        name=path.stem,
        device=device,
        devices=count,
        devices_per_host=per_host,
        nics_per_host=nics,
        links=_links(read(_find("links", file.text("links"), path.parent, file.where("links")))),
        network=_network(file.sub("network"), nics / per_host, numbers),
        numbers=numbers,
    )
    file.done()
    _check_devices(cluster)
    return cluster


def _device_name(file: Section, used: int) -> str:
    """The device's file: one, or several by how many devices of a host are in use, where those share its cores; then
    the one for as many, or for the next larger number."""
    if isinstance(file.raw("device"), str):
        return file.text("device")
    table = file.sub("device")
    counts = sorted(int(key) for key in table.tree if key.isdecimal() and int(key) > 0)
    if not counts or len(counts) < len(table.tree):
        cure = 'write device = "NAME", or device = { 1 = "NAME", 2 = "NAME" } by devices in use on a host'
        raise UserError("names no device", cure=cure, field=table.where())
    return table.text(str(next((count for count in counts if count >= used), counts[-1])))


def _find(folder: str, name: str, beside: Path, field: str) -> Path:
    if name.endswith(".toml"):
        return beside / name
    known = sorted(found.stem for found in (_HERE / folder).glob("*.toml"))
    if name not in known:
        cure = f"take one of {', '.join(known)}, or the path of a .toml file"
        raise UserError(f"is none of the {folder} that come with Phalanx", cure=cure, field=field, value=name)
    return _HERE / folder / f"{name}.toml"


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
    tiles, mark, source = _tiles(table)
    gemm = TileGemm(
        peak_flops_per_s=numbers[f"peak_{form}_flops_per_s"].value,
        memory_bytes_per_s=numbers["memory_bytes_per_s"].value,
        element_bytes=2 if form == "half" else 4,
        cores=_whole(table, "cores"),
        tiles=tiles,
        split_ratio=table.number("split_ratio").value,
        memory_ratio=table.number("memory_ratio").value,
        softness=table.number("softness").value,
        launch_s=table.number("launch_s").value,
        clock=_clock(table),
        correction=_correction(table),
        weight_gradient_ratio=table.number("weight_gradient_ratio").value,
        mark=weakest([mark]),
        source=source,
    )
    table.done()
    return gemm


def _tiles(table: Section) -> tuple[tuple[Tile, ...], Mark, str]:
    rows, mark, source = table.rows("tiles")
    if len(rows[0]) != len(fields(Tile)):
        cure = f"write rows of {', '.join(part.name for part in fields(Tile))}"
        raise UserError("is no list of tiles", cure=cure, field=table.where("tiles"))
    tiles = tuple(Tile(*row) for row in rows)
    for tile, row in zip(tiles, rows, strict=True):
        sizes = tile.rows >= 1 and tile.columns >= 1 and tile.splits >= 1 and tile.start_columns >= 0
        if not sizes or not 0 < tile.share <= 1:
            cure = "give rows, columns and splits of 1 or more, a share above 0 and up to 1, and start_columns from 0"
            raise table.refusal("is no tile", cure, "tiles", list(row))
    return tiles, mark, source


def _clock(table: Section) -> Clock:
    clock = Clock(*(table.number(key).value for key in ("clock_slower_ratio", "clock_from_s", "clock_to_s")))
    if clock.from_s >= clock.to_s:
        cure = f"give more than clock_from_s, {clock.from_s:g}"
        raise UserError("is no later than it begins", cure=cure, field=table.where("clock_to_s"), value=clock.to_s)
    return clock


def _correction(table: Section) -> LogGrid | None:
    if not table.has("correction_ratio"):
        return None
    waves, columns = table.axis("correction_waves", least=2), table.axis("correction_columns", least=2)
    ratios, _, _ = table.grid("correction_ratio", len(waves), len(columns), "correction_waves")
    return LogGrid(waves, columns, ratios)


def _table_gemm(table: Section) -> TableGemm:
    tokens, widths = table.axis("tokens"), table.axis("widths")
    size = len(tokens) * len(widths), len(widths)
    products, mark, source = table.grid("product_flops_per_s", *size, "tokens and of widths")
    gradients, gradient_mark, _ = table.grid("weight_gradient_flops_per_s", *size, "tokens and of widths")
    table.done()
    return TableGemm(tokens, widths, products, gradients, weakest([mark, gradient_mark]), source)


def _attention(file: Section, form: Format, numbers: dict[str, Number]) -> FusedAttention:
    table = file.sub("attention").sub(form)
    queries, head_dims = table.axis("queries"), table.counts("head_dims")
    size = len(head_dims), len(queries)
    forward, mark, source = table.grid("forward_flops_per_s", *size, "head_dims")
    backward, backward_mark, backward_source = table.grid("backward_flops_per_s", *size, "head_dims")
    attention = FusedAttention(
        head_dims=head_dims,
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
        sizes = table.axis("kernel_bytes")
        achieved, _, _ = table.numbers("achieved_bytes_per_s")
        if len(achieved) != len(sizes):
            cure = f"give {len(sizes)} rates, one for each of kernel_bytes"
            raise UserError("does not fit its axis", cure=cure, field=table.where("achieved_bytes_per_s"))
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
    sizes, ranks = table.axis("message_bytes", least=2), table.counts("ranks")
    rows, mark, source = table.grid("time_s", len(ranks), len(sizes), "ranks")
    table.done()
    curves = tuple(LogCurve(sizes, row, grows=True) for row in rows)
    return GroupCurves(ranks, curves, mark, source)


_CLUSTER_NUMBERS = {
    "network": ("nic_bytes_per_s", "achieved_ratio", "latency_s"),
    "stragglers": ("rank_sigma_ratio", "slow_host_share_ratio", "slow_host_excess_ratio"),
    "loader": ("step_s", "copy_bytes_per_s"),
    "start_up": ("process_s", "groups_s", "read_bytes_per_s"),
    "price": ("usd_per_device_hour",),
}
_CLUSTER_EXTRAS = {"loader": ("in_step_s",)}
"""Numbers that a cluster's file may leave out: what a program loses that makes each batch before its step."""


def _cluster_numbers(file: Section) -> dict[str, Number]:
    numbers = {}
    for part, keys in _CLUSTER_NUMBERS.items():
        table = file.sub(part)
        extras = _CLUSTER_EXTRAS.get(part, ())
        table.expect(*keys, *extras)
        given = (*keys, *(key for key in extras if table.has(key)))
        numbers.update({f"{part}.{key}": table.number(key) for key in given})
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
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MANY:
        raise table.refusal("is no count", f"write a whole number from 1 to {_MANY:,}", key, value)
    return value


def _check_devices(cluster: Cluster) -> None:
    per_host = cluster.devices_per_host
    too_many = cluster.devices > _MANY
    if too_many or cluster.devices < 1 or (cluster.devices > per_host and cluster.devices % per_host):
        cure = f"take a multiple of {per_host}, the devices of a host, or fewer than a host has; {_MANY:,} at most"
        raise UserError("devices do not fill whole hosts", cure=cure, field="devices", value=cluster.devices)


_RANGES: Mapping[str, tuple[float, float]] = {
    # The longest ending that a key has says its unit, and between which values a number of that unit makes sense:
    # someone who writes gigabytes or microseconds falls out of it.
    "flops_per_s": (1e7, 1e18),
    "bytes_per_s": (1e5, 1e15),
    "flops": (1, 1e18),
    "bytes": (1, 1e18),
    "usd_per_device_hour": (0, 1e4),
    "s": (0, 1e5),
    "ratio": (0, 100),
}

_AT_ONCE = (0, 1.0)
_OWN: Mapping[str, tuple[float, float]] = {
    # Where a unit in general allows what cannot be right for this key, or cannot be computed with.
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


_LONG = 80  # characters of a value that a message shows


def unit_of(key: str) -> str:
    """The unit that the ending of `key` names; ``count`` where it names none."""
    for unit in _RANGES:
        if key == unit or key.endswith("_" + unit):
            return unit
    return "count"


@dataclass
class Section:
    """One table of a file.

    Attributes:
        tree: the keys, as tomllib read them.
        path: where the table stands, such as ``gemm.bf16``; empty for the whole file.
        sources: what ``source = "id"`` stands for: text with date.
    """

    file: str
    tree: Mapping[str, Any]
    path: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)

    def where(self, key: str = "") -> str:
        """File and dotted key, for messages."""
        return f"{self.file}: {'.'.join(part for part in (self.path, key) if part)}"

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return key in self.tree

    def expect(self, *keys: str) -> None:
        """Say which keys will be asked for, so that one that is missing is not confused with them."""
        self._asked.update(keys)

    def raw(self, key: str) -> Any:
        """The value of `key`, unchecked.

        Raises:
            UserError: it is missing.
        """
        self._asked.add(key)
        if key not in self.tree:
            raise UserError("is missing", cure=self._cure_missing(key), field=self.where(key))
        return self.tree[key]

    def text(self, key: str) -> str:
        """A string.

        Raises:
            UserError: it is missing or none.
        """
        value = self.raw(key)
        if not isinstance(value, str):
            raise self.refusal("is no text", "write it in quotes", key, value)
        return value

    def sub(self, key: str) -> Section:
        """The table under `key`.

        Raises:
            UserError: it is missing or no table.
        """
        value = self.raw(key)
        if not isinstance(value, dict):
            cure = f"write [{'.'.join(part for part in (self.path, key) if part)}] with its keys below"
            raise self.refusal("is no table", cure, key, value)
        path = f"{self.path}.{key}" if self.path else key
        return Section(self.file, value, path, self.sources)

    def number(self, key: str) -> Number:
        """A number with mark, source and date; its unit is the ending of its key.

        Raises:
            UserError: it is missing, has no mark, source or date, or cannot be right in its unit.
        """
        value, mark, source = self._marked(key)
        return Number(self._plausible(key, value), unit_of(key), mark, source)

    def numbers(self, key: str) -> tuple[tuple[float, ...], Mark, str]:
        """A list of numbers under one mark and source.

        Raises:
            UserError: as `number` does, or it is no list.
        """
        values, mark, source = self._marked(key)
        if not isinstance(values, list) or not values:
            raise self.refusal("is no list", "write value = [.., ..]", key, values)
        return tuple(self._plausible(key, value) for value in values), mark, source

    def axis(self, key: str, least: int = 1) -> tuple[float, ...]:
        """Sizes that something was measured at: a list of `least` numbers or more, above 0 and ascending.

        Raises:
            UserError: as `numbers` does, or they are not.
        """
        values, _, _ = self.numbers(key)
        if values[0] <= 0 or any(after <= before for before, after in pairwise(values)):
            raise self.refusal("does not ascend from above 0", "sort it, with each value once", key, list(values))
        if len(values) < least:
            raise self.refusal("is too short to draw a line", f"give {least} values at least", key, list(values))
        return values

    def counts(self, key: str) -> tuple[int, ...]:
        """An axis of whole numbers.

        Raises:
            UserError: as `axis` does, or they are none.
        """
        values = self.axis(key)
        if any(value != int(value) for value in values):
            raise self.refusal("are no whole numbers", "count them", key, list(values))
        return tuple(int(value) for value in values)

    def rows(self, key: str) -> tuple[tuple[tuple[float, ...], ...], Mark, str]:
        """Rows of numbers of the same length under one mark and source.

        Raises:
            UserError: as `number` does, or rows differ in length.
        """
        values, mark, source = self._marked(key)
        is_rows = isinstance(values, list) and values and all(isinstance(row, list) and row for row in values)
        if not is_rows or len({len(row) for row in values}) > 1:
            cure = "write value = [[.., ..], [.., ..]], every row as long as the others"
            raise self.refusal("is no list of equal rows", cure, key, values)
        return tuple(tuple(self._plausible(key, value) for value in row) for row in values), mark, source

    def grid(self, key: str, height: int, width: int, of: str) -> tuple[tuple[tuple[float, ...], ...], Mark, str]:
        """Rows as `rows` has them, of which there are as many as the axes say that they were measured over.

        Args:
            of: what there is a row for, in words.

        Raises:
            UserError: as `rows` does, or there are more or fewer.
        """
        rows, mark, source = self.rows(key)
        if (len(rows), len(rows[0])) != (height, width):
            cure = f"write {height} rows of {width}: a row for each of {of}"
            raise UserError("does not fit its axes", cure=cure, field=self.where(key))
        return rows, mark, source

    def done(self) -> None:
        """Refuse keys that nothing asked for.

        Raises:
            UserError: there is one.
        """
        for key in self.tree:
            if key not in self._asked:
                close = difflib.get_close_matches(key, self._asked, n=1, cutoff=0.5)
                cure = f"did you mean {close[0]}?" if close else f"take it out; known: {', '.join(sorted(self._asked))}"
                raise self.refusal("is no known key", cure, key, self.tree[key])

    def refusal(self, problem: str, cure: str, key: str, value: object) -> UserError:
        """The error for what stands under `key`; tables and long lists are not printed."""
        if isinstance(value, dict | list) and len(repr(value)) > _LONG:
            return UserError(problem, cure=cure, field=self.where(key))
        return UserError(problem, cure=cure, field=self.where(key), value=value)

    def _cure_missing(self, key: str) -> str:
        close = difflib.get_close_matches(key, [k for k in self.tree if k not in self._asked], n=1, cutoff=0.5)
        hint = f" ({close[0]} is no known key: its name or unit is another)" if close else ""
        return f"add it in {unit_of(key)}{hint}" if unit_of(key) != "count" else f"add it{hint}"

    def _marked(self, key: str) -> tuple[Any, Mark, str]:
        table = self.raw(key)
        shape = '{ value = .., mark = "measured|derived|assumed", source = ".." }'
        if not isinstance(table, dict):
            raise self.refusal("says not how it is known", f"write {shape}", key, table)
        inner = self.sub(key)
        value, mark, source = inner.raw("value"), inner.text("mark"), inner.text("source")
        date = inner.text("date") if inner.has("date") else ""
        inner.done()
        if mark not in get_args(Mark):
            raise UserError("is no mark", cure=f"write {shape}", field=inner.where("mark"), value=mark)
        return value, cast(Mark, mark), self._dated(inner, source, date)

    def _dated(self, inner: Section, source: str, date: str) -> str:
        if date:
            return f"{source} ({date})"
        if source in self.sources:
            return self.sources[source]
        known = ", ".join(sorted(self.sources)) or "none"
        cure = f'add date = "YYYY-MM", or name one of [sources]: {known}'
        raise UserError("has no date and is not in [sources]", cure=cure, field=inner.where("source"), value=source)

    def _plausible(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal("is no number", "write it as a number", key, value)
        unit = unit_of(key)
        least, most = _OWN.get(key) or _RANGES.get(unit, (-1e18, 1e18))
        if not least <= value <= most:
            cure = f"give it in {unit}: between {least:g} and {most:g}"
            raise self.refusal(f"cannot be right in {unit}", cure, key, value)
        return float(value)


def read(path: Path) -> Section:
    """The whole file at `path`, its sources read.

    Raises:
        UserError: it cannot be read, is no TOML, or a source has no date.
    """
    top = Section(path.name, read_tree(path))
    if top.has("sources"):
        listed = top.sub("sources")
        for key in listed.tree:
            source = listed.sub(key)
            top.sources = {**top.sources, key: f"{source.text('text')} ({source.text('date')})"}
            source.done()
    return top
