"""Hosts with devices and a network between them: how long messages and collectives take.

Inside a host, collectives follow measured curves over size (`HostLinks`); between hosts they are rings or trees, in the
protocol that suits the size of the message (`Network`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.plan.hardware.device_model import Device, number_of
from phalanx.plan.hardware.formula import Functions, LogCurve, functions
from phalanx.plan.types import Mark, Number


@dataclass(frozen=True)
class Cluster:
    """Equal hosts on one network; ranks are numbered through host after host.

    Attributes:
        devices: in all.
        links: between the devices of a host.
        network: between hosts.
        numbers: plain numbers of its file, by dotted key, such as ``network.nic_bytes_per_s``.
    """

    name: str
    device: Device
    devices: int
    devices_per_host: int
    nics_per_host: int
    links: HostLinks
    network: Network
    numbers: Mapping[str, Number]

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
        return f.least(ranks, f.largest(self.devices_per_host // stride, 1))

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Any:
        """Time of a collective.

        Args:
            num_bytes: of the whole message on one rank: gathered, or not yet reduced.
            ranks: members of the group.
            stride: distance between neighbours of the group, in ranks.
        """
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
        """A plain number of its file.

        Raises:
            UserError: there is none of that name.
        """
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
        for count, curve in zip(self.ranks, self.seconds, strict=True):
            if ranks <= count:
                return curve.at(num_bytes)
        return self.seconds[-1].at(num_bytes)

    def _at_arrays(self, num_bytes: Any, ranks: Any) -> Any:
        found = self.seconds[-1].at(num_bytes)
        for count, curve in reversed(list(zip(self.ranks, self.seconds, strict=True))[:-1]):
            found = np.where(ranks <= count, curve.at(num_bytes), found)
        return np.where(ranks <= 1, 0.0, found)


@dataclass(frozen=True)
class HostLinks:
    """What connects the devices of a host.

    Attributes:
        curves: one for each kind of collective; broadcast takes that of the all-gather.
        numbers: ``send_latency_s`` and ``send_bytes_per_s`` between two devices.
    """

    name: str
    curves: Mapping[str, GroupCurves]
    numbers: Mapping[str, Number]

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
    """One way to move a message: quick steps with part of the bandwidth, or slow ones with all of it.

    Attributes:
        start_s: before the first step.
        hop_s: of a step to another host.
        inside_hop_s: of a step within a host.
        share: of the achieved bandwidth.
    """

    start_s: float
    hop_s: float
    inside_hop_s: float
    share: float


@dataclass(frozen=True)
class Network:
    """What connects hosts, as a library of collectives uses it.

    Attributes:
        device_bytes_per_s: what each device sends to other hosts while all of its host do, one way, as achieved.
        latency_s: of one message from host to host.
        rings: for every collective.
        trees: for all-reduce, which then takes steps by the logarithm of the number of hosts.
    """

    device_bytes_per_s: float
    latency_s: float
    rings: tuple[Protocol, ...]
    trees: tuple[Protocol, ...]

    def send_s(self, num_bytes: Any) -> Any:
        """Time to send `num_bytes` from every device of a host to another host."""
        return self.latency_s + num_bytes / self.device_bytes_per_s

    def collective_s(self, kind: Collective, num_bytes: Any, ranks: Any, inside: Any) -> Any:
        """Time of a collective among `ranks` devices, `inside` of which share each host, on the network alone.

        Each member that a host has in the group uses its own share of the host's adapters, so a ring's message is
        divided among them; what all send to all is not.
        """
        if kind == "all_to_all":
            return self._exchange_s(num_bytes, ranks, inside)
        f = functions(num_bytes, ranks, inside)
        rate, hosts = inside * self.device_bytes_per_s, ranks / inside
        passes = _PASSES[kind]
        ring_s = passes * (ranks - 1) / ranks * num_bytes / rate
        hops, inside_hops = passes * f.largest(hosts - 1, 0.0), passes * (ranks - hosts)
        times = [_protocol_s(ring, ring_s, hops, inside_hops) for ring in self.rings]
        if kind == "all_reduce" and self.trees:
            hops, inside_hops = 2 * self._levels(f, hosts), 2 * (inside - 1)
            times += [_protocol_s(tree, 2 * num_bytes / rate, hops, inside_hops) for tree in self.trees]
        return f.least(*times) if len(times) > 1 else times[0]

    def _exchange_s(self, num_bytes: Any, ranks: Any, inside: Any) -> Any:
        start_s = self.rings[-1].start_s + self.latency_s
        return start_s + num_bytes * (ranks - inside) / ranks / self.device_bytes_per_s

    @staticmethod
    def _levels(f: Functions, hosts: Any) -> Any:
        return f.log(f.largest(hosts, 1.0)) / 0.6931471805599453


def _protocol_s(protocol: Protocol, bytes_s: Any, hops: Any, inside_hops: Any) -> Any:
    steps_s = hops * protocol.hop_s + inside_hops * protocol.inside_hop_s
    return protocol.start_s + steps_s + bytes_s / protocol.share
