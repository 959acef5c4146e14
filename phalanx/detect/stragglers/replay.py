"""When everything ends in a graph of what waits for what: longest paths, for many scenarios at once.

Nodes are put in order by level (the length of the longest way to them, in edges), so that all of a level can be
computed at once, of all steps, all workers and all scenarios: a step of 16 workers has some 300 levels, of any number
of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Edges(NamedTuple):
    """Columns of equal length: from which node, to which, and the delay between them, in seconds."""

    source: Numbers
    target: Numbers
    delay_s: Seconds


@dataclass(frozen=True)
class Schedule:
    """Nodes in an order in which each comes after those that it waits for.

    Attributes:
        nodes: how many.
        order: nodes, by level.
        levels: where each level begins in `order`, and the end of the last.
        source, delay_s: edges, by the place of their target in `order`.
        begins: where the edges of each node of `order` begin, and the end of the last.
    """

    nodes: int
    order: Numbers
    levels: Numbers
    source: Numbers
    delay_s: Seconds
    begins: Numbers

    def ends(self, durations_s: Seconds, *, delays: bool = False) -> Seconds:
        """When each node ends, in seconds from the beginning.

        Args:
            durations_s: nodes, or nodes by scenarios.
            delays: count the delay of each edge.
        """
        ends = np.zeros(durations_s.shape)
        delay_s = self.delay_s if durations_s.ndim == 1 else self.delay_s[:, None]
        for low, high in zip(self.levels[1:-1].tolist(), self.levels[2:].tolist(), strict=True):
            nodes = self.order[low:high]
            first, last = int(self.begins[low]), int(self.begins[high])
            ready = ends[self.source[first:last]]
            if delays:
                ready += delay_s[first:last]
            ends[nodes] = np.maximum.reduceat(ready, self.begins[low:high] - first, axis=0) + durations_s[nodes]
        return ends


class CircleError(Exception):
    """What was recorded cannot have happened: `nodes` wait for each other, or for those that do."""

    def __init__(self, nodes: Numbers) -> None:
        super().__init__(f"{len(nodes):,} nodes wait for each other")
        self.nodes = nodes


def schedule_of(nodes: int, edges: Edges) -> Schedule:
    """Put nodes in order; every one but the beginning has an edge.

    Raises:
        CircleError: some wait for each other.
    """
    out = np.argsort(edges.source, kind="stable")
    targets = edges.target[out]
    out_begins = np.searchsorted(edges.source[out], np.arange(nodes + 1))
    waits_for = np.bincount(edges.target, minlength=nodes)
    ready = np.flatnonzero(waits_for == 0)
    order, levels = [ready], [0, len(ready)]
    while len(ready):
        reached = targets[_ranges(out_begins[ready], out_begins[ready + 1])]
        distinct, counts = np.unique(reached, return_counts=True)
        waits_for[distinct] -= counts
        ready = distinct[waits_for[distinct] == 0]
        if len(ready):
            order.append(ready)
            levels.append(levels[-1] + len(ready))
    placed = np.concatenate(order).astype(np.int64)
    if len(placed) < nodes:
        raise CircleError(np.setdiff1d(np.arange(nodes), placed))
    place = np.empty(nodes, np.int64)
    place[placed] = np.arange(nodes)
    into = np.argsort(place[edges.target], kind="stable")
    begins = np.searchsorted(place[edges.target[into]], np.arange(nodes + 1))
    return Schedule(nodes, placed, np.array(levels, np.int64), edges.source[into], edges.delay_s[into], begins)


def _ranges(begins: Numbers, ends: Numbers) -> Numbers:
    """All numbers from each begin to its end, one after the other."""
    lengths = ends - begins
    first = np.cumsum(lengths) - lengths
    found: Numbers = np.repeat(begins - first, lengths) + np.arange(int(lengths.sum()))
    return found
