"""Refusing what cannot be spread, before anything is computed."""

from __future__ import annotations

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Job, Strategy


def check(job: Job, strategy: Strategy, cluster: Cluster) -> None:
    """Whether `strategy` fits job and cluster.

    Raises:
        UserError: it does not; names the field, its value and the cure.
    """
    model = job.model
    _devices(strategy, cluster)
    _divides(model.heads, strategy.tensor, "parallel.tensor", "query heads")
    _divides(model.dense_mlp_width, strategy.tensor, "parallel.tensor", "columns of the MLP")
    _divides(job.sequence, strategy.context, "parallel.context", "tokens of a sequence")
    _divides(job.global_batch, strategy.data * strategy.micro_batch, "train.micro_batch", "sequences of a step")
    if model.experts:
        _divides(model.experts, strategy.expert, "expert ranks", "experts")
    _divides(strategy.data, strategy.expert, "expert ranks", "data-parallel ranks")
    if strategy.pipeline > 1 and strategy.stages > model.layers:
        raise UserError(
            f"{strategy.stages} pipeline stages cannot share {model.layers} layers",
            cure=f"lower parallel.pipeline or parallel.chunks to at most {model.layers} stages",
            field="parallel.pipeline",
            value=strategy.pipeline,
        )


def _devices(strategy: Strategy, cluster: Cluster) -> None:
    if strategy.world_size > cluster.devices:
        raise UserError(
            f"the layout has {strategy.world_size} ranks and {cluster.name} has {cluster.devices} devices",
            cure=f"give --devices {strategy.world_size}, or lower an axis of [parallel]",
            field="--devices",
            value=cluster.devices,
        )


def _divides(whole: int, parts: int, field: str, what: str) -> None:
    if whole % parts:
        near = [n for n in range(1, whole + 1) if whole % n == 0]
        around = [n for n in near if n <= parts][-2:] + [n for n in near if n > parts][:2]
        raise UserError(
            f"{whole} {what} do not divide by {parts}",
            cure=f"take one of {', '.join(map(str, around))}",
            field=field,
            value=parts,
        )
