"""Where replicas go: which host keeps the replica of which, and through which network interface.

What may be lost together must not hold both copies: a host, a rack (a switch, a power supply), and a parallel group
that is evicted as a whole because nobody knows which of its hosts is the faulty one (ByteRobust). Placement is pure,
and the same on every rank; `choose` is a pure function of the table of facts that `interfaces_here` makes.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.core.addresses import names_interface
from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Axis, Layout


@dataclass(frozen=True)
class HostInfo:
    """Attributes: rack: None: not known; groups: names of what may be evicted together with this host."""

    name: str
    rack: str | None = None
    groups: frozenset[str] = frozenset()


class ReplicaPlaces(NamedTuple):
    """Which host keeps the replica of which; by name."""

    peer_of: dict[str, str]
    warnings: Sequence[str]


_RULES = (
    "",
    "a host of the same rack",
    "a host of the same parallel group",
    "a host of the same rack and parallel group",
)
"""What a host's peer is, by the number of the first row of `_candidates` in which there is one."""


def place_replicas(hosts: Sequence[HostInfo]) -> ReplicaPlaces:
    """A peer for every host.

    Of the following, the first kind that exists for a host: a host of another rack and no common group; of no common
    group; of another rack; any other. Among those, the most replicas that a host has to keep are as few as possible:
    one each, wherever that can be. So balance gives way before the rules do, the rack before the group, and each is
    said in `warnings`. A rack that is not known is taken to be none of the others'.

    Raises:
        ValueError: two hosts have the same name.
    """
    hosts = sorted(hosts, key=lambda host: host.name)
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError(f"two hosts have the same name: {', '.join(names)}")
    if len(hosts) < 2:
        return ReplicaPlaces({}, ["there is one host only: no replicas, and its loss takes the snapshots in memory"])
    rows = _candidates(hosts)
    kinds = [next(kind for kind, row in enumerate(rows[i]) if row) for i in range(len(hosts))]
    peers = _assign([rows[i][kind] for i, kind in enumerate(kinds)])
    peer_of = {names[i]: names[j] for i, j in enumerate(peers)}
    return ReplicaPlaces(peer_of, _warnings(hosts, kinds, peers))


def groups_of_hosts(
    layout: Layout, ranks: Mapping[str, Sequence[int]], axes: Sequence[Axis] = ("pipeline", "context", "tensor")
) -> dict[str, frozenset[str]]:
    """The groups along `axes` that the ranks of each host are in, for `HostInfo.groups`.

    Not by default along replicate and shard: where data parallelism is all there is, they hold every host.

    Args:
        ranks: of every host, by its name.
    """
    split = [(axis, AXES.index(axis)) for axis in axes if layout.size(axis) > 1]
    groups: dict[str, set[str]] = {host: set() for host in ranks}
    for host, own in ranks.items():
        for rank in own:
            here = layout.coordinates(rank)
            for axis, place in split:
                others = ".".join("*" if i == place else str(digit) for i, digit in enumerate(here))
                groups[host].add(f"{axis} {others}")
    return {host: frozenset(names) for host, names in groups.items()}


# Sets of hosts are integers, a bit for each: with 1,536 hosts a set is 192 bytes, and all of the below takes a tenth of
# a second (Python's sets: many seconds).


def _candidates(hosts: Sequence[HostInfo]) -> list[tuple[int, ...]]:
    """For every host, the sets of possible peers, best kind first."""
    racks: dict[str, int] = {}
    groups: dict[str, int] = {}
    for i, host in enumerate(hosts):
        if host.rack is not None:
            racks[host.rack] = racks.get(host.rack, 0) | 1 << i
        for group in host.groups:
            groups[group] = groups.get(group, 0) | 1 << i
    everyone = (1 << len(hosts)) - 1
    rows: list[tuple[int, ...]] = []
    for i, host in enumerate(hosts):
        others = everyone & ~(1 << i)
        same_rack = 0 if host.rack is None else racks[host.rack]
        same_group = 0
        for group in host.groups:
            same_group |= groups[group]
        rows.append((others & ~same_rack & ~same_group, others & ~same_group, others & ~same_rack, others))
    return rows


def _assign(allowed: list[int]) -> list[int]:
    """One of the allowed for each, so that the most often chosen one is chosen as seldom as possible.

    Augmenting paths (as in Kuhn's algorithm) with a number of places for each that grows only when it has to.
    """
    places = _Places(allowed)
    left = list(range(len(allowed)))
    while left:
        left = [i for i in left if not places.seat(i)]
        if left:
            places.add_places()
    return [places.seat_of[i] for i in range(len(allowed))]


class _Places:
    def __init__(self, allowed: list[int]) -> None:
        self._allowed = allowed
        self._room = 1
        self._free = (1 << len(allowed)) - 1
        self._hopeless = 0  # found by a search that failed: no later one gets further from there
        self._guests: list[set[int]] = [set() for _ in allowed]
        self.seat_of: dict[int, int] = {}

    def add_places(self) -> None:
        self._room += 1
        self._free = (1 << len(self._allowed)) - 1
        self._hopeless = 0

    def seat(self, newcomer: int) -> bool:
        """Find a place for one more, moving others to where they may sit too."""
        came_from: dict[int, tuple[int, int]] = {}
        waiting = deque([newcomer])
        seen = self._hopeless
        while waiting:
            i = waiting.popleft()
            reached = self._allowed[i] & ~seen
            if reached & self._free:
                # The first free place at `i` or after it, around the end.
                free = reached & self._free
                self._move(i, _lowest(free >> i << i or free), came_from)
                return True
            seen |= reached
            for j in _bits(reached):
                for guest in sorted(self._guests[j]):
                    came_from[guest] = (i, j)
                    waiting.append(guest)
        self._hopeless = seen
        return False

    def _move(self, i: int, to: int, came_from: dict[int, tuple[int, int]]) -> None:
        if len(self._guests[to]) + 1 == self._room:
            self._free &= ~(1 << to)
        while True:
            if i in self.seat_of:
                self._guests[self.seat_of[i]].discard(i)
            self.seat_of[i] = to
            self._guests[to].add(i)
            if i not in came_from:
                break
            i, to = came_from[i]


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield _lowest(mask)
        mask &= mask - 1


def _warnings(hosts: Sequence[HostInfo], kinds: Sequence[int], peers: Sequence[int]) -> list[str]:
    lines = []
    unknown = [host.name for host in hosts if host.rack is None]
    if unknown:
        lines.append(f"the rack of {_some(unknown)} is not known: a replica may share it")
    for kind in sorted(set(kinds) - {0}):
        names = [host.name for host, own in zip(hosts, kinds, strict=True) if own == kind]
        lines.append(f"no better peer than {_RULES[kind]} exists for {_some(names)}: one loss can take both copies")
    loads = [peers.count(j) for j in range(len(hosts))]
    if max(loads) > 1:
        full = [hosts[j].name for j, load in enumerate(loads) if load == max(loads)]
        lines.append(f"{_some(full)} keeps {max(loads)} replicas, as others have no better peer: it needs the memory")
    return lines


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


VARIABLE = "PHALANX_INTERFACE"

# In the order in which they are asked; the first has the syntax of the second.
_NCCL, _GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

_VIRTUAL = (
    *("docker", "br-", "veth", "virbr", "vnet", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "podman", "kube"),
    *("tun", "tap", "wg", "tailscale", "dummy", "ifb"),
)


@dataclass(frozen=True)
class Interface:
    """What is known of one.

    Attributes:
        addresses: IPv4 first, then IPv6; none that only mean something on one link.
        bits_per_s: None: unknown.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    bits_per_s: int | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere."""
        return bool(self.addresses) and all(ipaddress.ip_address(address).is_loopback for address in self.addresses)


@dataclass(frozen=True)
class Network:
    """Where a keeper listens.

    Attributes:
        why: it was chosen; for people.
    """

    interface: str
    addresses: tuple[str, ...]
    bits_per_s: int | None
    why: str

    def endpoint(self, host: str, port: int) -> Endpoint:
        """For other hosts. (It listens at the first address only.)"""
        return Endpoint(host, self.addresses[:1], port, self.interface, self.bits_per_s)


LOOPBACK = Network("lo", ("127.0.0.1",), None, "one host")
"""Where nobody on another host can come."""


def network(hosts: int, environment: Mapping[str, str]) -> Network:
    """Where the keeper of this host is to listen in a job of so many hosts: at loopback unless there are several.

    Raises:
        UserError: ``PHALANX_INTERFACE`` names none that there is.
    """
    return LOOPBACK if hosts <= 1 else choose(interfaces_here(), environment)


def choose(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> Network:
    """The interface to reach other hosts by.

    What is down or has no address is never chosen, loopback only where ``PHALANX_INTERFACE`` names it or there is
    nothing else (several keepers play several hosts on one). ``PHALANX_INTERFACE`` decides, else
    ``NCCL_SOCKET_IFNAME``, else ``GLOO_SOCKET_IFNAME``, among those left; then real ones come before those of
    containers and tunnels, and the fastest comes first. InfiniBand of unknown speed counts as fastest, others of
    unknown speed as slowest.

    Raises:
        UserError: ``PHALANX_INTERFACE`` matches none.
    """
    usable = [each for each in interfaces if each.up and each.addresses]
    named, why = _named(usable, environment)
    if not named:
        return replace(LOOPBACK, why="no interface but loopback is up and has an address: no other host can come")
    best = min(named, key=_rank)
    speed = "of unknown speed" if best.bits_per_s is None else f"{best.bits_per_s / 1e9:g} Gbit/s"
    return Network(best.name, best.addresses, best.bits_per_s, f"{why}, {speed}")


def _named(usable: list[Interface], environment: Mapping[str, str]) -> tuple[list[Interface], str]:
    others = [each for each in usable if not each.is_loopback]
    ignored = ""
    for variable in (VARIABLE, _NCCL, _GLOO):
        pattern = environment.get(variable, "").strip()
        if not pattern:
            continue
        among = usable if variable == VARIABLE else others
        found = [each for each in among if names_interface(pattern, each.name, exact=variable == _GLOO)]
        if found:
            return found, f"{ignored}{variable}={pattern}"
        names = ", ".join(each.name for each in among) or "none"
        if variable == VARIABLE:
            raise UserError(
                "no interface of this name is up and has an address",
                cure=f"name one of: {names}",
                field=variable,
                value=pattern,
            )
        # These are about other libraries' connections, and may be set for other hosts than this one.
        ignored += f"{variable}={pattern} matches none of {names}; "
    return others, f"{ignored}the fastest known"


def _rank(interface: Interface) -> tuple[bool, bool, float, bool, str]:
    infiniband = interface.name.startswith("ib")
    speed = float(interface.bits_per_s or 0) or (float("inf") if infiniband else 0.0)
    return interface.is_loopback, interface.name.startswith(_VIRTUAL), -speed, not infiniband, interface.name


def interfaces_here() -> list[Interface]:
    """Those of this host."""
    states = psutil.net_if_stats()
    rows = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        up = state is not None and state.isup
        speed = _speed(name, 0 if state is None else state.speed)
        reachable = [
            each.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for each in addresses
            if each.family == family and not ipaddress.ip_address(each.address.partition("%")[0]).is_link_local
        ]
        rows.append(Interface(name, tuple(reachable), up, speed))
    return rows


def _speed(name: str, mbit_per_s: int) -> int | None:
    """In bit/s. Of InfiniBand, psutil knows nothing; the kernel tells it of the port behind."""
    if 0 < mbit_per_s != 65535:  # which is what a driver says that does not know
        return mbit_per_s * 1_000_000
    for rate in sorted(Path("/sys/class/net", name, "device", "infiniband").glob("*/ports/*/rate")):
        with suppress(OSError, ValueError, IndexError):
            return int(float(rate.read_text().split()[0]) * 1e9)  # such as "400 Gb/sec (4X NDR)"
    return None
