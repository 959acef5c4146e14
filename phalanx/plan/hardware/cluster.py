"""Hosts with devices and a network between them: how long messages and collectives take.

Inside a host, collectives follow measured curves over size (`HostLinks`); between hosts they are rings or trees, in the
protocol that suits the size of the message (`Network`). `load_cluster` and `load_device` read TOML files: those that
come with Phalanx by their name, a user's own by their path.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.core.errors import UserError
from phalanx.plan.hardware.device_model import (
    Clock,
    Device,
    FusedAttention,
    LogCurve,
    LogGrid,
    Stream,
    TableGemm,
    TileGemm,
    number_of,
)
from phalanx.plan.hardware.hardware_files import (
    MANY,
    AttentionTable,
    ClusterFile,
    DeviceFile,
    GroupTable,
    LinksFile,
    NetworkTable,
    ProtocolTable,
    RateTable,
    TileTable,
    read_file,
)
from phalanx.plan.types import Format, Functions, Mark, Number, Tile, functions, weakest


@dataclass(frozen=True)
class Cluster:
    """Equal hosts on one network; ranks are numbered through host after host."""

    name: str
    device: Device
    devices: int
    devices_per_host: int
    nics_per_host: int
    links: HostLinks
    network: Network
    numbers: Mapping[str, Number]  # plain numbers of its file, by dotted key, such as ``network.nic_bytes_per_s``

    @property
    def hosts(self) -> int:
        """Hosts that its devices fill."""
        return -(-self.devices // self.devices_per_host)

    @property
    def device_bytes_per_s(self) -> float:
        """What each device can send to other hosts while all of its host do, one way, as achieved."""
        return self.network.device_bytes_per_s

    def members_per_host(self, ranks: Any, stride: Any = 1) -> Any:
        """How many of a group of `ranks` neighbours at distance `stride` share a host."""
        f = functions(ranks, stride)
        # Ranks are numbered through host after host: a group whose stride is a whole host has one member on each.
        return f.least(ranks, f.largest(self.devices_per_host // stride, 1))

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Any:
        """Time of a collective.

        Args:
            num_bytes: of the whole message on one rank: gathered, or not yet reduced.
            stride: distance between neighbours of the group, in ranks.
        """
        # Where a group spans hosts, its parts inside and between them run side by side: the slower one is waited for.
        f = functions(num_bytes, ranks, stride)
        inside = self.members_per_host(ranks, stride)
        inside_s = self.links.collective_s(kind, num_bytes, inside)
        between_s = self.network.collective_s(kind, num_bytes, ranks, inside)
        return f.where(inside >= ranks, inside_s, f.largest(inside_s, between_s))

    def send_s(self, num_bytes: Any, stride: Any = 1) -> Any:
        """Time to send `num_bytes` from every rank r to rank r + `stride`."""
        f = functions(num_bytes, stride)
        return f.where(stride < self.devices_per_host, self.links.send_s(num_bytes), self.network.send_s(num_bytes))

    def number(self, key: str) -> Number:
        """A plain number of its file."""
        return number_of(self.numbers, key, "a cluster")

    def value(self, key: str) -> float:
        """The bare value of `number`."""
        return self.number(key).value

    def mark_of(self, what: str) -> tuple[Mark, str]:
        """How far a kind of collective inside a host, or a plain number, can be trusted, and why."""
        if what in self.links.curves:
            return self.links.curves[what].mark, self.links.curves[what].source
        return self.number(what).mark, self.number(what).source


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class GroupCurves:
    """Times of one kind of collective over the bytes of the whole message, for each measured size of group."""

    ranks: tuple[int, ...]
    seconds: tuple[LogCurve, ...]
    mark: Mark
    source: str

    def at(self, num_bytes: Any, ranks: Any) -> Any:
        """Time for a group of `ranks`: as the next larger measured group, or the largest."""
        if isinstance(num_bytes, np.ndarray) or isinstance(ranks, np.ndarray):
            return self._at_arrays(np.asarray(num_bytes, float), np.asarray(ranks))
        if ranks <= 1:
            return 0.0
        # The next larger measured group: its time is at least that of this one.
        for count, curve in zip(self.ranks, self.seconds, strict=True):
            if ranks <= count:
                return curve.at(num_bytes)
        return self.seconds[-1].at(num_bytes)

    def _at_arrays(self, num_bytes: Any, ranks: Any) -> Any:
        # From the largest group downwards, so that for each number the smallest that is large enough is written last.
        found = self.seconds[-1].at(num_bytes)
        for count, curve in reversed(list(zip(self.ranks, self.seconds, strict=True))[:-1]):
            found = np.where(ranks <= count, curve.at(num_bytes), found)
        return np.where(ranks <= 1, 0.0, found)


@dataclass(frozen=True)
class HostLinks:
    """What connects the devices of a host."""

    name: str
    curves: Mapping[str, GroupCurves]  # one for each kind of collective; broadcast takes that of the all-gather
    numbers: Mapping[str, Number]  # ``send_latency_s`` and ``send_bytes_per_s`` between two devices

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any) -> Any:
        """Time of a collective of a whole message of `num_bytes` among `ranks` devices of the host."""
        return self.curves[kind].at(num_bytes, ranks)

    def send_s(self, num_bytes: Any) -> Any:
        """Time to send `num_bytes` from one device to another."""
        return self.numbers["send_latency_s"].value + num_bytes / self.numbers["send_bytes_per_s"].value


_PASSES: Mapping[str, float] = {
    # How often the whole message passes each member's link in a ring, times (n - 1)/n.
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "broadcast": 1.0,
}


@dataclass(frozen=True)
class Protocol:
    """One way to move a message: quick steps with part of the bandwidth, or slow ones with all of it."""

    start_s: float  # before the first step
    hop_s: float  # of a step to another host
    inside_hop_s: float  # of a step within a host
    share: float  # of the achieved bandwidth


@dataclass(frozen=True)
class Network:
    """What connects hosts, as a library of collectives uses it."""

    device_bytes_per_s: float  # what each device sends to other hosts while all of its host do, one way, as achieved
    latency_s: float
    rings: tuple[Protocol, ...]  # for every collective
    trees: tuple[Protocol, ...]  # for all-reduce, which then takes steps by the logarithm of the number of hosts

    def send_s(self, num_bytes: Any) -> Any:
        """Time to send `num_bytes` from every device of a host to another host."""
        return self.latency_s + num_bytes / self.device_bytes_per_s

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any, inside: Any) -> Any:
        """Time of a collective among `ranks` devices, `inside` of which share each host, on the network alone.

        Each member that a host has in the group uses its own share of the host's adapters, so a ring's message is
        divided among them; what all send to all is not.
        """
        if kind == "all_to_all":
            # The last protocol is the one for long messages, with all of the bandwidth. Only what goes to other hosts
            # counts here.
            start_s = self.rings[-1].start_s + self.latency_s
            return start_s + num_bytes * (ranks - inside) / ranks / self.device_bytes_per_s
        f = functions(num_bytes, ranks, inside)
        rate, hosts = inside * self.device_bytes_per_s, ranks / inside
        # The library takes whichever is fastest at this size: quick protocols for short messages, trees for many hosts.
        passes = _PASSES[kind]
        ring_s = passes * (ranks - 1) / ranks * num_bytes / rate
        hops, inside_hops = passes * f.largest(hosts - 1, 0.0), passes * (ranks - hosts)
        times = [_protocol_s(ring, ring_s, hops, inside_hops) for ring in self.rings]
        if kind == "all_reduce" and self.trees:
            # Up the tree and down again; inside a host NCCL's trees are chains.
            hops, inside_hops = 2 * self._levels(f, hosts), 2 * (inside - 1)
            times += [_protocol_s(tree, 2 * num_bytes / rate, hops, inside_hops) for tree in self.trees]
        return f.least(*times) if len(times) > 1 else times[0]

    @staticmethod
    def _levels(f: Functions, hosts: Any) -> Any:
        # The natural logarithm of 2; levels are not rounded, so that the time grows smoothly with the number of hosts.
        return f.log(f.largest(hosts, 1.0)) / 0.6931471805599453


def _protocol_s(protocol: Protocol, bytes_s: Any, hops: Any, inside_hops: Any) -> Any:
    steps_s = hops * protocol.hop_s + inside_hops * protocol.inside_hop_s
    return protocol.start_s + steps_s + bytes_s / protocol.share


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
    """The device of that name, or of that file."""
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
    """The cluster of that name, or of that file."""
    path = _find("clusters", str(name_or_path), Path(), "--cluster")
    file = read_file(ClusterFile, path)
    count = file.devices if devices is None else devices
    # Where devices share the cores of a host, times depend on how many of them are in use there.
    used = _device_name(file.device, min(count, file.devices_per_host))
    device = load_device(_find("devices", used, path.parent, f"{path.name}: device"))
    links = _find("links", file.links, path.parent, f"{path.name}: links")
    parts = ("network", "stragglers", "loader", "start_up", "price")
    numbers = {f"{part}.{key}": number for part in parts for key, number in getattr(file, part).numbers().items()}
    cluster = Cluster(
        name=path.stem,
        device=device,
        devices=count,
        devices_per_host=file.devices_per_host,
        nics_per_host=file.nics_per_host,
        links=_links(links.name, read_file(LinksFile, links)),
        network=_network(file.network, file.nics_per_host / file.devices_per_host),
        numbers={**numbers, **file.numbers()},
    )
    _check_devices(cluster)
    return cluster


# Part of NVIDIA's name of a GPU -> cluster of hosts with such GPUs; the first that is found counts.
_GPUS = {"A100-SXM4-80GB": "selene", "H100 80GB HBM3": "h100_400g", "H200": "h200_400g"}


def known_cluster(environ: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """The cluster that a run on this machine is predicted for; None where nothing is known of it.

    ``HOST.toml`` in this folder, as `phalanx plan calibrate` writes it, or in ``$XDG_CACHE_HOME/phalanx/clusters``
    (by host, because many may share a folder); else by the first GPU.
    """
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/") / ".cache")
    name = f"{socket.gethostname()}.toml"
    for path in (Path(name), Path(base) / "phalanx" / "clusters" / name):
        if path.is_file():
            return str(path)
    # The driver's own file: asking the GPU would take its memory and a second.
    information = next((path.read_text() for path in sorted(driver.glob("*/information"))), "")
    model = next((line.partition(":")[2] for line in information.splitlines() if line.startswith("Model:")), "")
    return next((cluster for gpu, cluster in _GPUS.items() if gpu in model), None)


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
    if isinstance(names, str):
        return names
    # The file for the next larger number of devices in use: they share the cores of the host.
    counts = sorted(names)
    return names[next((count for count in counts if count >= used), counts[-1])]


def _gemm(file: DeviceFile, form: Format, table: TileTable | RateTable) -> TileGemm | TableGemm:
    if isinstance(table, RateTable):
        products, gradients = table.product_flops_per_s, table.weight_gradient_flops_per_s
        mark = weakest([products.mark, gradients.mark])
        axes = (table.tokens, table.widths, table.widths)
        return TableGemm(LogGrid(axes, products.rows), LogGrid(axes, gradients.rows), mark, products.source)
    peak = file.peak_half_flops_per_s if form == "half" else file.peak_fp32_flops_per_s
    correction = None
    if table.correction_ratio is not None:
        assert table.correction_waves is not None and table.correction_columns is not None
        correction = LogGrid((table.correction_waves, table.correction_columns), table.correction_ratio.rows)
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


def _network(table: NetworkTable, nics_per_device: float) -> Network:
    latency_s = table.latency_s.value
    rings, trees = (_protocols(protocols) for protocols in (table.ring, table.tree))
    achieved = table.nic_bytes_per_s.value * table.achieved_ratio.value
    # Without measured protocols one ring step costs the latency, and all of the achieved bandwidth is used.
    return Network(nics_per_device * achieved, latency_s, rings or (Protocol(0.0, latency_s, 0.0, 1.0),), trees)


def _protocols(table: ProtocolTable | None) -> tuple[Protocol, ...]:
    if table is None:
        return ()
    columns = (table.start_s, table.hop_s, table.inside_hop_s, table.share_ratio)
    return tuple(Protocol(*each) for each in zip(*columns, strict=True))
