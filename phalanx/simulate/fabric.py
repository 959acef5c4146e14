"""A CLOS fabric: its switches and links, how fast they are, and which links messages cross by which rule.

A host has several adapters (NICs). In a rail-optimised fabric the NICs of a host go to as many top-of-rack switches
(ToRs), the k-th NICs of all hosts of a ToR group to the same one; otherwise all NICs of a host go to one ToR. ToRs
reach each other over aggregation switches, one link to each; with three layers, these reach other pods over cores: each
plane (the aggregation switches that are the a-th of their pod) has its own cores.

    NIC -> ToR -> aggregation a -> core c of plane a -> aggregation a of the other pod -> ToR -> NIC

On the way up a switch is free to choose; on the way down there is one way only. `Hashing`
names the rules by which a switch chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.simulate.traffic import Flows

Indices = NDArray[np.int64]

_MOST_LINKS = 100_000_000  # each is a number or two in memory; 100,000 NICs need under a million
_MOST_PER_PORT = 64
HOPS = 6  # links of the longest way; shorter ways have -1 in their middle


@dataclass(frozen=True)
class Fabric:
    """A fabric that is large enough for `hosts`."""

    hosts: int
    nics_per_host: int
    # Of each NIC, as much of it as payload reaches; a port of a ToR is split among as many NICs as it has room for
    # (400G to 2 x 200G).
    nic_bytes_per_s: float
    port_bytes_per_s: float  # of each, as much of it as payload reaches
    radix: int = 64  # ports of a switch
    layers: Literal[2, 3] = 3
    rail_optimised: bool = True
    uplink_split: int = 1  # into how many links each port towards the core is split; 1: an uplink has a whole port
    tor_oversubscription: float = 1.0  # bandwidth down over bandwidth up, of ToRs
    aggregation_oversubscription: float = 1.0  # the same of aggregation switches
    hop_latency_s: float = 1e-6

    def __post_init__(self) -> None:
        _check(self)

    def changed(self, **changes: object) -> Fabric:
        """The same fabric with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def nics_per_port(self) -> int:
        """NICs that share a port of a ToR."""
        return int(self.port_bytes_per_s / self.nic_bytes_per_s + 1e-9)

    @property
    def nics_per_tor(self) -> int:
        """NICs of a full ToR: half of its ports go down."""
        return self.radix // 2 * self.nics_per_port

    @property
    def tors_per_group(self) -> int:
        """ToRs that the hosts of a group share."""
        return self.nics_per_host if self.rail_optimised else 1

    @property
    def hosts_per_group(self) -> int:
        """Hosts below the same ToRs."""
        return self.nics_per_tor if self.rail_optimised else self.nics_per_tor // self.nics_per_host

    @property
    def groups(self) -> int:
        """ToR groups."""
        return math.ceil(self.hosts / self.hosts_per_group)

    @property
    def tors(self) -> int:
        """ToRs in all."""
        return self.groups * self.tors_per_group

    @property
    def uplink_bytes_per_s(self) -> float:
        """Of a link between switches."""
        return self.port_bytes_per_s / self.uplink_split

    @property
    def tor_uplinks(self) -> int:
        """Links of a ToR to aggregation switches, one to each."""
        return max(1, round(self.radix // 2 * self.uplink_split / self.tor_oversubscription))

    @property
    def groups_per_pod(self) -> int:
        """ToR groups that share aggregation switches; with two layers all do."""
        if self.layers == 2:
            return self.groups
        return max(1, self.radix // 2 // self.tors_per_group)

    @property
    def pods(self) -> int:
        """Sets of ToR groups with aggregation switches of their own."""
        return math.ceil(self.groups / self.groups_per_pod)

    @property
    def aggregation_uplinks(self) -> int:
        """Links of an aggregation switch to cores, one to each; none with two layers."""
        if self.layers == 2:
            return 0
        return max(1, round(self.groups_per_pod * self.tors_per_group / self.aggregation_oversubscription))

    @property
    def num_nics(self) -> int:
        """NICs in all."""
        return self.hosts * self.nics_per_host

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int, int]:
        """First link of each kind: from NICs, to NICs, ToRs up, ToRs down, aggregation up, down; last: links in all."""
        between = self.tors * self.tor_uplinks
        above = self.pods * self.tor_uplinks * self.aggregation_uplinks
        sizes = (self.num_nics, self.num_nics, between, between, above, above)
        found = [0]
        for size in sizes:
            found.append(found[-1] + size)
        return tuple(found)  # type: ignore[return-value]

    @property
    def num_links(self) -> int:
        """Links in all, one for each direction."""
        return self.offsets[-1]

    def capacities(self) -> NDArray[np.float64]:
        """Bytes per second of every link."""
        import numpy as np

        rates = np.full(self.num_links, self.uplink_bytes_per_s)
        rates[: self.offsets[2]] = self.nic_bytes_per_s
        return rates

    def tor_of(self, host: Indices, nic: Indices) -> Indices:
        """The ToR below which a NIC is."""
        group = host // self.hosts_per_group
        return group * self.tors_per_group + nic if self.rail_optimised else group

    def pod_of(self, tor: Indices) -> Indices:
        """The pod of a ToR."""
        return tor // (self.groups_per_pod * self.tors_per_group)

    def kind_of(self, link: int) -> str:
        """What a link connects, in words."""
        names = ("NIC to ToR", "ToR to NIC", "ToR to aggregation", "aggregation to ToR", "to core", "from core")
        return names[sum(link >= first for first in self.offsets[1:-1])]


def _check(fabric: Fabric) -> None:
    positive = ("hosts", "nics_per_host", "radix", "uplink_split", "nic_bytes_per_s", "port_bytes_per_s")
    for name in positive:
        if not getattr(fabric, name) > 0:
            raise UserError("is no size", cure="write a number above 0", field=name, value=getattr(fabric, name))
    if fabric.layers not in (2, 3):
        raise UserError("is no CLOS fabric known here", cure="write 2 or 3", field="layers", value=fabric.layers)
    if fabric.radix % 2:
        cure = "write an even number: half of the ports go down"
        raise UserError("switches have ports in pairs", cure=cure, field="radix", value=fabric.radix)
    for name in ("tor_oversubscription", "aggregation_oversubscription"):
        value = getattr(fabric, name)
        if not 0 < value <= fabric.radix / 2:
            cure = f"write bandwidth down over bandwidth up, between 0 and {fabric.radix // 2}: 1 or 2"
            raise UserError("is no over-subscription", cure=cure, field=name, value=value)
    _check_rates(fabric)
    _check_room(fabric)
    if fabric.num_links > _MOST_LINKS:
        cure = "take switches with fewer ports, or an uplink_split of 1 or 2"
        raise UserError(f"it has over {_MOST_LINKS:,} links", cure=cure, field="radix", value=fabric.radix)


def _check_rates(fabric: Fabric) -> None:
    if fabric.nics_per_port > _MOST_PER_PORT:
        cure = f"take ports up to {_MOST_PER_PORT} times as fast as NICs"
        raise UserError(
            "a port is not split so often", cure=cure, field="port_bytes_per_s", value=fabric.port_bytes_per_s
        )
    if fabric.nics_per_port < 1:
        cure = "take switches with faster ports, or slower NICs"
        raise UserError(
            "NICs are faster than a port of the switch",
            cure=cure,
            field="nic_bytes_per_s",
            value=fabric.nic_bytes_per_s,
        )
    if fabric.hosts_per_group < 1:
        cure = "make it rail-optimised, so that each goes to a switch of its own, or take switches with more ports"
        raise UserError(
            "a ToR has not enough ports for the NICs of one host", cure=cure, field="radix", value=fabric.radix
        )


def _check_room(fabric: Fabric) -> None:
    if fabric.layers == 2:
        room, needs = fabric.radix * fabric.uplink_split, fabric.tors
        cure = "take three layers, or switches with more ports"
        below = "ToRs"
    else:
        room, needs = fabric.radix * fabric.uplink_split, fabric.pods
        cure = "take switches with more ports, or fewer hosts"
        below = "pods"
        if fabric.tors_per_group > fabric.radix // 2:
            raise UserError("a pod has no room for one ToR group", cure=cure, field="radix", value=fabric.radix)
    if needs > room:
        raise UserError(
            f"{needs} {below} meet at switches with {room} ports", cure=cure, field="hosts", value=fabric.hosts
        )


Hashing = Literal["ecmp", "polarised", "adaptive", "ideal"]
"""How a switch chooses among equal ways:

- ``ecmp``: by a hash of the five-tuple (addresses, ports, protocol), another one in every switch, whatever the load;
- ``polarised``: the same, but every switch computes the same hash, so that those above see few of its values;
- ``adaptive``: the way that has the fewest connections so far, as the switch itself sees it;
- ``ideal``: every message is spread evenly over all ways (packets sprayed, and put in order by the receiver).
"""

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15))


def choose_paths(fabric: Fabric, flows: Flows, hashing: Hashing, queue_pairs: int, seed: int) -> Indices:
    """The links of every path, (paths, HOPS), -1 where a way is shorter.

    Args:
        queue_pairs: paths of each flow, each with a source port of its own; ``paths`` are flow after flow.
        seed: of all hashes: another job, with other addresses and ports.
    """
    spread = flows.repeated(queue_pairs)
    tor = fabric.tor_of(spread.source_host, spread.source_nic)
    up, above = fabric.tor_uplinks, max(fabric.aggregation_uplinks, 1)
    # One number for addresses and source port of each path; destination port and protocol are the same for all.
    port = np.arange(len(spread), dtype=np.uint64) % np.uint64(queue_pairs)
    source = spread.source_host * 64 + spread.source_nic
    target = spread.target_host * 64 + spread.target_nic
    key = _mixed(source.astype(np.uint64) + np.uint64(seed * int(_MIX[2]) % 2**64))
    key = _mixed(key ^ (target.astype(np.uint64) * _MIX[2]))
    key = _mixed(key + port * _MIX[0])
    crosses = fabric.tor_of(spread.target_host, spread.target_nic) != tor
    if hashing == "adaptive":
        plane = _least_used(tor, up, key, crosses)
        switch = fabric.pod_of(tor) * up + plane
        leaves = fabric.pod_of(fabric.tor_of(spread.target_host, spread.target_nic)) != fabric.pod_of(tor)
        core = _least_used(switch, above, key, leaves)
    else:
        own = 0 if hashing == "polarised" else 1
        plane = _hashed(key, own * tor, up)
        core = _hashed(key, own * (fabric.tors + fabric.pod_of(tor) * up + plane), above)
    return links_of(fabric, spread, plane, core)


def links_of(fabric: Fabric, flows: Flows, plane: Indices, core: Indices) -> Indices:
    """The links of each flow, whose aggregation switches and cores are chosen."""
    first = fabric.offsets
    up, above = fabric.tor_uplinks, max(fabric.aggregation_uplinks, 1)
    source_tor = fabric.tor_of(flows.source_host, flows.source_nic)
    target_tor = fabric.tor_of(flows.target_host, flows.target_nic)
    source_pod, target_pod = fabric.pod_of(source_tor), fabric.pod_of(target_tor)
    paths = np.full((HOPS, len(flows)), -1, dtype=np.int64).T  # each hop's links side by side in memory
    paths[:, 0] = first[0] + flows.source_host * fabric.nics_per_host + flows.source_nic
    paths[:, 5] = first[1] + flows.target_host * fabric.nics_per_host + flows.target_nic
    crosses, leaves = source_tor != target_tor, source_pod != target_pod
    paths[:, 1] = np.where(crosses, first[2] + source_tor * up + plane, -1)
    paths[:, 4] = np.where(crosses, first[3] + target_tor * up + plane, -1)
    paths[:, 2] = np.where(leaves, first[4] + (source_pod * up + plane) * above + core, -1)
    paths[:, 3] = np.where(leaves, first[5] + (target_pod * up + plane) * above + core, -1)
    return paths


def link_bytes(fabric: Fabric, flows: Flows, hashing: Hashing, queue_pairs: int, seed: int) -> NDArray[np.float64]:
    """Bytes that cross every link."""
    if hashing == "ideal":
        return _sprayed_bytes(fabric, flows)
    paths = choose_paths(fabric, flows, hashing, queue_pairs, seed)
    weights = np.repeat(flows.num_bytes / queue_pairs, queue_pairs)
    return add_up(paths, weights, fabric.num_links)


def add_up(paths: Indices, weights: NDArray[np.float64], num_links: int) -> NDArray[np.float64]:
    """The sum of the weights of all paths over each link."""
    total = np.zeros(num_links)
    for hop in range(paths.shape[1]):
        links = paths[:, hop]
        there = links >= 0
        total += np.bincount(links[there], weights=weights[there], minlength=num_links)
    return total


def _sprayed_bytes(fabric: Fabric, flows: Flows) -> NDArray[np.float64]:
    """Bytes of every link where each flow takes all ways evenly: by symmetry one number for each switch, exactly."""
    nothing = np.zeros(len(flows), dtype=np.int64)
    paths = links_of(fabric, flows, nothing, nothing)
    total = add_up(paths[:, [0, 5]], flows.num_bytes, fabric.num_links)
    up, above = fabric.tor_uplinks, fabric.tor_uplinks * fabric.aggregation_uplinks
    for hop, kind, ways in ((1, 2, up), (4, 3, up), (2, 4, above), (3, 5, above)):
        _spread_evenly(total, paths[:, hop], flows.num_bytes, fabric.offsets[kind : kind + 2], ways)
    return total


def _spread_evenly(
    total: NDArray[np.float64], links: Indices, weights: NDArray[np.float64], span: tuple[int, ...], ways: int
) -> None:
    there = links >= 0
    if there.any():
        first, end = span
        blocks = np.bincount((links[there] - first) // ways, weights=weights[there], minlength=(end - first) // ways)
        total[first:end] += np.repeat(blocks / ways, ways)


def _hashed(key: NDArray[np.uint64], switch: Indices, ways: int) -> Indices:
    mixed = _mixed(key + (switch.astype(np.uint64) + np.uint64(1)) * _MIX[2])
    return (mixed % np.uint64(ways)).astype(np.int64)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits mixed well (the finaliser of splitmix64)."""
    value = (value ^ (value >> np.uint64(30))) * _MIX[0]
    value = (value ^ (value >> np.uint64(27))) * _MIX[1]
    return value ^ (value >> np.uint64(31))


def _least_used(switch: Indices, ways: int, key: NDArray[np.uint64], takes_part: NDArray[np.bool_]) -> Indices:
    """Ways in turn at each switch, in an order by `key`, from a random first one: counts differ by one at most."""
    chosen = np.flatnonzero(takes_part)
    own = switch[chosen].astype(np.uint64)
    order = np.argsort((own << np.uint64(40)) | (key[chosen] >> np.uint64(24)))
    sorted_switch = switch[chosen][order]
    starts = np.flatnonzero(np.r_[True, np.diff(sorted_switch) != 0]) if len(order) else order
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    first_way = _hashed(np.full(len(order), key.min(initial=_MIX[2])), sorted_switch, ways)
    found = np.zeros(len(switch), dtype=np.int64)
    found[chosen[order]] = (place + first_way) % ways
    return found
