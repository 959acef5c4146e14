"""The network of a cluster from its file: fabric, switches, congestion control, timers; each number has a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.toml_section import Section, read
from phalanx.plan.network.congestion.settings import Dcqcn, Ecn, Pfc, Settings, Swift
from phalanx.plan.network.fabric import Fabric
from phalanx.plan.network.flaps import Retransmit
from phalanx.plan.types import Number

_FABRICS = Path(__file__).parent / "fabrics"
_DEFAULT = "default.toml"
_TABLES: Mapping[str, tuple[str, ...]] = {
    "fabric": (
        "port_bytes_per_s",
        "uplink_split",
        "tor_oversubscription_ratio",
        "aggregation_oversubscription_ratio",
        "hop_latency_s",
        "buffer_bytes",
        "queue_pairs",
        "mtu_bytes",
    ),
    "pfc": ("threshold_ratio", "resume_ratio"),
    "ecn": ("low_s", "high_s", "mark_ratio"),
    "dcqcn": (
        "gain_ratio",
        "notification_s",
        "alpha_timer_s",
        "increase_timer_s",
        "increase_counter_bytes",
        "fast_recovery",
        "increase_ratio",
    ),
    "swift": (
        "base_target_s",
        "hop_target_s",
        "increase",
        "decrease_ratio",
        "largest_decrease_ratio",
        "flow_range_s",
        "flow_low",
        "flow_high",
    ),
    "retransmit": ("timeout_exponent", "retries", "adaptive_first_s", "reroute_s"),
}


@dataclass(frozen=True)
class Network:
    """A cluster's network as its file has it.

    Attributes:
        described: whether a file describes this cluster's fabric; else it is the default one.
        devices_per_host: ranks on each host.
        latency_s: of one message between hosts, without queues.
        numbers: each with mark and source, by dotted key.
    """

    name: str
    described: bool
    fabric: Fabric
    settings: Settings
    retransmit: Retransmit
    queue_pairs: int
    reroute_s: float
    devices: int
    devices_per_host: int
    latency_s: float
    numbers: Mapping[str, Number]


def network_of(cluster: Cluster, fabric_file: Path | None = None) -> Network:
    """The network that connects a cluster's hosts: of `fabric_file`, of the file of its name, or the default one.

    Raises:
        UserError: a number is missing or cannot be, or the fabric has no room for so many hosts.
    """
    file = fabric_file or _named(cluster.name)
    shape, numbers = _read(file)
    numbers = {**numbers, **{key: cluster.number(key) for key in ("network.nic_bytes_per_s", "network.achieved_ratio")}}
    values = {key: number.value for key, number in numbers.items()}
    fabric = _fabric(cluster, shape, values)
    return Network(
        name=cluster.name,
        described=file.name != _DEFAULT,
        fabric=fabric,
        settings=_congestion(values, fabric),
        retransmit=Retransmit(
            int(values["retransmit.timeout_exponent"]),
            int(values["retransmit.retries"]),
            adaptive_first_s=values["retransmit.adaptive_first_s"],
        ),
        queue_pairs=int(values["fabric.queue_pairs"]),
        reroute_s=values["retransmit.reroute_s"],
        devices=cluster.devices,
        devices_per_host=cluster.devices_per_host,
        latency_s=cluster.value("network.latency_s"),
        numbers=numbers,
    )


def _named(name: str) -> Path:
    path = _FABRICS / f"{name}.toml"
    return path if path.exists() else _FABRICS / _DEFAULT


def _read(path: Path) -> tuple[dict[str, int], dict[str, Number]]:
    """Shape and numbers of a file; what it leaves out is as in default.toml."""
    default = read(_FABRICS / _DEFAULT)
    given = read(path)
    shape = {key: _whole(given if given.has(key) else default, key) for key in ("layers", "radix", "rail_optimised")}
    numbers = {}
    for table, keys in _TABLES.items():
        own = given.sub(table) if given.has(table) else None
        for key in keys:
            section = own if own is not None and own.has(key) else default.sub(table)
            numbers[f"{table}.{key}"] = section.number(key)
        if own is not None:
            own.done()
    given.done()
    return shape, numbers


def _whole(section: Section, key: str) -> int:
    value = section.raw(key)
    if not isinstance(value, int):
        cure = "write true or false" if key == "rail_optimised" else "write a whole number"
        raise UserError("is no such value", cure=cure, field=section.where(key), value=value)
    return value


def _fabric(cluster: Cluster, shape: Mapping[str, int], values: Mapping[str, float]) -> Fabric:
    """Rates are what payload reaches; several NICs of one device count as one."""
    achieved = values["network.achieved_ratio"]
    nics = min(cluster.nics_per_host, cluster.devices_per_host)
    return Fabric(
        hosts=cluster.hosts,
        nics_per_host=nics,
        nic_bytes_per_s=values["network.nic_bytes_per_s"] * achieved * cluster.nics_per_host / nics,
        port_bytes_per_s=values["fabric.port_bytes_per_s"] * achieved,
        radix=shape["radix"],
        layers=shape["layers"],  # type: ignore[arg-type]
        rail_optimised=bool(shape["rail_optimised"]),
        uplink_split=int(values["fabric.uplink_split"]),
        tor_oversubscription=values["fabric.tor_oversubscription_ratio"],
        aggregation_oversubscription=values["fabric.aggregation_oversubscription_ratio"],
        hop_latency_s=values["fabric.hop_latency_s"],
    )


def _congestion(values: Mapping[str, float], fabric: Fabric) -> Settings:
    switches = 2 * fabric.layers - 1

    def of(table: str) -> dict[str, float]:
        return {key: values[f"{table}.{key}"] for key in _TABLES[table]}

    dcqcn = of("dcqcn")
    return Settings(
        round_trip_s=2 * (switches + 1) * fabric.hop_latency_s,
        switches=switches,
        mtu_bytes=values["fabric.mtu_bytes"],
        ecn=Ecn(**of("ecn")),
        pfc=Pfc(buffer_bytes=values["fabric.buffer_bytes"], **of("pfc")),
        dcqcn=Dcqcn(gain=dcqcn.pop("gain_ratio"), **dcqcn),
        swift=Swift(**of("swift")),
    )
