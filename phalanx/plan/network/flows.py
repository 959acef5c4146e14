"""Who sends how much to whom in a phase of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.network.traffic import Phase

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Flows:
    """Messages between NICs, one entry each.

    Attributes:
        group: which collective a flow is part of; the flows of one go at the pace of its slowest.
    """

    source_host: Indices
    source_nic: Indices
    target_host: Indices
    target_nic: Indices
    num_bytes: NDArray[np.float64]
    group: Indices

    def __len__(self) -> int:
        return len(self.group)

    def repeated(self, times: int) -> Flows:
        """Each flow `times` over, with its share of the bytes."""
        if times == 1:
            return self
        return Flows(
            np.repeat(self.source_host, times),
            np.repeat(self.source_nic, times),
            np.repeat(self.target_host, times),
            np.repeat(self.target_nic, times),
            np.repeat(self.num_bytes / times, times),
            np.repeat(self.group, times),
        )

    def chosen(self, which: NDArray[np.bool_]) -> Flows:
        """Those of which `which` is true."""
        return Flows(
            self.source_host[which],
            self.source_nic[which],
            self.target_host[which],
            self.target_nic[which],
            self.num_bytes[which],
            self.group[which],
        )

    def moved(self, position: Indices) -> Flows:
        """The same flows where host h stands at `position[h]`."""
        return Flows(
            position[self.source_host],
            self.source_nic,
            position[self.target_host],
            self.target_nic,
            self.num_bytes,
            self.group,
        )


def make_flows(phase: Phase, devices: int, devices_per_host: int, nics_per_host: int) -> Flows:
    """The messages between hosts of all groups of a phase, for a whole step; nothing for what stays inside hosts.

    Where several members of a group share a host, a ring crosses between hosts once for each of them, each time with
    its share of the bytes and over its own NIC.
    """
    members = _members(phase, devices)
    inside = min(phase.ranks, max(1, devices_per_host // phase.stride))
    source, target, group, share = _PATTERNS[phase.pattern](members, inside)
    source_host, target_host = source // devices_per_host, target // devices_per_host
    source_nic = source % devices_per_host * nics_per_host // devices_per_host
    target_nic = target % devices_per_host * nics_per_host // devices_per_host
    num_bytes = np.full(len(source), phase.rank_bytes * share)
    flows = Flows(source_host, source_nic, target_host, target_nic, num_bytes, group)
    return flows.chosen(source_host != target_host)


Pattern = tuple[Indices, Indices, Indices, float]
"""Ranks that send, ranks that receive, their groups, and which share of its bytes a rank sends in each flow."""


def _members(phase: Phase, devices: int) -> Indices:
    """Ranks of each group, (groups, members)."""
    blocks = np.arange(devices, dtype=np.int64).reshape(-1, phase.ranks, phase.stride)
    return blocks.transpose(0, 2, 1).reshape(-1, phase.ranks)


def _ring(members: Indices, inside: int) -> Pattern:
    """From host to host, and around: the j-th member of each host to the j-th of the next one."""
    blocks = members.reshape(len(members), -1, inside)
    group = np.repeat(np.arange(len(members)), members.shape[1])
    return blocks.ravel(), np.roll(blocks, -1, axis=1).ravel(), group, 1.0 / inside


def _neighbours(members: Indices, inside: int) -> Pattern:
    """A ring in both directions: what went forward comes back as gradients."""
    source, target, group, share = _ring(members, inside)
    return np.r_[source, target], np.r_[target, source], np.r_[group, group], share


def _all_to_all(members: Indices, inside: int) -> Pattern:
    """Every member to every other, the same share of its bytes to each."""
    groups, ranks = members.shape
    others = [np.roll(members, -step, axis=1).ravel() for step in range(1, ranks)]
    source = np.tile(members.ravel(), ranks - 1)
    group = np.tile(np.repeat(np.arange(groups), ranks), ranks - 1)
    return source, np.concatenate([source[:0], *others]), group, 1.0 / max(ranks - 1, 1)


def _incast(members: Indices, inside: int) -> Pattern:
    """All others to the first member."""
    groups, ranks = members.shape
    target = np.repeat(members[:, 0], ranks - 1)
    return members[:, 1:].ravel(), target, np.repeat(np.arange(groups), ranks - 1), 1.0


_PATTERNS = {"ring": _ring, "neighbours": _neighbours, "all_to_all": _all_to_all, "incast": _incast}
