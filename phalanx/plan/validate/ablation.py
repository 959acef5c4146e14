"""MegaScale's table 3: what each of its changes to Megatron-LM gains, predicted one after another.

175B on 256 GPUs with a batch of 256, at the end of 768. The published column is model FLOPs utilisation, in points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.plan.predict import predict
from phalanx.plan.validate.assumptions import MEGASCALE_OWN, MEGATRON, Setting
from phalanx.plan.validate.jobs import cluster_of, job_of, strategy_of
from phalanx.plan.validate.null import published_flops
from phalanx.plan.validate.rows import Row

PUBLISHED = (47.7, 52.3, 53.3, 55.5, 58.0, 59.5, 61.2, 62.3, 65.3)
"""Points of MFU after each change (arXiv 2402.15627, table 3)."""

_ROW = Row("ms-t3", 96, 12288, 128, 64000, 2048, 256, 0, 256, 8, 8, 6, 4, "", None, 0.0)


@dataclass(frozen=True)
class Change:
    """One line of the table: points of MFU after it, and what it gained, predicted and published."""

    name: str
    predicted: float
    gain: float
    published: float
    published_gain: float


def steps() -> list[tuple[str, Setting, int]]:
    """The settings after each change, and the batch: each keeps all changes before it."""
    base = MEGATRON
    block = replace(base, block=MEGASCALE_OWN.block)
    window = replace(block, window=MEGASCALE_OWN.window)
    tensor = replace(window, tensor_overlap=MEGASCALE_OWN.tensor_overlap, tensor_chunks=MEGASCALE_OWN.tensor_chunks)
    pipeline = replace(tensor, software=replace(base.software, pipeline_overlap=True))
    overlapped = replace(pipeline.software, data_overlap=True, first_gather_hidden=True)
    data = replace(pipeline, software=overlapped)
    fused = replace(MEGASCALE_OWN.software, loader_hidden=base.software.loader_hidden)
    operators = replace(data, software=fused, recompute=MEGASCALE_OWN.recompute)
    other = replace(operators, software=MEGASCALE_OWN.software)
    lamb = replace(other, optimizer="lamb")
    return [
        ("Megatron-LM", base, 256),
        ("parallel block", block, 256),
        ("sliding window", window, 256),
        ("tensor overlap", tensor, 256),
        ("pipeline overlap", pipeline, 256),
        ("data overlap", data, 256),
        ("efficient operators", operators, 256),
        ("data pipeline and other code", other, 256),
        ("LAMB, batch of 768", lamb, 768),
    ]


def ablation() -> list[Change]:
    """All lines of the table."""
    found: list[Change] = []
    for (name, setting, batch), published in zip(steps(), PUBLISHED, strict=True):
        predicted = 100 * _mfu(setting, batch)
        before = found[-1] if found else None
        gain = predicted - before.predicted if before else 0.0
        published_gain = published - before.published if before else 0.0
        found.append(Change(name, predicted, gain, published, published_gain))
    return found


def _mfu(setting: Setting, batch: int) -> float:
    """Utilisation as the table counts it: FLOPs of full attention over all pairs, over the peak."""
    row = replace(_ROW, global_batch=batch)
    job, strategy, cluster = job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)
    peak = strategy.world_size * cluster.device.peak_flops_per_s(setting.precision)
    return published_flops(job) / float(peak * predict(job, strategy, cluster).step_s)
