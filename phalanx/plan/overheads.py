"""What a step takes beside its passes and messages: optimizer, norms, small messages, loader, slow ranks, start-up.

The residual is what steps take beyond what the model explains, and how far predictions are off. Its numbers come from
`phalanx.plan.validate.left_out`, which learns them from published steps that nobody had looked at when the planner was
made; a test compares both.

A synchronous step waits for the slowest of its ranks: order statistics. Two kinds of slowness add up differently:
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.optim.config import Kind
from phalanx.parallel.config import Schedule
from phalanx.plan.hardware.cluster import EFFICIENCY, Cluster, load_device
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.jobs import moment_bytes_of
from phalanx.plan.operations import weight_bytes
from phalanx.plan.stages import Weights
from phalanx.plan.types import BYTES, Floats, Ints, Job, Residual, Strategy

Array: TypeAlias = NDArray[np.float64]

_SCALAR_BYTES = 8
IN_STEP = "loader.in_step_s"  # of a cluster: what making a batch before its step takes, where a program does so


def step_overheads(
    job: Job, strategy: Strategy, cluster: Cluster, weights: Weights, computing_s: Floats, step_s: Floats
) -> dict[str, Floats]:
    """Exposed seconds by path.

    Args:
        computing_s: of the step's passes, which slow ranks make longer.
        step_s: of all passes and exchanges.
    """
    device = cluster.device
    # The norm is summed over the ranks that hold different weights; the ranks of data agree on the step.
    over_model = cluster.collective_s("all_reduce", _SCALAR_BYTES, strategy.tensor * strategy.pipeline, strategy.data)
    over_data = cluster.collective_s("all_reduce", _SCALAR_BYTES, strategy.data, strategy.tensor * strategy.context)
    clear_s = device.stream_s(weights.total * job.software.gradient_bytes) * device.stream_ratio("gradient_clear")
    found = {
        "optimizer/update": update_s(job, strategy, device, weights.total),
        "optimizer/norm": norm_s(job, strategy, device, weights.total),
        "optimizer/clear": clear_s,
        "optimizer/casts": cast_s(job, device, weights.total, weight_bytes(job, strategy)),
        "sync": over_model + over_data,
        "data/tied_embedding": tied_embedding_s(job, strategy, cluster),
        "stragglers": waiting_s(strategy, cluster, computing_s),
    }
    # The loader comes last: it works beside the whole step, so only what it takes longer than everything else counts.
    return found | {"loader": loader_s(job, strategy, cluster, step_s + sum(found.values()))}


def tied_embedding_s(job: Job, strategy: Strategy, cluster: Cluster) -> Floats:
    """The first and the last stage add their gradients of one embedding (arXiv 1909.08053)."""
    if not job.model.tie_embeddings:
        return 0.0
    rows = job.model.vocab_rows / strategy.tensor
    num_bytes = rows * job.model.hidden * job.software.reduce_bytes
    stride = (strategy.pipeline - 1) * strategy.data * strategy.context * strategy.tensor
    # Both ends are the first and the last rank of a pipeline. On one stage it is a group of one, whose stride still has
    # to be 1.
    pair = 1 + (strategy.pipeline > 1)
    return cluster.collective_s("all_reduce", num_bytes, pair, stride + (strategy.pipeline == 1))


def loader_s(job: Job, strategy: Strategy, cluster: Cluster, step_s: Floats) -> Floats:
    """Making the next batch and copying it to the devices: before the step, or beside it; then only what it takes
    longer than all else counts.
    """
    if not job.software.loader_hidden and IN_STEP in cluster.numbers:
        return cluster.value(IN_STEP)
    # Ids are int64.
    tokens = job.tokens / (strategy.data * strategy.context)
    seconds = cluster.value("loader.step_s") + tokens * 8 / cluster.value("loader.copy_bytes_per_s")
    if not job.software.loader_hidden:
        return seconds
    # Products with a comparison instead of `max`: both may be arrays.
    return (seconds - step_s) * (seconds > step_s)


_STATE_PASSES: Mapping[Kind, float] = {"adamw": 2.0, "lamb": 2.0, "came": 1.0, "muon": 1.0}
"""Moments of each weight that are read and written: two, or one (CAME's other moments are vectors). They are fp32, but
AdamW's perhaps of fewer bits."""
_EXTRA_READS: Mapping[Kind, float] = {"adamw": 0.0, "lamb": 3.0, "came": 4.0, "muon": 0.0}
"""fp32 passes more: LAMB writes its update, reads it for its norm and again to apply it; CAME reads the squared
gradient and the squared residual twice each, once for the sums along either axis (arXiv 2307.02047, algorithm 2)."""
_MUON_FLOPS_PER_ELEMENT_AND_ROW = 5 * 6.0
"""Five Newton-Schulz iterations with three products of 2 FLOPs per element and row of the shorter side."""


def update_s(job: Job, strategy: Strategy, device: Device, weights: Floats) -> Floats:
    """Seconds to update `weights` elements of a rank: one pass over gradients, moments and weights.

    Only its share where optimizer state is split.
    """
    own = weights / strategy.shard if strategy.zero else weights
    software, kind = job.software, job.optimizer
    moments = 2 * moment_bytes_of(job) * _STATE_PASSES[kind] + 4 * _EXTRA_READS[kind]
    # fp32 masters are read and written, and the weights written beside them; without masters the weights are read and
    # written.
    masters = 8 + software.weight_bytes if software.master_bytes else 2 * software.weight_bytes
    seconds = device.stream_s(own * (software.gradient_bytes + moments + masters))
    if kind == "muon":
        # AdamW updates embedding and head. Every matrix of a block is orthogonalised on whichever rank has it whole, in
        # bf16 whatever the layers compute in, but on CPUs that are slow with it (phalanx.optim.muon).
        width = job.model.hidden
        matrices = 2 - ((strategy.pipeline > 1) | job.model.tie_embeddings)
        words = matrices * job.model.vocab_rows * width / strategy.tensor
        square_s = device.gemm_s(width, width, width, precision="bf16" if device.has_times_of("bf16") else "fp32")
        turned = (own - words) * (own > words)
        seconds += _MUON_FLOPS_PER_ELEMENT_AND_ROW * turned * width * square_s / (2.0 * width**3)
    return seconds * device.stream_ratio(f"{kind}_update")


def cast_s(job: Job, device: Device, weights: Floats, weight_bytes: int) -> Floats:
    """Seconds to cast the updated matrices to what is multiplied, where they are kept wider and as a whole."""
    narrow = BYTES[job.precision]
    if not job.software.is_phalanx or weight_bytes == narrow:
        return 0.0
    # Rows of an embedding are looked up in fp32; only a head that shares them multiplies.
    looked_up = 0 if job.model.tie_embeddings else job.model.vocab_rows * job.model.hidden
    return device.stream_s((weights - looked_up) * (weight_bytes + narrow))


def norm_s(job: Job, strategy: Strategy, device: Device, weights: Floats) -> Floats:
    """Seconds to read all gradients once for their norm, and again to scale them."""
    own = weights / strategy.shard if strategy.zero else weights
    seconds = device.stream_s(own * job.software.gradient_bytes) + device.stream_s(
        own * job.software.gradient_bytes * 2
    )
    return seconds * device.stream_ratio("gradient_norm")


def start_up_s(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> dict[str, Floats]:
    """Seconds by path: starting processes, making groups, reading weights and optimizer state of a checkpoint.

    One rank of each group that holds the same state reads it (MegaScale, section 4); all do so at once.
    """
    state_bytes = weights.total * (job.software.master_bytes + job.software.weight_bytes + 2 * moment_bytes_of(job))
    readers = strategy.tensor * strategy.pipeline * (strategy.shard if strategy.zero else 1)
    return {
        "start_up/processes": cluster.value("start_up.process_s"),
        "start_up/groups": cluster.value("start_up.groups_s"),
        "start_up/restore": state_bytes
        / (strategy.shard if strategy.zero else 1)
        * readers
        / cluster.value("start_up.read_bytes_per_s"),
    }


LEARNT = Residual(kernels=3.63, spread=0.228)  # of a program and a cluster that nobody has measured

OWN_SPREAD = 0.056
"""Of a program on a cluster whose efficiency is known: how far steps of one publication lie around their median."""

_LEARNT_ON = ("a100_sxm_80gb", "h100_sxm", "h200_sxm")
"""What it is learnt on, and the one whose cores are the same. Devices that were measured have no such residual."""
_SAME_WITHIN = 0.08  # of two devices that are one: data sheets and drivers differ in what 80 GB are


@dataclass(frozen=True)
class JudgedSteps:
    """The published steps of a program."""

    precisions: frozenset[str]
    fewest: int  # ranks
    most: int


JUDGED: Mapping[str, JudgedSteps] = {
    "megatron-core": JudgedSteps(frozenset(("bf16",)), 8, 16_384),
    "fsdp2": JudgedSteps(frozenset(("bf16",)), 8, 128),
    "fsdp2-compiled": JudgedSteps(frozenset(("bf16",)), 8, 128),
    "megatron-deepspeed": JudgedSteps(frozenset(("bf16", "fp16")), 384, 384),
    "megatron-lm-2022": JudgedSteps(frozenset(("fp16",)), 8, 32),
}
"""Where predictions were judged, all of dense models; elsewhere nothing is learnt and no interval known."""
_BEYOND = 2  # times fewer or more ranks than published steps had

LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.1, 2.0


def with_residual(job: Job, cluster: Cluster) -> Job:
    """The same with what is to be added on `cluster`, unless it has its own."""
    return job if job.residual is not None else replace(job, residual=residual_of(job, cluster))


def unjudged(job: Job, cluster: Cluster) -> str:
    """Why predictions of `job` on `cluster` were never judged on published steps; empty where they were."""
    name, steps = job.software.name, JUDGED.get(job.software.name)
    if not _is_learnt_on(*_identity(cluster.device)):
        return f"no published steps on {cluster.device.name}"
    if steps is None:
        return f"no published steps of {name}"
    if job.fp8 or job.precision not in steps.precisions:
        return f"no published steps of {name} in {'fp8' if job.fp8 else job.precision}"
    if job.model.experts:
        return "no published steps of mixtures of experts"
    if not steps.fewest <= cluster.devices * _BEYOND or not cluster.devices <= steps.most * _BEYOND:
        return f"published steps of {name} had {steps.fewest:,} to {steps.most:,} ranks"
    return ""


def residual_of(job: Job, cluster: Cluster, efficiency: float | None = None) -> Residual:
    """What is to be added to predictions of `job` on `cluster`.

    Args:
        efficiency: of a program there, from `phalanx plan validate --tables FILE`; None: that of the cluster's file,
            if it has one.
    """
    learnt = Residual() if unjudged(job, cluster) else LEARNT
    if efficiency is None:
        if EFFICIENCY not in cluster.numbers:
            return learnt
        efficiency = cluster.value(EFFICIENCY)
    if not LEAST_EFFICIENCY <= efficiency <= MOST_EFFICIENCY:
        raise UserError(
            "is no share of the predicted speed",
            cure=f"give predicted over measured seconds, from {LEAST_EFFICIENCY} to {MOST_EFFICIENCY:g}, such as 0.93 "
            "(phalanx plan validate --tables FILE says it of your own steps)",
            field="--efficiency",
            value=efficiency,
        )
    return Residual(learnt.kernels, efficiency, OWN_SPREAD if learnt.spread else 0.0)


def _identity(device: Device) -> tuple[float, float, float]:
    """What tells devices apart, whatever their files are called: FLOP/s, bytes/s and bytes."""
    return device.peak_flops_per_s("bf16"), device.memory_bytes_per_s, device.memory_bytes


@lru_cache(maxsize=256)
def _is_learnt_on(*identity: float) -> bool:
    known = (_identity(load_device(name)) for name in _LEARNT_ON)
    return any(
        all(abs(own / other - 1) <= _SAME_WITHIN for own, other in zip(identity, each, strict=True)) for each in known
    )


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


_REACH = 9.0  # standard deviations to both sides beyond which nothing is
_POINTS = 601
_MOST = 1e8  # the most draws of a table
_ALL_UP_TO = 128  # draws up to which a table has every number; from there on every one more by a share
_SHARE = 1.06


@dataclass(frozen=True)
class Spread:
    """How unequal ranks are."""

    # Of one rank's time for one micro-batch, all its passes together, relative; drawn anew each time. Ranks of a
    # tensor-parallel group, which wait for each other in every layer, count as one.
    pass_sigma: float = 0.0
    lasting_sigma: float = 0.0  # of the logarithm of healthy ranks' speeds, from rank to rank, for the whole run
    slow_share: float = 0.0  # of hosts that are slow for the whole run
    slow_excess: float = 0.0  # how much longer a slow host takes, relative

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
    """Seconds that a step takes beyond one whose ranks are all equal."""

    mean_s: Floats
    step_sigma_s: Floats  # how far it spreads from step to step
    run_sigma_s: Floats  # how far its mean spreads from one choice of hosts to another


def most_of_normals(draws: Floats) -> Most:
    """The largest of `draws` independent standard normal numbers, within 2e-5; `draws` may be an array."""
    return _looked_up(_normals(), draws)


def slowest(spread: Spread, ranks: Ints, ranks_per_host: int) -> Most:
    """Time of the rank that is slowest for the whole run, over that of the mean healthy one."""
    hosts = np.ceil(np.asarray(ranks) / ranks_per_host)
    # Without the lasting spread there is a slow host or there is none: that needs no table.
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
    # The mean of the largest of n draws is the upper end less the integral of F(x)^n.
    mean = points[-1] - np.trapezoid(below, points, axis=1)
    ends = (points[-1] - points[-2]) ** 2 / 6  # trapezoids take so much too much of what rises to its end
    square = points[-1] ** 2 - np.trapezoid(2 * points * below, points, axis=1) + ends
    return _Table(np.log(draws), mean, np.sqrt(np.maximum(0.0, square - mean**2)))
