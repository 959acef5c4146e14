"""The network of a cluster from its file: fabric, switches, congestion control, timers; each number has a source.

Link flaps and retransmission timers (`Retransmit`): a reliable connection sends again when no acknowledgement has come
for ``4.096 µs · 2^timeout`` and gives up after `retries` of that: the collective fails and with it the job (InfiniBand
specification, volume 1, 12.7.34 and 12.7.38, as NCCL's documentation of NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT names
it). What matters is not only whether the connection outlives the flap: with a long timer the link is up again long
before anything is sent over it. Adaptive retransmission begins with a short timer and doubles it up to the configured
one, within the same time in all (NVIDIA, Adaptive Retransmission: Parameters Control).

`CongestionSettings` are those of switches and adapters that decide how queues build up and drain: PFC, ECN, DCQCN,
Swift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PlainValidator

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.hardware_files import Measured, SourceTexts, Table, read_file, refusal
from phalanx.plan.types import Number
from phalanx.simulate.fabric import Fabric

_FABRICS = Path(__file__).parent / "fabrics"
_DEFAULT = "default.toml"
_MOST_PORTS = 65_536


def _within(least: float, most: float, *, whole: bool = False) -> AfterValidator:

    def check(number: Number) -> Number:
        if not least <= number.value <= most or (whole and number.value != int(number.value)):
            cure = f"give a {'whole ' * whole}number from {least:g} to {most:g}"
            raise refusal("cannot be computed with", cure, number.value)
        return number

    return AfterValidator(check)


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_PORTS:
        raise refusal("is no such value", f"write a whole number up to {_MOST_PORTS:,}", value)
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal("is no such value", "write true or false", value)
    return value


Size = Annotated[int, PlainValidator(_size)]
Flag = Annotated[bool, PlainValidator(_flag)]
Moment = Annotated[Measured, _within(1e-9, 1.0)]  # of timers and delays, seconds
Oversubscription = Annotated[Measured, _within(0.01, 100)]
Ratio = Annotated[Measured, _within(1e-6, 1)]
Amount = Annotated[Measured, _within(1e-6, 1e6)]


class FabricTable(Table):
    """Switches and links."""

    port_bytes_per_s: Annotated[Measured, _within(1e5, 1e15)] | None = None
    uplink_split: Annotated[Measured, _within(1, 64, whole=True)] | None = None
    tor_oversubscription_ratio: Oversubscription | None = None
    aggregation_oversubscription_ratio: Oversubscription | None = None
    hop_latency_s: Moment | None = None
    buffer_bytes: Annotated[Measured, _within(1e3, 1e12)] | None = None
    queue_pairs: Annotated[Measured, _within(1, 64, whole=True)] | None = None
    mtu_bytes: Annotated[Measured, _within(64, 1e6)] | None = None


class PfcTable(Table):
    """Pauses."""

    threshold_ratio: Annotated[Measured, _within(0.001, 100)] | None = None
    resume_ratio: Annotated[Measured, _within(0.01, 1)] | None = None


class EcnTable(Table):
    """Marks."""

    low_s: Moment | None = None
    high_s: Moment | None = None
    mark_ratio: Ratio | None = None


class DcqcnTable(Table):
    """Congestion control by marks."""

    gain_ratio: Ratio | None = None
    notification_s: Moment | None = None
    alpha_timer_s: Moment | None = None
    increase_timer_s: Moment | None = None
    increase_counter_bytes: Annotated[Measured, _within(64, 1e12)] | None = None
    fast_recovery: Annotated[Measured, _within(1, 100)] | None = None
    increase_ratio: Annotated[Measured, _within(1e-9, 1)] | None = None


class SwiftTable(Table):
    """Congestion control by delay."""

    base_target_s: Moment | None = None
    hop_target_s: Moment | None = None
    increase: Amount | None = None
    decrease_ratio: Ratio | None = None
    largest_decrease_ratio: Ratio | None = None
    flow_range_s: Moment | None = None
    flow_low: Amount | None = None
    flow_high: Amount | None = None


class RetransmitTable(Table):
    """Timers of adapters."""

    timeout_exponent: Annotated[Measured, _within(1, 31, whole=True)] | None = None
    retries: Annotated[Measured, _within(1, 7, whole=True)] | None = None
    adaptive_first_s: Annotated[Measured, _within(4e-6, 1e4)] | None = None
    reroute_s: Annotated[Measured, _within(0, 1e6)] | None = None


class FabricFile(Table):
    """A file of ``fabrics/``; what it leaves out is as in default.toml."""

    layers: Size | None = None
    radix: Size | None = None
    rail_optimised: Flag | None = None
    fabric: FabricTable = FabricTable()
    pfc: PfcTable = PfcTable()
    ecn: EcnTable = EcnTable()
    dcqcn: DcqcnTable = DcqcnTable()
    swift: SwiftTable = SwiftTable()
    retransmit: RetransmitTable = RetransmitTable()
    sources: SourceTexts = Field(default_factory=dict)


_SHAPE = ("layers", "radix", "rail_optimised")
_TABLES = ("fabric", "pfc", "ecn", "dcqcn", "swift", "retransmit")
_ASCENDING = (("ecn", "low_s", "high_s"), ("swift", "flow_low", "flow_high"))


@dataclass(frozen=True)
class NetworkDescription:
    """A cluster's network as its file has it."""

    name: str
    described: bool  # whether a file describes this cluster's fabric; else it is the default one
    fabric: Fabric
    settings: CongestionSettings
    retransmit: Retransmit
    queue_pairs: int
    reroute_s: float
    devices: int
    devices_per_host: int
    latency_s: float  # of one message between hosts, without queues
    numbers: Mapping[str, Number]  # each with mark and source, by dotted key


def network_of(cluster: Cluster, fabric_file: Path | None = None) -> NetworkDescription:
    """The network that connects a cluster's hosts: of `fabric_file`, of the file of its name, or the default one."""
    file = fabric_file or _named(cluster.name)
    # What a file leaves out is as in default.toml.
    files = read_file(FabricFile, _FABRICS / _DEFAULT), read_file(FabricFile, file)
    shape = {key: getattr(one, key) for one in files for key in _SHAPE if getattr(one, key) is not None}
    numbers = {
        f"{table}.{key}": number
        for one in files
        for table in _TABLES
        for key, number in getattr(one, table).numbers().items()
    }
    for table, low, high in _ASCENDING:
        least, value = (numbers[f"{table}.{key}"].value for key in (low, high))
        if least >= value:
            cure = f"give more than {low}, {least:g}"
            field = f"{file.name}: {table}.{high}"
            raise UserError("is no more than where it begins", cure=cure, field=field, value=value)
    numbers = {**numbers, **{key: cluster.number(key) for key in ("network.nic_bytes_per_s", "network.achieved_ratio")}}
    values = {key: number.value for key, number in numbers.items()}
    # Rates are what payload reaches; several NICs of one device count as one.
    achieved = values["network.achieved_ratio"]
    nics = min(cluster.nics_per_host, cluster.devices_per_host)
    fabric = Fabric(
        hosts=cluster.hosts,
        nics_per_host=nics,
        nic_bytes_per_s=values["network.nic_bytes_per_s"] * achieved * cluster.nics_per_host / nics,
        port_bytes_per_s=values["fabric.port_bytes_per_s"] * achieved,
        radix=shape["radix"],
        layers=shape["layers"],
        rail_optimised=bool(shape["rail_optimised"]),
        uplink_split=int(values["fabric.uplink_split"]),
        tor_oversubscription=values["fabric.tor_oversubscription_ratio"],
        aggregation_oversubscription=values["fabric.aggregation_oversubscription_ratio"],
        hop_latency_s=values["fabric.hop_latency_s"],
    )
    return NetworkDescription(
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


def _congestion(values: Mapping[str, float], fabric: Fabric) -> CongestionSettings:
    switches = 2 * fabric.layers - 1

    def of(table: str) -> dict[str, float]:
        return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{table}.")}

    dcqcn = of("dcqcn")
    return CongestionSettings(
        round_trip_s=2 * (switches + 1) * fabric.hop_latency_s,
        switches=switches,
        mtu_bytes=values["fabric.mtu_bytes"],
        ecn=Ecn(**of("ecn")),
        pfc=Pfc(buffer_bytes=values["fabric.buffer_bytes"], **of("pfc")),
        dcqcn=Dcqcn(gain=dcqcn.pop("gain_ratio"), **dcqcn),
        swift=Swift(**of("swift")),
    )


_UNIT_S = 4.096e-6


@dataclass(frozen=True)
class Retransmit:
    """How adapters send again."""

    timeout_exponent: int = 20  # the timer is 4.096 µs times 2 to the power of it (NCCL_IB_TIMEOUT), 1 to 31
    retries: int = 7  # NCCL_IB_RETRY_CNT, 1 to 7
    adaptive: bool = False  # begin with `adaptive_first_s` and double it
    adaptive_first_s: float = 0.1

    def __post_init__(self) -> None:
        for name, least, most in (("timeout_exponent", 1, 31), ("retries", 1, 7)):
            value = getattr(self, name)
            if value != int(value) or not least <= value <= most:
                cure = f"write a whole number from {least} to {most}"
                raise UserError("is out of what adapters take", cure=cure, field=name, value=value)
        if not 4e-6 <= self.adaptive_first_s <= 1e4:
            cure = "write seconds, at least 4e-6, the shortest timer of adapters"
            raise UserError("is no timer", cure=cure, field="adaptive_first_s", value=self.adaptive_first_s)

    @property
    def timer_s(self) -> float:
        """Time without acknowledgement after which a message is sent again."""
        return float(_UNIT_S * 2**self.timeout_exponent)

    @property
    def patience_s(self) -> float:
        """The longest flap that a connection outlives: its last retry still arrives."""
        return self.retries * self.timer_s

    def tries_s(self) -> list[float]:
        """When messages are sent again, seconds after they were lost."""
        if not self.adaptive:
            return [number * self.timer_s for number in range(1, self.retries + 1)]
        tries, wait_s = [], min(self.adaptive_first_s, self.timer_s)
        at_s = wait_s
        while at_s < self.patience_s:
            tries.append(at_s)
            wait_s = min(2 * wait_s, self.timer_s)
            at_s += wait_s
        return [*tries, self.patience_s]

    def stall_s(self, flap_s: float) -> float:
        """How long a connection stands still whose message is lost as the link goes down; infinite if it gives up."""
        if not 0 <= flap_s < 1e7:
            raise UserError("is no time that a link is down", cure="write seconds", field="flap_s", value=flap_s)
        if flap_s == 0:
            return 0.0
        return next((at_s for at_s in self.tries_s() if at_s >= flap_s), math.inf)


def shortest_timeout(flap_s: float, retries: int) -> int | None:
    """The least timeout exponent whose connections outlive a flap; None: no adapter waits that long."""
    return next((number for number in range(1, 32) if Retransmit(number, retries).patience_s >= flap_s), None)


Control = Literal["dcqcn", "swift", "mixed", "none"]
"""How senders find their rate: by marks (DCQCN), by delay (Swift), by both, whichever is slower (as MegaScale 3.6
describes theirs), or not at all, so that only pauses (PFC) hold them back."""


def check_control(name: str) -> None:
    """Refuse what is no way of congestion control."""
    if name not in get_args(Control):
        cure = f"write one of {', '.join(get_args(Control))}"
        raise UserError("is no congestion control known here", cure=cure, field="congestion", value=name)


@dataclass(frozen=True)
class Ecn:
    """Marks by queue length: none up to `low_s`, `mark_ratio` at `high_s`, all above; lengths as time to drain."""

    low_s: float = 32e-6
    high_s: float = 128e-6
    mark_ratio: float = 0.2


@dataclass(frozen=True)
class Pfc:
    """Pauses: a port is stopped when what came from it takes up too much of the buffer."""

    buffer_bytes: float = 113e6
    threshold_ratio: float = 0.11  # of what is free of the buffer
    resume_ratio: float = 0.9  # of that threshold, below which it may go on


@dataclass(frozen=True)
class Dcqcn:
    """Zhu et al., SIGCOMM 2015."""

    gain: float = 1 / 256  # of the running mean of marks, g
    notification_s: float = 50e-6  # a receiver notifies at most once in this time, τ
    alpha_timer_s: float = 55e-6  # after which the mean is brought up to date, τ'
    increase_timer_s: float = 55e-6  # T
    increase_counter_bytes: float = 10e6  # B
    fast_recovery: float = 5  # increases half-way back to the old rate before it grows, F
    increase_ratio: float = 0.001  # additive increase R_AI, of the adapter's rate


@dataclass(frozen=True)
class Swift:
    """Kumar et al., SIGCOMM 2020; windows in packets."""

    base_target_s: float = 20e-6  # delay that is aimed at, and `hop_target_s` for each switch
    hop_target_s: float = 3.05e-6
    increase: float = 1.0  # packets for each round trip, ai
    decrease_ratio: float = 0.8  # β
    largest_decrease_ratio: float = 0.5  # max_mdf
    flow_range_s: float = 100e-6  # how much more delay is allowed to a window of `flow_low`; none from `flow_high`
    flow_low: float = 0.1
    flow_high: float = 100.0

    @property
    def flow_slope_s(self) -> float:
        """α: delay allowed on top is ``α/√window`` less what `flow_high` would have."""
        return float(self.flow_range_s / (self.flow_low**-0.5 - self.flow_high**-0.5))


@dataclass(frozen=True)
class CongestionSettings:
    """All of it, for one fabric."""

    round_trip_s: float = 12e-6  # without queues
    switches: int = 5  # on the longest way
    mtu_bytes: float = 4096  # payload of a packet
    ecn: Ecn = field(default_factory=Ecn)
    pfc: Pfc = field(default_factory=Pfc)
    dcqcn: Dcqcn = field(default_factory=Dcqcn)
    swift: Swift = field(default_factory=Swift)
