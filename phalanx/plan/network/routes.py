"""Which links messages cross, and by which rule a switch chooses where there is a choice."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.network.fabric import HOPS, Fabric
from phalanx.plan.network.flows import Flows

Hashing = Literal["ecmp", "polarised", "adaptive", "ideal"]
"""How a switch chooses among equal ways:

- ``ecmp``: by a hash of the five-tuple (addresses, ports, protocol), another one in every switch, whatever the load;
- ``polarised``: the same, but every switch computes the same hash, so that those above see few of its values;
- ``adaptive``: the way that has the fewest connections so far, as the switch itself sees it;
- ``ideal``: every message is spread evenly over all ways (packets sprayed, and put in order by the receiver).
"""
Indices = NDArray[np.int64]

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
    key = _five_tuple(spread, queue_pairs, seed)
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
    """Add weights to the links of `span`, which stand in blocks of `ways`, evenly within each block."""
    there = links >= 0
    if there.any():
        first, end = span
        blocks = np.bincount((links[there] - first) // ways, weights=weights[there], minlength=(end - first) // ways)
        total[first:end] += np.repeat(blocks / ways, ways)


def _five_tuple(flows: Flows, queue_pairs: int, seed: int) -> NDArray[np.uint64]:
    """One number for addresses and source port of each path; destination port and protocol are the same for all."""
    port = np.arange(len(flows), dtype=np.uint64) % np.uint64(queue_pairs)
    source = flows.source_host * 64 + flows.source_nic
    target = flows.target_host * 64 + flows.target_nic
    key = _mixed(source.astype(np.uint64) + np.uint64(seed * int(_MIX[2]) % 2**64))
    key = _mixed(key ^ (target.astype(np.uint64) * _MIX[2]))
    return _mixed(key + port * _MIX[0])


def _hashed(key: NDArray[np.uint64], switch: Indices, ways: int) -> Indices:
    """The way that each switch's own hash of `key` gives."""
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
