"""From the settings of a run to a `Job` and a `Strategy`, and back; `check` refuses what is not possible.

Every prediction calls `check` first. So the allowed values of all fields are collected once, and what is right passes
with a few calls into C; only what is wrong is looked at field by field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.layout import divisors
from phalanx.model.config import ModelConfig
from phalanx.optim.config import Kind as Optimizer
from phalanx.optim.groups import LEAST_NUMEL, moment_bytes
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import BYTES, Job, Model, Overlap, Precision, Recompute, Residual, Software, StateBits, Strategy

# `train.recompute` in the words of the cost model.
# The cost model has one cost of fused exchanges, so "tiles" becomes "fused", and comes back as that from a search.
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "elementwise", "mlp": "mlp", "full": "full"}
_OVERLAP: dict[str, Overlap] = {"none": "none", "chunked": "chunked", "fused": "fused", "tiles": "fused"}


def model_of(config: ModelConfig) -> Model:
    """The model that `[model]` describes; UserError where the vocabulary or the longest sequence is not known yet."""
    config.require_sizes()
    return Model(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        vocab_rows=config.vocab_rows,
        max_sequence=config.max_sequence,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp_width=config.mlp_width,
        gated=config.gated,
        block=config.block,
        merged=config.merged,
        windows=tuple(config.window if kind == "window" else 0 for kind in config.attention),
        position=config.position,
        norm=config.norm,
        bias=config.bias,
        qk_norm=config.qk_norm,
        dropout=config.dropout > 0,
        attention_dropout=config.attention_dropout > 0,
        tie_embeddings=config.tie_embeddings,
    )


def moment_bytes_of(job: Job) -> float:
    """Bytes of one moment of a matrix, for each of its elements."""
    rows_of_one = (LEAST_NUMEL, job.model.hidden)  # every matrix is stored in rows of this width
    return moment_bytes(rows_of_one, job.state_bits) / math.prod(rows_of_one)


def make_job(
    model: ModelConfig,
    *,
    sequence: int,
    global_batch: int,
    precision: Precision,
    optimizer: Optimizer,
    software: Software | None = None,
    state_bits: StateBits = 32,
) -> Job:
    """What one step of a run computes."""
    return Job(model_of(model), sequence, global_batch, precision, optimizer, software or Software(), state_bits)


def software_of(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    *,
    compiled: bool,
    on_cpu: bool,
    documents: bool = True,
) -> Software:
    """Phalanx as these settings have it run. `documents`: attention stops at their borders (`data.document_mask`)."""
    plain = phalanx_software(precision, residual=model.residual, compiled=compiled, on_cpu=on_cpu)
    return replace(
        plain,
        fused_attention=model.attention_backend != "math",
        reduce_bytes=2 if parallel.reduce_dtype == "bf16" else 4,
        document_masks=documents,
    )


def phalanx_software(
    precision: Precision, *, residual: Literal["float32", "compute"] = "float32", compiled: bool, on_cpu: bool
) -> Software:
    """Phalanx with its defaults. `residual`: precision of the stream between the layers, as `model.residual`."""
    residual_bytes = BYTES[precision] if residual == "compute" else 4
    return Software(
        fused_elementwise=compiled,
        compiled=compiled,
        residual_bytes=residual_bytes,
        sent_bytes=residual_bytes,
        gather_bytes=BYTES[precision],  # matrices travel as they are multiplied; embedding and head in fp32
        data_overlap=not on_cpu,  # the cores that would compute copy messages meanwhile
        on_cpu=on_cpu,
        document_masks=True,
    )


def make_strategy(parallel: ParallelConfig, *, micro_batch: int, recompute: str, offload: float = 0.0) -> Strategy:
    """How a run is spread. `parallel`: with every axis given."""
    return Strategy(
        pipeline=parallel.pipeline,
        replicate=parallel.replicate,
        shard=parallel.shard,
        context=parallel.context,
        tensor=parallel.tensor,
        micro_batch=micro_batch,
        chunks=parallel.num_chunks if parallel.pipeline > 1 else 1,
        schedule=parallel.schedule,
        zero=parallel.zero,
        recompute=_RECOMPUTE[recompute],
        offload=offload,
        tensor_overlap=_OVERLAP[parallel.tensor_overlap],
        tensor_chunks=parallel.tensor_chunks,
        context_method=parallel.context_method,
        bucket_bytes=parallel.bucket_bytes,
    )


def settings_of(strategy: Strategy) -> dict[str, int | str]:
    """The settings that give this strategy, by dotted key; those with their default are left out.

    The inverse of `make_strategy` for whatever Phalanx itself can run.
    """
    # What has no effect in a layout stays at its default, so that it is not printed: ZeRO where nothing is split, a
    # schedule without a pipeline, overlap and context method on one rank.
    plain = ParallelConfig()
    overlap = next(name for name, value in _OVERLAP.items() if value == strategy.tensor_overlap)
    recompute = next((name for name, value in _RECOMPUTE.items() if value == strategy.recompute), "none")
    chunks = strategy.chunks if strategy.pipeline > 1 else 0
    parallel: dict[str, int | str] = {
        "pipeline": int(strategy.pipeline),
        "replicate": int(strategy.replicate),
        "shard": int(strategy.shard),
        "context": int(strategy.context),
        "tensor": int(strategy.tensor),
        "zero": strategy.zero if strategy.shard * strategy.context > 1 else plain.zero,
        "bucket_bytes": strategy.bucket_bytes,
        "schedule": strategy.schedule if strategy.pipeline > 1 else plain.schedule,
        "chunks": 0 if strategy.schedule in ("1f1b", "zbv") else int(chunks),
        "tensor_overlap": overlap if strategy.tensor > 1 else plain.tensor_overlap,
        "tensor_chunks": strategy.tensor_chunks if overlap == "chunked" else plain.tensor_chunks,
        "context_method": strategy.context_method if strategy.context > 1 else plain.context_method,
    }
    given = {f"parallel.{name}": value for name, value in parallel.items() if value != getattr(plain, name)}
    return {"train.micro_batch": int(strategy.micro_batch), "train.recompute": recompute, **given}


def check(job: Job, strategy: Strategy, cluster: Cluster) -> None:
    """Whether job and strategy can be, and fit each other and the cluster."""
    # Types and bounds of all fields come first: what follows divides by them.
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
    # Each rank has an equal share of all of these; `phalanx train` refuses what does not divide too.
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
    # Numbers of experts have no meaning in a dense model, whatever they are.
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
    # A spread may be 0, the others divide or multiply: its bound lies just below.
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
        # Two divisors to either side are enough to choose from.
        around = [n for n in near if n <= parts][-2:] + [n for n in near if n > parts][:2]
        raise UserError(
            f"{whole} {what} do not divide by {parts}",
            cure=f"take one of {', '.join(map(str, around))}",
            field=field,
            value=parts,
        )


_MANY = 10**9  # above any real size; products of two fit into 64 bits
_SIZE, _COUNT = (1, _MANY), (0, _MANY)
_INT = {int}


@dataclass(frozen=True)
class Allowed:
    """What the fields of one class may be."""

    kind: type
    numbers: Mapping[str, tuple[int, int]]
    words: Mapping[str, frozenset[Any]]
    _numbers_of: Callable[[Any], tuple[Any, ...]]
    _words_of: Callable[[Any], tuple[Any, ...]]
    _least: tuple[int, ...]
    _most: tuple[int, ...]
    _choices: tuple[frozenset[Any], ...]

    def check(self, values: Any) -> None:
        """Whether `values` has only what is allowed."""
        if not isinstance(values, self.kind):
            raise UserError(f"is no {self.kind.__name__}", cure="make one of its fields", value=values)
        numbers, words = self._numbers_of(values), self._words_of(values)
        # By type, not by isinstance: flags, and integers of numpy, take the slow way below, which tells them apart.
        if {*map(type, numbers)} == _INT:
            inside = all(map(operator.ge, numbers, self._least)) and all(map(operator.le, numbers, self._most))
            if inside and all(map(_is_one, self._choices, words)):
                return
        self._refuse(values)

    def _refuse(self, values: Any) -> None:
        # Integers of numpy come from searches over arrays, and are as good as Python's.
        for name, (least, most) in self.numbers.items():
            value = getattr(values, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
                cure = f"give a whole number from {least:,} to {most:,}"
                raise UserError("is no such number", cure=cure, field=f"{self.kind.__name__}.{name}", value=value)
        for name, choices in self.words.items():
            value = getattr(values, name)
            if not _is_one(choices, value):
                known = ", ".join(sorted(map(repr, choices)))
                raise UserError(
                    "is not known", cure=f"take one of {known}", field=f"{self.kind.__name__}.{name}", value=value
                )


def _is_one(choices: frozenset[Any], value: Any) -> bool:
    try:
        return value in choices
    except TypeError:  # a list, say, which has no hash
        return False


def _allowed(kind: type, numbers: Mapping[str, tuple[int, int]]) -> Allowed:
    """What is allowed for a class: of choices and flags what their types say, of numbers what is given here."""
    # Types say it already, so a new choice needs no change here.
    words = {name: _choices(hint) for name, hint in get_type_hints(kind).items() if _choices(hint)}
    return Allowed(
        kind=kind,
        numbers=numbers,
        words=words,
        _numbers_of=operator.attrgetter(*numbers),
        _words_of=operator.attrgetter(*words),
        _least=tuple(least for least, _ in numbers.values()),
        _most=tuple(most for _, most in numbers.values()),
        _choices=tuple(words.values()),
    )


def _choices(hint: Any) -> frozenset[Any]:
    if hint is bool:
        return frozenset((True, False))
    return frozenset(get_args(hint)) if get_origin(hint) is Literal else frozenset()


STRATEGY = _allowed(
    Strategy,
    {
        **dict.fromkeys(("pipeline", "replicate", "shard", "context", "tensor", "expert"), _SIZE),
        **dict.fromkeys(("micro_batch", "chunks", "tensor_chunks"), _SIZE),
        "bucket_bytes": (0, 10**12),
    },
)
JOB = _allowed(Job, dict.fromkeys(("sequence", "global_batch"), _SIZE))
MODEL = _allowed(
    Model,
    {
        "layers": (1, 100_000),  # they are gone through one by one
        **dict.fromkeys(("hidden", "heads", "vocab_rows", "max_sequence", "kv_heads", "head_dim"), _SIZE),
        **dict.fromkeys(("mlp_width", "dense_mlp_width", "experts_per_token", "moe_every"), _SIZE),
        **dict.fromkeys(("experts", "shared_experts"), _COUNT),
    },
)
SOFTWARE = _allowed(
    Software,
    {
        **dict.fromkeys(("residual_bytes", "gradient_bytes", "reduce_bytes", "gather_bytes"), (1, 8)),
        **dict.fromkeys(("sent_bytes", "weight_bytes"), (1, 8)),
        "master_bytes": (0, 8),
    },
)
