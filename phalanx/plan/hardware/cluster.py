"""Hosts with devices and a network between them: how long messages take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.plan.hardware.device import Device, number_of
from phalanx.plan.hardware.either import functions
from phalanx.plan.hardware.links import Collective, HostLinks
from phalanx.plan.hardware.network import Network
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
