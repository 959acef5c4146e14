"""What a step takes beside its passes and messages: optimizer, norms, small messages, loader, slow ranks, start-up.

Also the residual: what steps take beyond what the model explains, and how far predictions are off. Its numbers come
from `phalanx.plan.validate.left_out`, which learns them from published steps that nobody had looked at when the planner
was made; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.optim.config import Kind
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.hardware.hardware_files import EFFICIENCY
from phalanx.plan.operations import weight_bytes
from phalanx.plan.slowest_of_n import waiting_s
from phalanx.plan.stages import Weights
from phalanx.plan.types import BYTES, Floats, Ints, Job, Residual, Strategy

_SCALAR_BYTES = 8
IN_STEP = "loader.in_step_s"
"""Of a cluster: what making a batch before its step takes, where a program does so."""


def step_overheads(
    job: Job, strategy: Strategy, cluster: Cluster, weights: Weights, computing_s: Floats, step_s: Floats
) -> dict[str, Floats]:
    """Exposed seconds by path.

    Args:
        weights: that the rank holds.
        computing_s: of the step's passes, which slow ranks make longer.
        step_s: of all passes and exchanges.
    """
    device = cluster.device
    found = {
        "optimizer/update": update_s(job, strategy, device, weights.total),
        "optimizer/norm": norm_s(job, strategy, device, weights.total),
        "optimizer/clear": clear_s(job, device, weights.total),
        "optimizer/casts": cast_s(job, device, weights.total, weight_bytes(job, strategy)),
        "sync": sync_s(strategy, cluster),
        "data/tied_embedding": tied_embedding_s(job, strategy, cluster),
        "stragglers": waiting_s(strategy, cluster, computing_s),
    }
    # The loader comes last: it works beside the whole step, so only what it takes longer than everything else counts.
    return found | {"loader": loader_s(job, strategy, cluster, step_s + sum(found.values()))}


def sync_s(strategy: Strategy, cluster: Cluster) -> Floats:
    """The step's small messages."""
    over_model = cluster.collective_s("all_reduce", _SCALAR_BYTES, model_ranks(strategy), strategy.data)
    over_data = cluster.collective_s("all_reduce", _SCALAR_BYTES, strategy.data, strategy.tensor * strategy.context)
    return over_model + over_data


def tied_embedding_s(job: Job, strategy: Strategy, cluster: Cluster) -> Floats:
    """The first and the last stage add their gradients of one embedding (arXiv 1909.08053)."""
    if not job.model.tie_embeddings:
        return 0.0
    rows = job.model.vocab_rows / strategy.tensor
    num_bytes = rows * job.model.hidden * job.software.reduce_bytes
    stride = (strategy.pipeline - 1) * strategy.data * strategy.context * strategy.tensor
    pair = 1 + (strategy.pipeline > 1)
    return cluster.collective_s("all_reduce", num_bytes, pair, stride + (strategy.pipeline == 1))


def loader_s(job: Job, strategy: Strategy, cluster: Cluster, step_s: Floats) -> Floats:
    """Making the next batch and copying it to the devices: before the step, or beside it; then only what it takes
    longer than all else counts.

    Args:
        step_s: of all else.
    """
    if not job.software.loader_hidden and IN_STEP in cluster.numbers:
        return cluster.value(IN_STEP)
    tokens = job.tokens / (strategy.data * strategy.context)
    seconds = cluster.value("loader.step_s") + tokens * 8 / cluster.value("loader.copy_bytes_per_s")
    if not job.software.loader_hidden:
        return seconds
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
    moments = 2 * job.moment_bytes * _STATE_PASSES[kind] + 4 * _EXTRA_READS[kind]
    masters = 8 + software.weight_bytes if software.master_bytes else 2 * software.weight_bytes
    seconds = device.stream_s(own * (software.gradient_bytes + moments + masters))
    if kind == "muon":
        words = _vocabulary_weights(job, strategy)
        seconds += _newton_schulz_s(job.model.hidden, device, (own - words) * (own > words))
    return seconds * device.stream_ratio(f"{kind}_update")


def cast_s(job: Job, device: Device, weights: Floats, weight_bytes: int) -> Floats:
    """Seconds to cast the updated matrices to what is multiplied, where they are kept wider and as a whole.

    Args:
        weight_bytes: of one element as it is kept.
    """
    narrow = BYTES[job.precision]
    if not job.software.is_phalanx or weight_bytes == narrow:
        return 0.0
    looked_up = 0 if job.model.tie_embeddings else job.model.vocab_rows * job.model.hidden
    return device.stream_s((weights - looked_up) * (weight_bytes + narrow))


def _vocabulary_weights(job: Job, strategy: Strategy) -> Floats:
    """Elements of embedding and head on a rank, which AdamW updates beside Muon."""
    model = job.model
    matrices = 2 - ((strategy.pipeline > 1) | model.tie_embeddings)
    return matrices * model.vocab_rows * model.hidden / strategy.tensor


def _newton_schulz_s(width: int, device: Device, weights: Floats) -> Floats:
    """Muon's products: every matrix of a block is orthogonalised, on whichever rank has it whole.

    In bf16 whatever the layers compute in, but on CPUs that are slow with it (phalanx.optim.muon).
    """
    square_s = device.gemm_s(width, width, width, precision="bf16" if device.has_times_of("bf16") else "fp32")
    return _MUON_FLOPS_PER_ELEMENT_AND_ROW * weights * width * square_s / (2.0 * width**3)


def norm_s(job: Job, strategy: Strategy, device: Device, weights: Floats) -> Floats:
    """Seconds to read all gradients once for their norm, and again to scale them."""
    own = weights / strategy.shard if strategy.zero else weights
    seconds = device.stream_s(own * job.software.gradient_bytes) + device.stream_s(
        own * job.software.gradient_bytes * 2
    )
    return seconds * device.stream_ratio("gradient_norm")


def clear_s(job: Job, device: Device, weights: Floats) -> Floats:
    """Seconds to set the gradients to zero for the next step."""
    return device.stream_s(weights * job.software.gradient_bytes) * device.stream_ratio("gradient_clear")


def model_ranks(strategy: Strategy) -> Ints:
    """Ranks that hold different weights: those over which the norm is summed."""
    return strategy.tensor * strategy.pipeline


def start_up_s(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> dict[str, Floats]:
    """Seconds by path: starting processes, making groups, reading weights and optimizer state of a checkpoint.

    One rank of each group that holds the same state reads it (MegaScale, section 4); all do so at once.
    """
    state_bytes = weights.total * (job.software.master_bytes + job.software.weight_bytes + 2 * job.moment_bytes)
    readers = strategy.tensor * strategy.pipeline * (strategy.shard if strategy.zero else 1)
    return {
        "start_up/processes": cluster.value("start_up.process_s"),
        "start_up/groups": cluster.value("start_up.groups_s"),
        "start_up/restore": state_bytes
        / (strategy.shard if strategy.zero else 1)
        * readers
        / cluster.value("start_up.read_bytes_per_s"),
    }


LEARNT = Residual(kernels=3.63, spread=0.115)
"""Of a program and a cluster that nobody has measured."""

OWN_SPREAD = 0.056
"""Of a program on a cluster whose efficiency is known: how far steps of one publication lie around their median."""

_DEVICES = frozenset(("a100_sxm_80gb", "h100_sxm", "h200_sxm"))
"""What it is learnt on, and the one whose cores are the same. Devices that were measured have no such residual."""

LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.1, 2.0


def with_residual(job: Job, cluster: Cluster) -> Job:
    """The same with what is to be added on `cluster`, unless it says so itself."""
    return job if job.residual is not None else replace(job, residual=residual_of(cluster))


def residual_of(cluster: Cluster, efficiency: float | None = None) -> Residual:
    """What is to be added to predictions on `cluster`.

    Args:
        efficiency: of a program there, as `phalanx plan validate --tables FILE` says; None: what the cluster's file
            says, if it does.

    Raises:
        UserError: the efficiency cannot be right.
    """
    learnt = LEARNT if cluster.device.name in _DEVICES else Residual()
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
