"""Which layouts are feasible, and why others are infeasible: divisibility, and memory for weights and their state.

A tensor-parallel rank's share follows from the model's config alone.

Every matrix is split along dimension 0 (heads, MLP columns or vocabulary rows, see `phalanx.model.shapes`), rank t
holding the t-th of equal runs of rows. Norms, output biases, the norms of queries and keys, and learned positions are
the same on all ranks; their gradients are partial sums that have to be added over the group.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from phalanx.core.errors import UserError
from phalanx.core.layout import Axis, Shard, divisors
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.pipeline.schedules import check_table, placement_of
from phalanx.parallel.pipeline.split import split_stages

_FIELD = "parallel.tensor"


def local_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """The config of the part that one of `tensor` ranks builds: heads, key/value heads, MLP width, vocabulary divided.

    Raises:
        UserError: `tensor` does not divide one of them, or the sizes of `config` are not known.
    """
    config.require_sizes()
    if tensor == 1:
        return config
    kv_heads = config.num_kv_heads  # query heads are a multiple of them, so they decide
    if kv_heads % tensor:
        name = "model.kv_heads" if config.kv_heads else "model.heads"
        sizes = ", ".join(str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0)
        raise UserError(
            f"does not divide {name} = {kv_heads}, and a key/value head is never split or copied",
            cure=f"take a tensor size of {sizes}"
            if kv_heads > 1
            else f"take 1, or set {name} to a multiple of {tensor}",
            field=_FIELD,
            value=tensor,
        )
    if config.mlp_width % tensor:
        fitting = -(-config.mlp_width // tensor) * tensor
        cure = f"set model.mlp_hidden to a multiple of {tensor}, such as {fitting}"
        raise UserError(f"does not divide the MLP's width, {config.mlp_width}", cure=cure, field=_FIELD, value=tensor)
    if config.vocab_rows % tensor:
        multiple = math.lcm(config.vocab_multiple, tensor)
        cure = f"set model.vocab_multiple to a multiple of {tensor}, such as {multiple}"
        problem = f"does not divide the padded vocabulary, {config.vocab_rows} rows"
        raise UserError(problem, cure=cure, field=_FIELD, value=tensor)
    return config.model_copy(
        update={
            "heads": config.heads // tensor,
            "kv_heads": config.num_kv_heads // tensor,
            "head_size": config.head_dim,
            "mlp_hidden": config.mlp_width // tensor,
            "vocab_size": config.vocab_rows // tensor,
            "vocab_multiple": 1,
        }
    )


def tensor_shards(config: ModelConfig, tensor: int, index: int) -> dict[str, Shard]:
    """What rank `index` of `tensor` holds of every logical parameter of the whole model.

    Split parameters have ``axes = ("tensor",)``; of the others every rank has all, and rank 0 owns it.

    Raises:
        UserError: as of `local_config`.
    """
    local_config(config, tensor)
    table = parameter_table(config)
    shards = {}
    for name, parameter in table.items():
        shards[name] = Shard.whole(parameter.shape, owner=index == 0)
        split = parameter.role in ("embedding", "input", "output", "head") and name != "position_embedding"
        if parameter.role == "bias":  # of an input projection it goes with the matrix; others are added after the sum
            matrix = table.get(name.removesuffix("_bias"))
            split = matrix is not None and matrix.role == "input"
        if tensor > 1 and split:
            rows = parameter.shape[0] // tensor
            shards[name] = shards[name].rows(index * rows, rows, ("tensor",), owner=True)
    return shards


# Tokens of a micro-batch that are enough to keep a GEMM near its best rate.
_ENOUGH_TOKENS = 4096


@dataclass(frozen=True)
class Task:
    """What is to be trained, as far as a layout depends on it."""

    model: ModelConfig  # with vocabulary and longest sequence known
    sequence_length: int  # tokens
    # sequences per step, every number that occurs in the run (warm-up has smaller ones)
    global_batches: tuple[int, ...]
    micro_batch: int  # sequences per forward pass; 0: to be chosen
    # weight_bytes, gradient_bytes, state_bytes: of the whole model and its optimizer
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    whole_matrices_for: str = ""  # the optimizer that works on whole matrices only; empty where matrices may be split


def needed_bytes(config: ParallelConfig, task: Task) -> int:
    """Weights, gradients and optimizer state on the fullest rank; activations are not in it."""
    split = config.shard * config.context
    weights = task.weight_bytes / (split if config.zero == 3 else 1)
    gradients = task.gradient_bytes / (split if config.zero >= 2 else 1)
    masters = task.weight_bytes / split if split > 1 and config.zero < 3 else 0
    share = _largest_share(config, task)
    return math.ceil(share * (weights + gradients + masters + task.state_bytes / split) / config.tensor)


def micro_batch_of(config: ParallelConfig, task: Task) -> int:
    """Sequences per forward pass: `task.micro_batch`, or with a pipeline the most that keep its bubble small.

    Without a pipeline 0, as the trainer measures what fits.
    """
    if task.micro_batch or config.pipeline == 1:
        return task.micro_batch
    share = task.global_batches[-1] // (config.replicate * config.shard)
    wanted = 4 * config.pipeline
    fitting = [n for n in divisors(share) if n * task.sequence_length <= 2 * _ENOUGH_TOKENS or n == 1]
    enough = [n for n in fitting if share // n >= wanted]
    return max(enough, default=1)


def check_possible(config: ParallelConfig, task: Task, micro_batch: int) -> int:
    """Refuse a layout, with every axis given, that cannot be run, whatever the memory.

    Returns:
        passes per step and data-parallel rank, at the full global batch; 0 where the micro-batch is open.

    Raises:
        UserError: naming the numbers that do not fit each other.
    """
    if config.devices and config.devices != config.layout.world_size:
        raise UserError(
            f"is not the product of the axes, {config.layout} = {config.layout.world_size}",
            cure="leave parallel.devices out, or leave an axis out to have it chosen",
            field="parallel.devices",
            value=config.devices,
        )
    _check_context(config, task)
    local_config(task.model, config.tensor)
    _check_exchange(config, task)
    splitting: tuple[Axis, ...] = ("shard", "context", "tensor")
    split = [f"parallel.{axis} = {getattr(config, axis)}" for axis in splitting if getattr(config, axis) > 1]
    if task.whole_matrices_for and split:
        raise UserError(
            f"works on whole matrices, and {' and '.join(split)} split{'s' * (len(split) == 1)} them",
            cure="use parallel.replicate and parallel.pipeline instead, or another optimizer (optim.name=adamw)",
            field="optim.name",
            value=task.whole_matrices_for,
        )
    rows = max(task.micro_batch, 1) * task.sequence_length // config.context
    if rows % config.tensor:
        raise UserError(
            f"does not divide the {rows} tokens of a micro-batch on one rank, whose rows are split (sequence parallel)",
            cure=f"make data.sequence_length a multiple of {config.tensor * config.context}",
            field=_FIELD,
            value=config.tensor,
        )
    if config.pipeline > 1:
        split_stages(task.model, task.sequence_length, config.stages)
    return check_batches(config, task, micro_batch)


def _check_context(config: ParallelConfig, task: Task) -> None:
    all_windows = all(task.model.window_of(layer) is not None for layer in range(task.model.layers))
    balanced = config.context > 1 and config.context_method == "ring" and not all_windows
    pieces = config.context * (2 if balanced else 1)
    if task.sequence_length % pieces:
        two = ", two a rank" if balanced else ""
        raise UserError(
            f"does not divide data.sequence_length = {task.sequence_length} into {pieces} equal pieces{two}",
            cure=f"make data.sequence_length a multiple of {pieces}",
            field="parallel.context",
            value=config.context,
        )


def _check_exchange(config: ParallelConfig, task: Task) -> None:
    """Ulysses gives every rank of a context group some of the heads."""
    heads = task.model.num_kv_heads // config.tensor
    if config.context == 1 or config.context_method == "ring" or heads % config.context == 0:
        return
    field = "model.kv_heads" if task.model.kv_heads else "model.heads"
    divided = f" / parallel.tensor {config.tensor}" if config.tensor > 1 else ""
    raise UserError(
        f"does not divide the heads that all_to_all exchanges, {field} {task.model.num_kv_heads}{divided} = {heads}",
        cure=f"set parallel.context_method=ring, or parallel.context to a divisor of {heads}",
        field="parallel.context",
        value=config.context,
    )


def check_batches(config: ParallelConfig, task: Task, micro_batch: int) -> int:
    """Refuse batches that the ranks, the micro-batch or the schedule cannot share; returns as `check_possible`.

    Raises:
        UserError: they cannot.
    """
    ranks = config.replicate * config.shard
    count = 0
    for batch in task.global_batches:
        if batch % ranks:
            axes = f"(parallel.replicate x parallel.shard = {config.replicate} x {config.shard})"
            shared = f"cannot be shared by {ranks} data-parallel ranks {axes}"
            if batch == task.global_batches[-1]:
                cure = f"make it a multiple of {ranks}, or have another number of them"
                raise UserError(shared, cure=cure, field="train.global_batch", value=batch)
            # A smaller one, on the way to the whole.
            cure = f"make its start and its increment multiples of {ranks}"
            raise UserError(f"has a batch of {batch}, which {shared}", cure=cure, field="optim.batch_warmup")
        if micro_batch and (batch // ranks) % micro_batch:
            raise UserError(
                f"does not divide the {batch // ranks} sequences of each of {ranks} data-parallel ranks "
                f"(train.global_batch = {batch})",
                cure=f"choose a divisor of {batch // ranks}, or 0 to have one chosen",
                field="train.micro_batch",
                value=micro_batch,
            )
        count = batch // ranks // micro_batch if micro_batch else 0
        if config.pipeline > 1:
            check_table(config.schedule, config.pipeline, config.num_chunks, count)
    return count


def _largest_share(config: ParallelConfig, task: Task) -> float:
    """Of all weights, the part that the fullest pipeline rank holds (before tensor parallel).

    Stages are equal in time, not in weights: those at the ends have the embedding and the head.
    """
    if config.pipeline == 1:
        return 1.0
    spans = split_stages(task.model, task.sequence_length, config.stages)
    placement = placement_of(config.schedule, config.pipeline, config.num_chunks)
    by_place = _weights_by_place(task.model)
    of_stage = [
        by_place["embedding"] * span.first + by_place["head"] * span.last + sum(by_place[n] for n in span.layers)
        for span in spans
    ]
    held = [sum(of_stage[stage] for stage in placement.stages_of(rank)) for rank in range(config.pipeline)]
    return max(held) / sum(by_place.values())


@lru_cache(maxsize=16)
def _weights_by_place(model: ModelConfig) -> Counter[int | str]:
    by_place: Counter[int | str] = Counter()
    for parameter in parameter_table(model).values():
        outside = "embedding" if parameter.role == "embedding" else "head"
        by_place[outside if parameter.layer is None else parameter.layer] += parameter.size
    return by_place
