"""What a rank does once per step with its gradients: norm, optimizer, clearing."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.optim.config import Kind
from phalanx.plan.hardware.device import Device
from phalanx.plan.types import BYTES, Floats, Ints, Job, Strategy

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
