"""How much of a phase's bytes crosses the fullest link, for one placement and one draw of the hashes.

The time of a phase in which all flows have equal bytes is exactly that of the fullest link. With max-min fair rates
the flows of that link are the slowest of all, they share it evenly, and so they all end when its last byte is through;
flows that end earlier leave nothing to them. So no rates need to be followed over time.

Where flows do not wait for each other, `flow_shares` gives what each gets of its NIC under max-min fairness: water
rises at the same pace in all items until a link is full; its items stay at that level, the others go on (Bertsekas and
Gallager, Data Networks, 6.5.2). An item is a flow, or a collective whose flows all go at the pace of its slowest: it
crosses a link with a weight, how many of its flows do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.fabric import Fabric, Hashing, add_up, choose_paths, link_bytes
from phalanx.simulate.network_scenario import Placement
from phalanx.simulate.traffic import Flows, Pattern, Phase, Traffic, make_flows

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class PhaseShape:
    """Who sends to whom, whatever the bytes."""

    pattern: Pattern
    ranks: int
    stride: int
    devices: int
    devices_per_host: int
    stages: int = 1
    stage_hosts: int = 1  # hosts of a pipeline stage, and `stages` of them: what placing pipelines first goes by


@dataclass(frozen=True)
class LinkLoad:
    """The fullest link of a phase in which every rank sends one byte."""

    seconds: float  # that it needs
    sending_seconds: float  # that the fullest NIC needs to send
    kind: str  # what the link connects
    paths: float  # that cross it
    capacity: float  # its bytes per second
    hot_links: float  # links of its kind that are asked for more than they carry, for each switch that has one

    @property
    def overload(self) -> float:
        """What is asked of the link while all NICs send, over what it carries."""
        return self.seconds / self.sending_seconds if self.sending_seconds else 0.0


NOTHING = LinkLoad(0.0, 0.0, "none", 0.0, 1.0, 0.0)  # A phase that stays inside hosts


def shape_of(phase: Phase, traffic: Traffic, devices: int, devices_per_host: int) -> PhaseShape:
    """The shape of a phase of `traffic`."""
    pipelines = [other for other in traffic.phases if other.pattern == "neighbours"]
    last = max(pipelines, key=lambda other: other.stride, default=None)
    whole_hosts = last is not None and last.stride % devices_per_host == 0
    stages, stage_hosts = (last.ranks, last.stride // devices_per_host) if last and whole_hosts else (1, 1)
    return PhaseShape(phase.pattern, phase.ranks, phase.stride, devices, devices_per_host, stages, stage_hosts)


@lru_cache(maxsize=4096)
def measure(
    shape: PhaseShape, fabric: Fabric, hashing: Hashing, placement: Placement, queue_pairs: int, seed: int
) -> LinkLoad:
    """The fullest link, for the hashes and the places that `seed` gives."""
    moved = place_flows(shape, fabric, placement, seed)
    if not len(moved):
        return NOTHING
    capacity = fabric.capacities()
    if hashing == "ideal":
        seconds = link_bytes(fabric, moved, hashing, queue_pairs, seed) / capacity
        return _fullest(fabric, seconds, capacity, None)
    # Flows that stay below their ToR have one way only, which no hash decides.
    source = fabric.tor_of(moved.source_host, moved.source_nic)
    crossing = moved.chosen(source != fabric.tor_of(moved.target_host, moved.target_nic))
    paths = choose_paths(fabric, crossing, hashing, queue_pairs, seed)
    weights = np.repeat(crossing.num_bytes / queue_pairs, queue_pairs)
    first = fabric.offsets
    sends = first[0] + moved.source_host * fabric.nics_per_host + moved.source_nic
    receives = first[1] + moved.target_host * fabric.nics_per_host + moved.target_nic
    loads = add_up(np.stack([sends, receives], axis=1), moved.num_bytes, fabric.num_links)
    loads += add_up(paths[:, 1:5], weights, fabric.num_links)
    return _fullest(fabric, loads / capacity, capacity, paths)


def place_flows(shape: PhaseShape, fabric: Fabric, placement: Placement, seed: int) -> Flows:
    """The flows of a phase in which every rank sends one byte, between the places where hosts stand."""
    flows = _flows(shape, fabric.nics_per_host)
    return flows.moved(_positions(shape, fabric, placement, seed))


@lru_cache(maxsize=64)
def _flows(shape: PhaseShape, nics_per_host: int) -> Flows:
    phase = Phase("", shape.pattern, shape.ranks, shape.stride, rank_bytes=1.0)
    return make_flows(phase, shape.devices, shape.devices_per_host, nics_per_host)


def _positions(shape: PhaseShape, fabric: Fabric, placement: Placement, seed: int) -> Indices:
    hosts = shape.devices // shape.devices_per_host
    if placement == "scattered":
        return np.random.default_rng(seed).permutation(fabric.hosts)[:hosts]
    if placement == "pipeline_first" and hosts % (shape.stages * shape.stage_hosts) == 0:
        grid = np.arange(hosts).reshape(-1, shape.stage_hosts, shape.stages)
        return grid.transpose(0, 2, 1).ravel()
    return np.arange(hosts)


def _fullest(fabric: Fabric, seconds: Floats, capacity: Floats, paths: Indices | None) -> LinkLoad:
    worst = int(seconds.argmax())
    sending_s = float(seconds[: fabric.offsets[1]].max())
    crossing = capacity[worst] / fabric.nic_bytes_per_s * seconds[worst] / sending_s
    if paths is not None and worst >= fabric.offsets[2]:
        crossing = float((paths == worst).sum())
    kind = sum(worst >= first for first in fabric.offsets[1:-1])
    start, end = fabric.offsets[kind], fabric.offsets[kind + 1]
    hot = np.flatnonzero(seconds[start:end] > sending_s * (1 + 1e-9))
    return LinkLoad(
        seconds=float(seconds[worst]),
        sending_seconds=sending_s,
        kind=fabric.kind_of(worst),
        paths=float(crossing),
        capacity=float(capacity[worst]),
        hot_links=_for_each_switch(fabric, kind, hot),
    )


def _for_each_switch(fabric: Fabric, kind: int, links: Indices) -> float:
    """Hot links of a switch that has any: numbers of links are in blocks, one for each switch that sends over them."""
    if not len(links):
        return 0.0
    up, above = fabric.tor_uplinks, max(fabric.aggregation_uplinks, 1)
    switch = {
        0: links,
        1: fabric.tor_of(links // fabric.nics_per_host, links % fabric.nics_per_host),
        2: links // up,
        3: links // (up * fabric.groups_per_pod * fabric.tors_per_group) * up + links % up,
        4: links // above,
        5: links % (up * above),
    }[kind]
    return len(links) / len(np.unique(switch))


_DRAWS = 2
_MOST_FLOWS = 200_000


def flow_shares(
    shape: PhaseShape, fabric: Fabric, hashing: Hashing, placement: Placement, queue_pairs: int
) -> Mapping[str, float]:
    """Mean, lowest, 1st and 50th percentile of fair rates over what a flow gets alone, of two draws of the hashes.

    A flow alone gets its part of its NIC. Its connections carry equal parts of it, so the slowest sets their pace.
    """
    shares = np.concatenate([_shares(shape, fabric, hashing, placement, queue_pairs, draw) for draw in range(_DRAWS)])
    low, middle = np.percentile(shares, [1, 50])
    return {"mean": float(shares.mean()), "lowest": float(shares.min()), "p1": float(low), "p50": float(middle)}


def _shares(
    shape: PhaseShape, fabric: Fabric, hashing: Hashing, placement: Placement, queue_pairs: int, seed: int
) -> np.ndarray:
    flows = place_flows(shape, fabric, placement, seed)
    if len(flows) * queue_pairs > _MOST_FLOWS:  # whole groups, as many as there is room for
        flows = flows.chosen(flows.group <= np.sort(flows.group)[_MOST_FLOWS // queue_pairs])
    paths = choose_paths(fabric, flows, hashing, queue_pairs, seed)
    crossings = Crossings.of_paths(paths, np.repeat(np.arange(len(flows)), queue_pairs), len(flows), fabric.num_links)
    rates = queue_pairs * max_min_rates(crossings, fabric.capacities())
    on_nic = np.bincount(paths[::queue_pairs, 0], minlength=fabric.num_links)[paths[::queue_pairs, 0]]
    return np.asarray(rates / (fabric.nic_bytes_per_s / on_nic))


_EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Crossings:
    """Which item crosses which link, and with what weight; each pair once."""

    link: Indices
    item: Indices
    weight: Floats
    items: int  # how many there are; every one crosses at least one link

    @classmethod
    def of_paths(cls, paths: Indices, item: Indices, items: int, num_links: int) -> Crossings:
        """Of paths over links (-1: no link), each of one item."""
        there = paths.ravel() >= 0
        keys = np.repeat(item, paths.shape[1])[there] * num_links + paths.ravel()[there]
        unique, counts = np.unique(keys, return_counts=True)
        return cls(unique % num_links, unique // num_links, counts.astype(float), items)


def max_min_rates(crossings: Crossings, capacity: Floats) -> Floats:
    """The fair rate of every item, in the unit of `capacity` for each unit of weight.

    In each round all links that are narrowest among those that their items cross are filled at once: the level at which
    such a link is full does not depend on what the others do. So rounds are few, however many links there are.
    """
    rates = np.full(crossings.items, np.inf)
    left = np.asarray(capacity, dtype=float).copy()
    link, item, weight = crossings.link, crossings.item, crossings.weight
    while len(link):
        # The level at which each link is full if nothing else stops its items.
        load = np.bincount(link, weights=weight, minlength=len(left))
        share = np.full(len(left), np.inf)
        np.divide(left, load, out=share, where=load > 0)
        narrowest = np.full(crossings.items, np.inf)
        np.minimum.at(narrowest, item, share[link])
        least = np.full(len(left), np.inf)
        np.minimum.at(least, link, narrowest[item])
        is_full = share <= least * _EQUAL
        settled = np.zeros(crossings.items, dtype=bool)
        settled[item[is_full[link]]] = True
        rates[settled] = narrowest[settled]
        goes = settled[item]
        left -= np.bincount(link[goes], weights=weight[goes] * rates[item[goes]], minlength=len(left))
        np.maximum(left, 0.0, out=left)
        link, item, weight = link[~goes], item[~goes], weight[~goes]
    return rates
