"""What is asked: one set of circumstances for a fabric, and the questions that are asked where nobody names any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from phalanx.core.config import read_toml
from phalanx.core.errors import UserError
from phalanx.simulate.fabric import Fabric, Hashing
from phalanx.simulate.network_settings import Control, NetworkDescription, Retransmit, check_control

Placement = Literal["packed", "pipeline_first", "scattered"]
"""Where ranks sit: in the order of their numbers, so that data-parallel neighbours share ToRs; hosts of one pipeline
side by side; anywhere in the fabric."""
FlapLink = Literal["nic", "uplink"]
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "hashing": get_args(Hashing),
    "placement": get_args(Placement),
    "flap_link": get_args(FlapLink),
}


@dataclass(frozen=True)
class NetworkScenario:
    """A fabric and what happens on it."""

    name: str
    fabric: Fabric
    hashing: Hashing = "ecmp"
    placement: Placement = "packed"
    congestion: Control = "mixed"
    queue_pairs: int = 4  # connections between two NICs, each hashed for itself; they have equal shares
    flap_s: float = 0.0  # how long a link goes down in the step that is looked at; 0: not at all
    flap_link: FlapLink = "nic"  # of a NIC, or between switches, where others take over after `reroute_s`
    retransmit: Retransmit = field(default_factory=Retransmit)
    reroute_s: float = 0.05

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                cure = f"write one of {', '.join(choices)}"
                raise UserError("is not known", cure=cure, field=name, value=getattr(self, name))
        check_control(self.congestion)
        if self.queue_pairs != int(self.queue_pairs) or not 1 <= self.queue_pairs <= 64:
            cure = "write a whole number from 1 to 64"
            raise UserError("is no number of connections", cure=cure, field="queue_pairs", value=self.queue_pairs)
        for name in ("flap_s", "reroute_s"):
            if not 0 <= getattr(self, name) < 1e7:
                raise UserError("is no time", cure="write seconds", field=name, value=getattr(self, name))

    @property
    def down_s(self) -> float:
        """How long the way of a message is gone: until the link is up, or others have taken over for an uplink."""
        return min(self.flap_s, self.reroute_s) if self.flap_link == "uplink" else self.flap_s

    @property
    def stall_s(self) -> float:
        """How long a step stands still for the flap; infinite where it ends the job."""
        return self.retransmit.stall_s(self.down_s)


_FABRIC_KEYS = (
    "hosts",
    "tor_oversubscription",
    "aggregation_oversubscription",
    "uplink_split",
    "rail_optimised",
    "layers",
    "radix",
)
_TIMER_KEYS = {"retransmit_timeout": "timeout_exponent", "retries": "retries", "adaptive_retransmit": "adaptive"}
_FLAGS = ("rail_optimised", "adaptive_retransmit")
_MEASURES = ("tor_oversubscription", "aggregation_oversubscription", "flap_s", "reroute_s")
_MANY = 10_000_000
_OWN_KEYS = ("hashing", "placement", "congestion", "queue_pairs", "flap_s", "flap_link", "reroute_s")
KEYS = (*_OWN_KEYS, *_FABRIC_KEYS, *_TIMER_KEYS)  # what a scenario file, or an option, may change


def make_scenario(name: str, network: NetworkDescription, changes: Mapping[str, Any]) -> NetworkScenario:
    """The network as it is, but for `changes`."""
    base = NetworkScenario(
        name=name,
        fabric=network.fabric,
        queue_pairs=network.queue_pairs,
        retransmit=network.retransmit,
        reroute_s=network.reroute_s,
    )
    return changed(base, name, changes)


def changed(base: NetworkScenario, name: str, changes: Mapping[str, Any]) -> NetworkScenario:
    """`base` under another name, but for `changes`."""
    for key, value in changes.items():
        if key not in KEYS:
            raise UserError("is nothing that can be changed", cure=f"write one of {', '.join(KEYS)}", field=key)
        if key in _CHOICES or key == "congestion":
            right, cure = isinstance(value, str), "write a name in quotes"
        elif key in _FLAGS:
            right, cure = isinstance(value, bool), "write true or false"
        else:
            kind = int | float if key in _MEASURES else int
            right = isinstance(value, kind) and not isinstance(value, bool) and abs(value) < _MANY
            cure = f"write a {'' if key in _MEASURES else 'whole '}number below {_MANY:,}"
        if not right:
            raise UserError("is no such value", cure=cure, field=key, value=value)
    fabric = {key: changes[key] for key in _FABRIC_KEYS if key in changes}
    timers = {field: changes[key] for key, field in _TIMER_KEYS.items() if key in changes}
    own = {key: changes[key] for key in _OWN_KEYS if key in changes}
    return replace(
        base,
        name=name,
        fabric=base.fabric.changed(**fabric),
        retransmit=replace(base.retransmit, **timers),
        **own,
    )


USUAL: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("one connection per pair of NICs", {"queue_pairs": 1}),
    ("switches adapt", {"hashing": "adaptive"}),
    ("all switches hash alike", {"hashing": "polarised"}),
    ("uplinks no faster than NICs", {"uplink_split": 2}),
    ("pipelines placed first", {"placement": "pipeline_first"}),
    ("hosts scattered", {"placement": "scattered"}),
    ("scattered, switches adapt", {"placement": "scattered", "hashing": "adaptive"}),
    ("scattered, packets sprayed", {"placement": "scattered", "hashing": "ideal"}),
    ("scattered, DCQCN", {"placement": "scattered", "congestion": "dcqcn"}),
    ("scattered, Swift", {"placement": "scattered", "congestion": "swift"}),
    ("not rail-optimised", {"rail_optimised": False}),
    ("ToRs 2:1", {"tor_oversubscription": 2.0}),
    ("aggregation 4:1", {"aggregation_oversubscription": 4.0}),
    ("a NIC's link is down for 3 s", {"flap_s": 3.0}),
    ("… with adaptive retransmission", {"flap_s": 3.0, "adaptive_retransmit": True}),
    ("… with NCCL's timeout of old, 14", {"flap_s": 3.0, "retransmit_timeout": 14}),
    ("an uplink is down for 3 s", {"flap_s": 3.0, "flap_link": "uplink"}),
)
"""Questions for a fabric, each a change of one or two things."""


def usual_scenarios(base: NetworkScenario) -> tuple[NetworkScenario, ...]:
    """`base`, and what if: all of `USUAL` that changes something and is possible."""
    found = [base]
    for name, changes in USUAL:
        other = _possible(base, name, changes)
        if other is not None and replace(other, name=base.name) != base:
            found.append(other)
    return tuple(found)


def _possible(base: NetworkScenario, name: str, changes: Mapping[str, Any]) -> NetworkScenario | None:
    try:
        return changed(base, name, changes)
    except UserError:  # such as no room for all pods; the question is then left out
        return None


def read_scenarios(path: Path, base: NetworkScenario) -> tuple[NetworkScenario, ...]:
    """`base`, and the ``[[scenario]]`` of a TOML file: ``name`` and what is changed."""
    tree = read_toml(path)
    entries = tree.get("scenario")
    if set(tree) != {"scenario"} or not isinstance(entries, list) or not all(map(_is_named, entries)) or not entries:
        cure = 'write [[scenario]] with name = ".." and what is changed'
        raise UserError("is no list of scenarios", cure=cure, field=str(path))
    rest = [{key: value for key, value in entry.items() if key != "name"} for entry in entries]
    return (base, *(changed(base, entry["name"], changes) for entry, changes in zip(entries, rest, strict=True)))


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)
