"""The shuffle: which sample comes next, by keyed permutations and exact mixtures, without an index in memory.

Both are pure functions of (key, index), so the order of a run is a function of its seed alone: any process can work out
any part of it, and a loader's place in it is one number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
ROUNDS = 6
# Shares are exact to one in 65,536; the pattern of a period takes 1 MiB.
MIXTURE_PERIOD = 1 << 16


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that is a hash of `parts`; different parts give independent keys."""
    # With their types and a separator: 1 and "1", or ("a", "bc") and ("ab", "c"), are different keys.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


class Permutation:
    """A pseudo-random bijection of ``0..size-1`` chosen by `key`, in constant memory.

    A Feistel network on the rectangle ``a x b >= size`` with additions modulo a and b (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002; with cycle walking). Because ``a b - size < a``, hardly any index has
    to walk.
    """

    def __init__(self, key: int, size: int) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: a permutation needs at least one element")
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._keys = [np.uint64(derive_key(key, r)) for r in range(ROUNDS)]

    def __call__(self, index: Int64) -> Int64:
        """The images of `index`, any shape, each in ``0..size-1``."""
        # Cycle walking: what falls outside goes through the network again until it is inside, which keeps it bijective.
        place = self._network(np.asarray(index, np.int64))
        outside = place >= self.size
        while outside.any():
            place[outside] = self._network(place[outside])
            outside = place >= self.size
        return place

    def _network(self, index: Int64) -> Int64:
        left, right = np.divmod(index.astype(np.uint64), np.uint64(self._columns))
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mix(left ^ key)) % np.uint64(self._columns)
            else:
                left = (left + _mix(right ^ key)) % np.uint64(self._rows)
        return (left * np.uint64(self._columns) + right).astype(np.int64)


class Mixture:
    """An exact weighted mixture: global sample index -> (source, index within that source).

    The pattern of sources repeats every `MIXTURE_PERIOD` samples. A source of share p has ``round(p * period)`` places
    in it (at least one), spread evenly, and its own indices come in order without a gap: 0, 1, 2, ...
    """

    def __init__(self, weights: Sequence[float]) -> None:
        quotas = _quotas(np.asarray(weights, np.float64))
        source = np.repeat(np.arange(len(quotas)), quotas)
        rank = np.concatenate([np.arange(q) for q in quotas])
        # Place k of a source with q places is due at (k + 0.5) / q of the period: all are spread evenly, whatever q.
        order = np.lexsort((source, (rank + 0.5) / quotas[source]))
        self.quotas: Int64 = quotas
        self._source: Int64 = source[order]
        self._rank: Int64 = rank[order]

    def locate(self, index: Int64) -> tuple[Int64, Int64]:
        """For global sample indices: the source of each, and the index within it."""
        period, place = np.divmod(np.asarray(index, np.int64), len(self._source))
        source = self._source[place]
        return source, period * self.quotas[source] + self._rank[place]


def _quotas(weights: NDArray[np.float64]) -> Int64:
    """Places of each source in a period, by largest remainder, at least one each."""
    if len(weights) == 1:
        return np.ones(1, np.int64)
    if len(weights) > MIXTURE_PERIOD or not (weights > 0).all():
        raise ValueError(f"a mixture takes 1 to {MIXTURE_PERIOD} positive weights")
    # One place each is set aside first, so that no small share is rounded to nothing.
    free = MIXTURE_PERIOD - len(weights)
    exact = weights / weights.sum() * free
    quotas = np.floor(exact).astype(np.int64)
    missing = free - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    result: Int64 = quotas + 1
    return result


def _mix(value: NDArray[np.uint64]) -> NDArray[Any]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), shifted down so that a sum cannot overflow."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) >> np.uint64(1)
