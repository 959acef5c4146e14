"""The Frontier study's three models (arXiv 2312.12705): shares of the peak that were reached, and those predicted.

Published and verified: 38.38, 36.14 and 31.96 % of 191.5 TFLOP/s on each die, with FlashAttention-2, ZeRO-1, fp16 and
activations computed again. Layouts and batches are recalled, not verified, so only the order of the three is judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.software import MEGATRON_DEEPSPEED
from phalanx.plan.types import Job, Model, Strategy

_SEQUENCE = 2048
_VOCABULARY = 51200


@dataclass(frozen=True)
class Case:
    """One of the models, as it was run.

    Attributes:
        batch: sequences of one replica: weak scaling, which keeps these, keeps the published shares.
        published: share of the peak, percent.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    data: int
    batch: int
    published: float


CASES = (
    Case("22B", 48, 6144, 48, 2, 4, 8, 512, 38.38),
    Case("175B", 96, 12288, 96, 4, 16, 16, 640, 36.14),
    Case("1T", 128, 25600, 128, 8, 64, 6, 1600, 31.96),
)


@dataclass(frozen=True)
class Share:
    """Percent of the peak: predicted and published."""

    case: Case
    predicted: float


def shares() -> list[Share]:
    """Of all three models, counted as the study does: with what is computed again."""
    return [Share(case, 100 * _share(case)) for case in CASES]


def in_order(found: list[Share]) -> bool:
    """Whether the predicted shares have the order of the published ones."""
    by_published = sorted(found, key=lambda share: share.case.published)
    return by_published == sorted(found, key=lambda share: share.predicted)


def _share(case: Case) -> float:
    model = Model(case.layers, case.hidden, case.heads, _VOCABULARY, _SEQUENCE)
    software = replace(MEGATRON_DEEPSPEED, fused_attention=True, host_factor=1.0)
    job = Job(model, _SEQUENCE, case.batch * case.data, "fp16", software=software)
    strategy = Strategy(
        pipeline=case.pipeline,
        shard=case.data,
        tensor=case.tensor,
        zero=1,
        recompute="full",
        sequence_parallel=False,
    )
    found = predict(job, strategy, load_cluster("frontier", strategy.world_size))
    return found.mfu * 4 / 3
