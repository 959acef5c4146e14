"""The null model: what two fitted numbers say of a table, each row predicted from the others.

``step = a ideal (1 + (p - 1) / (v m)) + b``: time at peak, the bubble, and a constant. It is fitted to the very rows
that it is judged by, but for one at a time; a model that knows nothing of them has to stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.types import Job, Strategy

_LEAST = 4
"""Rows below which two numbers explain nothing."""


def published_flops(job: Job) -> float:
    """FLOPs of a step as the publications count them: attention over all pairs, no recompute.

    For GPT-3's shape that is ``72 B s L h^2 (1 + s/6h + V/12hL)`` (arXiv 2104.04473).
    """
    model = job.model
    width, rows = model.hidden, model.heads * model.head_dim
    projections = width * (2 * rows + 2 * model.kv_heads * model.head_dim)
    mlp = (3 if model.gated else 2) * width * model.mlp_width
    each = 6.0 * (projections + mlp) + 12.0 * job.sequence * rows
    return job.tokens * (model.layers * each + 6.0 * model.vocab_rows * width)


def ideal_s(job: Job, strategy: Strategy, peak_flops_per_s: float) -> float:
    """Seconds of a step at the peak rate, with the bubble."""
    flops = published_flops(job)
    micro_batches = strategy.micro_batches(job.global_batch)
    bubble = 1 + (strategy.pipeline - 1) / (strategy.chunks * micro_batches)
    return float(flops / (strategy.world_size * peak_flops_per_s) * bubble)


def leave_one_out(ideal: Sequence[float], measured: Sequence[float]) -> NDArray[np.float64]:
    """Errors of the null model, each row predicted by numbers fitted to all others; empty for fewer than four rows.

    Fitted by least squares of relative errors, as it is judged.
    """
    if len(ideal) < _LEAST:
        return np.zeros(0)
    x, y = np.asarray(ideal), np.asarray(measured)
    columns = np.stack([x, np.ones_like(x)], axis=1) / y[:, None]
    errors = []
    for left in range(len(y)):
        others = np.arange(len(y)) != left
        fitted, *_ = np.linalg.lstsq(columns[others], np.ones(len(y) - 1), rcond=None)
        errors.append(columns[left] @ fitted - 1)
    return np.array(errors)
