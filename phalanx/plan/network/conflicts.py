"""How often hashes collide, in closed form: flows that choose among links at random (balls into bins)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def expected_share(flows: int, links: int, speedup: float = 1.0) -> float:
    """The mean share of its own rate that a flow gets from the link that its hash gives.

    With k of the n - 1 other flows on the same link it is ``min(1, s/(k + 1))``, where k is binomial(n - 1, 1/m).

    Args:
        flows: that choose, each for itself, n.
        links: that they choose from, m.
        speedup: how many flows at full rate a link carries, s (2: a 400G uplink above 200G NICs).
    """
    others = _binomial(flows - 1, 1 / links)
    shares = np.minimum(1.0, speedup / np.arange(1, flows + 1))
    return float(np.dot(others, shares))


def free_probability(flows: int, links: int, speedup: float = 1.0) -> float:
    """The probability that a flow's link is not asked for more than it carries."""
    room = math.floor(speedup + 1e-9)
    return float(_binomial(flows - 1, 1 / links)[:room].sum())


def fullest_probability(flows: int, links: int, most: int) -> float:
    """The probability that no link has more than `most` flows, exactly.

    Counts of balls in bins are those of independent Poisson numbers whose sum is known to be n. So it is
    ``P(X <= k)^m · P(sum of m numbers <= k is n) / P(Poisson(n) = n)``; the sum's distribution by repeated convolution.
    """
    if most * links < flows:
        return 0.0
    numbers = np.arange(most + 1)
    log_pmf = numbers * math.log(flows / links) - flows / links - _log_factorials(most)
    total = _convolution_power(np.exp(log_pmf), links, flows)
    log_sum = flows * math.log(flows) - flows - math.lgamma(flows + 1)
    return float(min(1.0, total[flows] / math.exp(log_sum)))


def expected_fullest(flows: int, links: int) -> float:
    """The expected number of flows on the link that has most."""
    mean, most = 0.0, 0
    while most < flows:
        missing = 1 - fullest_probability(flows, links, most)
        mean += missing
        if most * links >= flows and missing < 1e-12:
            break
        most += 1
    return mean


def _binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """Probabilities of 0 to `trials` successes."""
    if chance >= 1 or trials == 0:
        return np.eye(trials + 1)[-1] if chance >= 1 else np.ones(1)
    counts = np.arange(trials + 1)
    logs = _log_factorials(trials)
    ways = logs[-1] - logs - logs[::-1]
    return np.asarray(np.exp(ways + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)))


def _log_factorials(most: int) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


def _convolution_power(pmf: NDArray[np.float64], times: int, most: int) -> NDArray[np.float64]:
    """Distribution of the sum of `times` numbers, as far as `most`."""
    result, factor = np.ones(1), pmf
    while times:
        if times & 1:
            result = np.convolve(result, factor)[: most + 1]
        factor = np.convolve(factor, factor)[: most + 1]
        times >>= 1
    return np.pad(result, (0, max(0, most + 1 - len(result))))
