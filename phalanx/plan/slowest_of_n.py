"""Waiting for the slowest of n ranks of a synchronous step: order statistics.

Two kinds of slowness, as they add up differently:
    from pass to pass: every pass of a rank takes a little more or less than the last (clocks, memory refresh, the
        host). Over the m micro-batches of a step it mostly averages out: sums of m draws spread by sigma / sqrt(m).
    lasting: some chips are slower than others, and some hosts are slow until they are replaced. A step waits for the
        slowest of all ranks, however many micro-batches it has.

Sources: MegaScale (arXiv 2402.15627), section 5: about 0.5 % of machines are substantially slower, some about 10 % in
the same forward pass, and single-GPU products do not show it. Expected maxima of normal draws: H. L. Harter,
"Expected values of normal order statistics", Biometrika 48 (1961).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Floats, Ints, Strategy

Array: TypeAlias = NDArray[np.float64]


def spread_of(cluster: Cluster) -> Spread:
    """How unequal the ranks of `cluster` are, from run to run the same; what varies from pass to pass is not known."""
    return Spread(
        lasting_sigma=cluster.value("stragglers.rank_sigma_ratio"),
        slow_share=cluster.value("stragglers.slow_host_share_ratio"),
        slow_excess=cluster.value("stragglers.slow_host_excess_ratio"),
    )


def waiting_s(strategy: Strategy, cluster: Cluster, computing_s: Floats) -> Floats:
    """Seconds that the slowest of all ranks is expected to take longer for `computing_s` than the mean one."""
    ranks_per_host = min(cluster.devices_per_host, cluster.devices)
    return computing_s * (slowest(spread_of(cluster), strategy.world_size, ranks_per_host).mean - 1)


_REACH = 9.0
"""Standard deviations to both sides beyond which nothing is."""
_POINTS = 601
_MOST = 1e8
"""The most draws of a table."""
_ALL_UP_TO = 128
"""Draws up to which a table has every number; from there on every one more by a share."""
_SHARE = 1.06


@dataclass(frozen=True)
class Spread:
    """How unequal ranks are.

    Attributes:
        pass_sigma: of one rank's time for one micro-batch, all its passes together, relative; drawn anew each time.
            Ranks of a tensor-parallel group, which wait for each other in every layer, count as one.
        lasting_sigma: of the logarithm of healthy ranks' speeds, from rank to rank, for the whole run.
        slow_share: of hosts that are slow for the whole run.
        slow_excess: how much longer a slow host takes, relative.
    """

    pass_sigma: float = 0.0
    lasting_sigma: float = 0.0
    slow_share: float = 0.0
    slow_excess: float = 0.0

    def screened(self) -> Spread:
        """The same where slow hosts are found and left out."""
        return Spread(self.pass_sigma, self.lasting_sigma)


@dataclass(frozen=True, eq=False)
class Most:
    """Mean and standard deviation of the largest of some draws."""

    mean: Floats
    sigma: Floats


@dataclass(frozen=True, eq=False)
class Waiting:
    """Seconds that a step takes beyond one whose ranks are all equal.

    Attributes:
        mean_s: expected.
        step_sigma_s: how far it spreads from step to step.
        run_sigma_s: how far its mean spreads from one choice of hosts to another.
    """

    mean_s: Floats
    step_sigma_s: Floats
    run_sigma_s: Floats


def most_of_normals(draws: Floats) -> Most:
    """The largest of `draws` independent standard normal numbers, within 2e-5; `draws` may be an array."""
    return _looked_up(_normals(), draws)


def slowest(spread: Spread, ranks: Ints, ranks_per_host: int) -> Most:
    """Time of the rank that is slowest for the whole run, over that of the mean healthy one."""
    hosts = np.ceil(np.asarray(ranks) / ranks_per_host)
    if spread.lasting_sigma == 0:
        some = 1 - (1 - spread.slow_share) ** hosts
        return Most(1 + spread.slow_excess * some, spread.slow_excess * np.sqrt(some * (1 - some)))
    return _looked_up(_lasting(spread, ranks_per_host), hosts)


def waiting(
    spread: Spread,
    schedule: Schedule,
    pipeline: Ints,
    chunks: Ints,
    micro_batches: Ints,
    groups: Ints,
    ranks: Ints,
    ranks_per_host: int,
    computing_s: Floats,
) -> Waiting:
    """What unequal ranks add to a synchronous step. Counts and seconds broadcast.

    Args:
        groups: pipelines side by side that wait for each other at the end of the step, data-parallel and context.
        ranks: of the whole job.
        computing_s: of all passes of one rank in a step.
    """
    lasting = slowest(spread, ranks, ranks_per_host)
    last = most_of_normals(groups)
    of_pass = spread.pass_sigma * computing_s / micro_batches
    sigma = pipeline_sigma(schedule, pipeline) * np.sqrt(micro_batches)
    added = pipeline_loss(schedule, pipeline, chunks, micro_batches) + sigma * last.mean
    return Waiting(
        mean_s=computing_s * (lasting.mean - 1) + lasting.mean * of_pass * added,
        step_sigma_s=lasting.mean * of_pass * sigma * last.sigma,
        run_sigma_s=computing_s * lasting.sigma,
    )


def pipeline_loss(schedule: Schedule, ranks: Ints, chunks: Ints, micro_batches: Ints) -> Floats:
    """How much longer a step takes on average because passes vary, in standard deviations of one rank's micro-batch.

    Ranks of a pipeline wait for each other all along. In 1f1b every loop between neighbours is tight, so each
    micro-batch waits anew and nothing averages out; interleaving leaves room between a pass and the one that needs it,
    and only filling and draining wait; where weights are put off, ranks are queues in a row, whose delay grows as the
    largest eigenvalue of a random matrix of their number (Glynn and Whitt 1991; Baryshnikov 2001), 2 sqrt(m p).
    Fitted to the exact recurrence with random passes (2 to 16 ranks, 2 to 16 micro-batches a rank, equal stages, free
    messages), which it meets within a tenth or one standard deviation. Slack lowers it: where one stage takes longer
    than the others, this is too much.
    """
    p, v, m = (np.asarray(count, np.float64) for count in (ranks, chunks, micro_batches))
    if schedule == "1f1b":
        return np.where(p > 1, 1.3 * (1 - 1 / p) ** 1.2 * np.maximum(0, m - 1.5 - 0.7 * np.log2(p)), 0.0)
    filling = (p - 1) * np.sqrt(v - 1)
    if schedule == "interleaved_1f1b":
        return 1.25 * filling
    queues = np.sqrt(m) * np.where(p > 1, 2 * np.sqrt(p) - 1.77 * p ** (-1 / 6), 0.0)
    if schedule == "zbv":
        return np.where(p > 1, queues / 3 + p - 2, 0.0)
    return np.where(p > 1, queues - p / 2, 0.0) + 0.9 * filling


def pipeline_sigma(schedule: Schedule, ranks: Ints) -> Floats:
    """Standard deviation of a step of m micro-batches, over sqrt(m) times that of one rank's micro-batch.

    Fitted as `pipeline_loss`, within a fifth. One rank's step is a sum of independent draws: 1.
    """
    return np.where(np.asarray(ranks) > 1, 0.95 if schedule == "interleaved_1f1b" else 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class _Table:
    """Mean and standard deviation of a maximum by the logarithm of the number of draws."""

    log_draws: Array
    mean: Array
    sigma: Array


def _looked_up(table: _Table, draws: Floats) -> Most:
    place = np.log(draws)
    return Most(*(np.interp(place, table.log_draws, values) for values in (table.mean, table.sigma)))


@lru_cache(maxsize=1)
def _normals() -> _Table:
    points = np.linspace(-_REACH, _REACH, _POINTS)
    return _maxima(points, _log_normal_share(points))


@lru_cache(maxsize=32)
def _lasting(spread: Spread, ranks_per_host: int) -> _Table:
    """Of hosts, each as slow as the slowest of its ranks."""
    sigma, excess = spread.lasting_sigma, 1 + spread.slow_excess
    healthy = np.linspace(math.exp(-_REACH * sigma), math.exp(_REACH * sigma), 4 * _POINTS)
    points = np.union1d(healthy, excess * healthy)  # between both, where no rank is, one step will do

    def share_below(times: Array) -> Array:
        ranks = _log_normal_share((np.log(times) + sigma**2 / 2) / sigma)
        return np.exp(ranks_per_host * ranks)

    hosts = (1 - spread.slow_share) * share_below(points) + spread.slow_share * share_below(points / excess)
    return _maxima(points, np.log(np.maximum(hosts, 1e-300)))


def _log_normal_share(points: Array) -> Array:
    """Logarithm of the share of standard normal numbers below each point, exact at both ends."""
    below, above = (
        np.array([math.erfc(sign * point / math.sqrt(2)) / 2 for point in points.tolist()]) for sign in (-1, 1)
    )
    logarithms: Array = np.where(points > 0, np.log1p(-np.minimum(above, 0.5)), np.log(np.maximum(below, 1e-300)))
    return logarithms


def _maxima(points: Array, log_share: Array) -> _Table:
    """Of 1, 2, … draws from what has a share of exp(log_share) below each point, by integrals."""
    more = int(math.log(_MOST / _ALL_UP_TO) / math.log(_SHARE)) + 1
    draws = np.concatenate([np.arange(1.0, _ALL_UP_TO), _ALL_UP_TO * _SHARE ** np.arange(more)])
    below = np.exp(draws[:, None] * log_share)
    mean = points[-1] - np.trapezoid(below, points, axis=1)
    ends = (points[-1] - points[-2]) ** 2 / 6  # trapezoids take so much too much of what rises to its end
    square = points[-1] ** 2 - np.trapezoid(2 * points * below, points, axis=1) + ends
    return _Table(np.log(draws), mean, np.sqrt(np.maximum(0.0, square - mean**2)))
