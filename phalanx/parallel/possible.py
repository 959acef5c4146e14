"""What a layout asks for: numbers that divide each other, and memory for weights and their state. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from phalanx.core.errors import UserError
from phalanx.core.layout import Axis, divisors
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.pipeline.split import StageSpan, split_stages
from phalanx.parallel.pipeline.tables import check_table, placement_of
from phalanx.parallel.tensor.sizes import local_config

# Tokens of a micro-batch that are enough to keep a GEMM near its best rate.
_ENOUGH_TOKENS = 4096


@dataclass(frozen=True)
class Task:
    """What is to be trained, as far as a layout depends on it.

    Attributes:
        model: with vocabulary and longest sequence known.
        sequence_length: tokens.
        global_batches: sequences per step, every number that occurs in the run (warm-up has smaller ones).
        micro_batch: sequences per forward pass; 0: to be chosen.
        weight_bytes, gradient_bytes, state_bytes: of the whole model and its optimizer.
        whole_matrices_for: the optimizer that works on whole matrices only; empty where matrices may be split.
    """

    model: ModelConfig
    sequence_length: int
    global_batches: tuple[int, ...]
    micro_batch: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int
    whole_matrices_for: str = ""


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
    """Refuse a layout that cannot be run, whatever the memory.

    Args:
        config: with every axis given.
        micro_batch: as `micro_batch_of` has it.

    Returns:
        passes per step and data-parallel rank, at the full global batch; 0 where the micro-batch is open.

    Raises:
        UserError: naming the numbers that do not fit each other.
    """
    _check_devices(config)
    _check_context(config, task)
    local_config(task.model, config.tensor)
    _check_exchange(config, task)
    _check_optimizer(config, task)
    _check_rows(config, task)
    if config.pipeline > 1:
        split_stages(task.model, task.sequence_length, config.stages)
    return check_batches(config, task, micro_batch)


def _check_devices(config: ParallelConfig) -> None:
    if config.devices and config.devices != config.layout.world_size:
        raise UserError(
            f"is not the product of the axes, {config.layout} = {config.layout.world_size}",
            cure="leave parallel.devices out, or leave an axis out to have it chosen",
            field="parallel.devices",
            value=config.devices,
        )


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


def _check_optimizer(config: ParallelConfig, task: Task) -> None:
    splitting: tuple[Axis, ...] = ("shard", "context", "tensor")
    split = [f"parallel.{axis} = {getattr(config, axis)}" for axis in splitting if getattr(config, axis) > 1]
    if task.whole_matrices_for and split:
        raise UserError(
            f"works on whole matrices, and {' and '.join(split)} split{'s' * (len(split) == 1)} them",
            cure="use parallel.replicate and parallel.pipeline instead, or another optimizer (optim.name=adamw)",
            field="optim.name",
            value=task.whole_matrices_for,
        )


def _check_rows(config: ParallelConfig, task: Task) -> None:
    rows = max(task.micro_batch, 1) * task.sequence_length // config.context
    if rows % config.tensor:
        raise UserError(
            f"does not divide the {rows} tokens of a micro-batch on one rank, whose rows are split (sequence parallel)",
            cure=f"make data.sequence_length a multiple of {config.tensor * config.context}",
            field="parallel.tensor",
            value=config.tensor,
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
            raise _unshared(config, task, batch)
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


def _unshared(config: ParallelConfig, task: Task, batch: int) -> UserError:
    """A batch that the data-parallel ranks cannot share: the whole one, or one on the way to it."""
    ranks, whole = config.replicate * config.shard, task.global_batches[-1]
    by = f"by {ranks} data-parallel ranks (parallel.replicate x parallel.shard = {config.replicate} x {config.shard})"
    if batch == whole:
        return UserError(
            f"cannot be shared {by}",
            cure=f"make it a multiple of {ranks}, or have another number of them",
            field="train.global_batch",
            value=batch,
        )
    return UserError(
        f"has a batch of {batch}, which cannot be shared {by}",
        cure=f"make its start and its increment multiples of {ranks}",
        field="optim.batch_warmup",
    )


def _largest_share(config: ParallelConfig, task: Task) -> float:
    """Of all weights, the part that the fullest pipeline rank holds (before tensor parallel).

    Stages are equal in time, not in weights: those at the ends have the embedding and the head.
    """
    if config.pipeline == 1:
        return 1.0
    spans = split_stages(task.model, task.sequence_length, config.stages)
    placement = placement_of(config.schedule, config.pipeline, config.num_chunks)
    held = [
        sum(_weights(task.model, spans[stage]) for stage in placement.stages_of(rank))
        for rank in range(config.pipeline)
    ]
    return max(held) / sum(_weights_by_place(task.model).values())


def _weights(model: ModelConfig, span: StageSpan) -> int:
    """Elements that a stage holds."""
    by_place = _weights_by_place(model)
    ends = by_place["embedding"] * span.first + by_place["head"] * span.last
    return ends + sum(by_place[layer] for layer in span.layers)


@lru_cache(maxsize=16)
def _weights_by_place(model: ModelConfig) -> Counter[int | str]:
    """Elements of each layer, of the embedding, and of what comes after the layers."""
    by_place: Counter[int | str] = Counter()
    for parameter in parameter_table(model).values():
        outside = "embedding" if parameter.role == "embedding" else "head"
        by_place[outside if parameter.layer is None else parameter.layer] += parameter.size
    return by_place
