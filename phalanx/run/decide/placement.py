"""Which host gets which ranks. Pure functions over values; torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.run.decide.state import Host, HostState, State

_THERE: tuple[HostState, ...] = ("joining", "spare", "active", "suspect")


def count_ready(state: State) -> int:
    """How many `ready_hosts` there are, without the cost of looking at each."""
    return state.staying.get("spare", 0) + state.staying.get("active", 0)


def ready_hosts(state: State) -> list[str]:
    """Hosts that may get ranks: connected, checked, and not to leave; in order of rack and name."""
    hosts = state.hosts
    ready = [
        name for name, host in hosts.items() if (host.state == "spare" or host.state == "active") and not host.leaves
    ]
    return sorted(ready, key=lambda name: (hosts[name].rack, name))


def place(previous: tuple[str, ...], ready: list[str], size: int, hosts: Mapping[str, Host]) -> tuple[str, ...]:
    """Hosts of the next attempt in order of their ranks.

    A host keeps its place, and one that replaces another takes the place of that; a replacement of the same rack is
    preferred. If the number of hosts has changed, hosts that had ranks are chosen first, and all are ordered by rack
    and name.

    Args:
        previous: the placement before.
        ready: at least `size` hosts, in order of rack and name.
        hosts: for racks.
    """
    available = set(ready)
    stay = [host for host in previous if host in available]
    if len(previous) != size:
        first = set(stay[:size])
        others = [host for host in ready if host not in first][: size - len(first)]
        return tuple(sorted([*first, *others], key=lambda name: (hosts[name].rack, name)))
    kept = set(stay)
    fresh = [host for host in ready if host not in kept]
    return tuple(host if host in kept else _take(fresh, hosts, host) for host in previous)


def _take(fresh: list[str], hosts: Mapping[str, Host], leaver: str) -> str:
    """The replacement of a host, out of `fresh`."""
    rack = hosts[leaver].rack if leaver in hosts else ""
    same = next((i for i, name in enumerate(fresh) if hosts[name].rack == rack), 0)
    return fresh.pop(same)


def missing_hosts(state: State) -> int:
    """How many hosts the back end should still bring: what job and spares need, less those that are there or may be."""
    # A host that is not heard of may still do its work, but cannot begin any.
    unknown = state.staying.get("unknown", 0) if state.has_workers else 0
    there = unknown + sum(state.staying.get(kind, 0) for kind in _THERE)
    return max(0, state.job.hosts + state.job.spares - there)


def size_to_start(state: State, ready: int) -> int:
    """On how many hosts the job can start now; 0: it has to wait."""
    if ready >= state.job.hosts:
        return state.job.hosts
    since_s = state.lacking_since_s
    has_waited = since_s is not None and state.now_s >= since_s + state.policy.replace_wait_s
    if state.policy.when_missing == "shrink" and has_waited:
        return next((size for size in state.job.sizes() if size <= ready), 0)
    return 0


def can_spare(state: State, leavers: set[str]) -> bool:
    """Whether the job could go on at once without these hosts, as the policy has it."""
    ready = len([name for name in ready_hosts(state) if name not in leavers])
    return ready >= state.job.hosts or (
        state.policy.when_missing == "shrink" and any(size <= ready for size in state.job.sizes())
    )
