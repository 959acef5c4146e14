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
_MOST_PORTS = 65_536
_MOMENT = (1e-9, 1.0)  # of timers and delays, seconds
_TABLES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "fabric": {
        "port_bytes_per_s": (1e5, 1e15),
        "uplink_split": (1, 64),
        "tor_oversubscription_ratio": (0.01, 100),
        "aggregation_oversubscription_ratio": (0.01, 100),
        "hop_latency_s": _MOMENT,
        "buffer_bytes": (1e3, 1e12),
        "queue_pairs": (1, 64),
        "mtu_bytes": (64, 1e6),
    },
    "pfc": {"threshold_ratio": (0.001, 100), "resume_ratio": (0.01, 1)},
    "ecn": {"low_s": _MOMENT, "high_s": _MOMENT, "mark_ratio": (1e-6, 1)},
    "dcqcn": {
        "gain_ratio": (1e-6, 1),
        "notification_s": _MOMENT,
        "alpha_timer_s": _MOMENT,
        "increase_timer_s": _MOMENT,
        "increase_counter_bytes": (64, 1e12),
        "fast_recovery": (1, 100),
        "increase_ratio": (1e-9, 1),
    },
    "swift": {
        "base_target_s": _MOMENT,
        "hop_target_s": _MOMENT,
        "increase": (1e-6, 1e6),
        "decrease_ratio": (1e-6, 1),
        "largest_decrease_ratio": (1e-6, 1),
        "flow_range_s": _MOMENT,
        "flow_low": (1e-6, 1e6),
        "flow_high": (1e-6, 1e6),
    },
    "retransmit": {
        "timeout_exponent": (1, 31),
        "retries": (1, 7),
        "adaptive_first_s": (4e-6, 1e4),
        "reroute_s": (0, 1e6),
    },
}
"""Each number that a file may have, and between which values it can be computed with."""
_WHOLE = ("uplink_split", "queue_pairs", "timeout_exponent", "retries")
_ASCENDING = (("ecn", "low_s", "high_s"), ("swift", "flow_low", "flow_high"))


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
        for key, bounds in keys.items():
            section = own if own is not None and own.has(key) else default.sub(table)
            numbers[f"{table}.{key}"] = _within(section, key, *bounds)
        if own is not None:
            own.done()
    given.done()
    for table, low, high in _ASCENDING:
        least, value = (numbers[f"{table}.{key}"].value for key in (low, high))
        if least >= value:
            cure = f"give more than {low}, {least:g}"
            raise UserError(
                "is no more than where it begins", cure=cure, field=given.where(f"{table}.{high}"), value=value
            )
    return shape, numbers


def _within(section: Section, key: str, least: float, most: float) -> Number:
    number = section.number(key)
    whole = key in _WHOLE
    if not least <= number.value <= most or (whole and number.value != int(number.value)):
        cure = f"give a {'whole ' * whole}number from {least:g} to {most:g}"
        raise section.refusal("cannot be computed with", cure, key, number.value)
    return number


def _whole(section: Section, key: str) -> int:
    value = section.raw(key)
    is_flag = key == "rail_optimised"
    if not isinstance(value, int) or isinstance(value, bool) is not is_flag or not 0 <= value <= _MOST_PORTS:
        cure = "write true or false" if is_flag else f"write a whole number up to {_MOST_PORTS:,}"
        raise section.refusal("is no such value", cure, key, value)
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
