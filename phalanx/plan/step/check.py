"""Refusing what cannot be, or cannot be spread, before anything is computed."""

from __future__ import annotations

import math

from phalanx.core.errors import UserError
from phalanx.core.layout import divisors
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.step.allowed import JOB, MODEL, SOFTWARE, STRATEGY
from phalanx.plan.types import Job, Model, Residual, Strategy


def check(job: Job, strategy: Strategy, cluster: Cluster) -> None:
    """Whether job and strategy can be, and fit each other and the cluster.

    Raises:
        UserError: they do not; names the field, its value and the cure.
    """
    model = job.model
    STRATEGY.check(strategy)
    JOB.check(job)
    MODEL.check(model)
    SOFTWARE.check(job.software)
    _model(model)
    if not 0 <= strategy.offload <= 1:
        cure = "give a share of the layers, from 0 to 1"
        raise UserError("is no share", cure=cure, field="Strategy.offload", value=strategy.offload)
    _residual(job.added)
    if model.position == "learned" and job.sequence > model.max_sequence:
        raise UserError(
            f"the model has learned {model.max_sequence} positions",
            cure="raise Model.max_sequence, or take shorter sequences",
            field="Job.sequence",
            value=job.sequence,
        )
    _devices(strategy, cluster)
    _divides(model.heads, strategy.tensor, "parallel.tensor", "query heads")
    _divides(model.kv_heads, strategy.tensor, "parallel.tensor", "key and value heads")
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


def _model(model: Model) -> None:
    _divides(model.heads, model.kv_heads, "Model.kv_heads", "query heads")
    if not (isinstance(model.windows, tuple) and model.windows and all(map(_is_window, model.windows))):
        cure = "give a tuple of one number of keys at least; (0,): all layers see all of the past"
        raise UserError("are no windows", cure=cure, field="Model.windows", value=model.windows)
    if not model.experts:
        return
    if model.experts_per_token > model.experts:
        cure = f"give a number from 1 to {model.experts}, or more experts"
        raise UserError(
            "are more than there are", cure=cure, field="Model.experts_per_token", value=model.experts_per_token
        )
    if not 0 < model.capacity_factor < math.inf:
        cure = "give a number above 0, such as 1.25"
        raise UserError("is no capacity", cure=cure, field="Model.capacity_factor", value=model.capacity_factor)


def _residual(residual: Residual) -> None:
    for name, least in (("kernels", 0.0), ("efficiency", 0.0), ("spread", -1e-9)):
        value = getattr(residual, name)
        if not least < value < math.inf:
            cure = "give a number above 0" if not least else "give a logarithm of 0 or more"
            raise UserError("cannot be", cure=cure, field=f"Residual.{name}", value=value)


def _is_window(keys: object) -> bool:
    return type(keys) is int and keys >= 0


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
        near = divisors(whole)
        around = [n for n in near if n <= parts][-2:] + [n for n in near if n > parts][:2]
        raise UserError(
            f"{whole} {what} do not divide by {parts}",
            cure=f"take one of {', '.join(map(str, around))}",
            field=field,
            value=parts,
        )
