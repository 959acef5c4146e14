"""Times of collectives between hosts: rings and trees, in the protocol that suits the size of the message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.plan.hardware.either import Functions, functions
from phalanx.plan.hardware.links import Collective

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
