"""Max-min fair rates: how links are shared by whoever crosses them.

Water rises at the same pace in all items until a link is full; its items stay at that level, the others go on
(Bertsekas and Gallager, Data Networks, 6.5.2). An item is a flow, or a collective whose flows all go at the pace of its
slowest: it crosses a link with a weight, how many of its flows do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

_EQUAL = 1 + 1e-9


@dataclass(frozen=True)
class Crossings:
    """Which item crosses which link, and with what weight; each pair once.

    Attributes:
        items: how many there are; every one crosses at least one link.
    """

    link: Indices
    item: Indices
    weight: Floats
    items: int

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
        share = _shares(left, link, weight)
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


def _shares(left: Floats, link: Indices, weight: Floats) -> Floats:
    """The level at which each link is full if nothing else stops its items."""
    load = np.bincount(link, weights=weight, minlength=len(left))
    share = np.full(len(left), np.inf)
    np.divide(left, load, out=share, where=load > 0)
    return share
