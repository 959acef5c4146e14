"""The layout of a run: what its config, its text and its machines leave to choose, and what it means in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Layout
from phalanx.model.config import ModelConfig
from phalanx.model.shapes import parameter_table
from phalanx.optim.groups import assign
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.feasible import Task, needed_bytes
from phalanx.parallel.layout_choice import Judge, LayoutChoice, Machines, choose_layout
from phalanx.parallel.pipeline.schedules import Table, make_table
from phalanx.parallel.pipeline.split import StageSpan, imbalance, split_stages
from phalanx.train.config import RunConfig
from phalanx.train.derived.memory_needs import host_available_bytes, standing_bytes
from phalanx.train.derived.run_numbers import complete_model, cpu_micro_batch

_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_HOST_RANKS = 8
_UNEVEN = 0.05


def wanted_ranks(config: RunConfig) -> int:
    """Ranks that the config asks for."""
    return config.parallel.devices or config.parallel.layout.world_size


def machines_here(config: RunConfig, count: int) -> Machines:
    """This host with `count` ranks; memory is known on a CPU alone, as a GPU's is asked for by its rank."""
    on_cpu = config.train.device == "cpu" or (
        config.train.device == "auto" and not any(path.exists() for path in _DEVICE_FILES)
    )
    available_bytes = host_available_bytes() if on_cpu else None
    return Machines(count, available_bytes and available_bytes // count)


def resolve_layout(
    config: RunConfig,
    vocab_size: int,
    machines: Machines,
    world_size: int,
    say: Callable[[str], None],
    judge: Judge | None = None,
) -> RunConfig:
    """`config` with every axis of its layout given, and the micro-batch where a pipeline decides it.

    Where `[parallel]` is empty, the axes are chosen for the ranks that there are.

    Args:
        say: shows the reasons of what was chosen.
        judge: decides which layouts fit; None: where the state does.

    Raises:
        UserError: the layout is impossible, or another number of ranks is there than it needs.
    """
    check_started(config, world_size)
    if wanted_ranks(config) == 1:
        parallel = config.parallel.model_copy(update={"devices": world_size})
        config = config.model_copy(update={"parallel": parallel})
    choice = choose(config, vocab_size, machines, judge)
    if choice.reasons:
        say("\n  ".join([f"layout chosen for {world_size} ranks:", *choice.reasons]))
    chosen = config.model_copy(update={"parallel": choice.config})
    if choice.micro_batch:
        train = config.train.model_copy(update={"micro_batch": choice.micro_batch})
        chosen = chosen.model_copy(update={"train": train})
    return chosen


def choose(config: RunConfig, vocab_size: int, machines: Machines, judge: Judge | None = None) -> LayoutChoice:
    """The layout of `config`, which has to be possible."""
    choice = choose_layout(config.parallel, task_of(config, vocab_size), machines, judge)
    chosen = config.model_copy(update={"parallel": choice.config})
    validate(RunConfig, chosen.model_dump())  # it must fit the other settings too
    return choice


def ignored_settings(config: ParallelConfig) -> list[str]:
    """What `[parallel]` sets without effect in its layout, of which every axis is given; a line each."""
    idle = {
        "zero": config.shard * config.context == 1 and "parallel.shard and parallel.context are 1",
        "schedule": config.pipeline == 1 and "parallel.pipeline is 1",
        "chunks": config.pipeline == 1 and "parallel.pipeline is 1",
        "tensor_overlap": config.tensor == 1 and "parallel.tensor is 1",
        "tensor_chunks": config.tensor_overlap not in ("chunked", "auto") and "parallel.tensor_overlap is not chunked",
        "context_method": config.context == 1 and "parallel.context is 1",
    }
    plain = ParallelConfig()
    return [
        f"parallel.{name} = {getattr(config, name)!r} has no effect: {why}"
        for name, why in idle.items()
        if why and getattr(config, name) != getattr(plain, name)
    ]


def task_of(config: RunConfig, vocab_size: int) -> Task:
    """What `config` trains, as far as its layout depends on it."""
    model = complete_model(config, vocab_size)
    weights, gradients, state = standing_bytes(model, config.optim).values()
    shapes = {name: len(parameter.shape) for name, parameter in parameter_table(model).items()}
    kinds = {group.kind for group in assign(config.optim, shapes).values()}
    warmup, full = config.optim.batch_warmup, config.train.global_batch
    sizes = set(range(warmup.start, full, warmup.increment)) if warmup.start else set()
    return Task(
        model=model,
        sequence_length=config.data.sequence_length,
        global_batches=tuple(sorted(sizes | {full})),
        micro_batch=config.train.micro_batch,
        weight_bytes=weights,
        gradient_bytes=gradients,
        state_bytes=state,
        whole_matrices_for="muon" if "muon" in kinds else "",
    )


def check_started(config: RunConfig, world_size: int) -> None:
    """Refuse another number of ranks than `config` asks for; where it asks for nothing, any number will do."""
    wanted = wanted_ranks(config)
    if wanted in (1, world_size):
        return
    asked = f"devices = {wanted}" if config.parallel.devices else axes_text(config.parallel.layout)
    raise UserError(
        f"{asked} needs {wanted} rank{'s' * (wanted > 1)}, and {world_size} {'were' if world_size > 1 else 'was'} "
        "started",
        cure=f"start {wanted} (torchrun --nnodes and --nproc-per-node, srun --ntasks), or change [parallel] to what "
        f"there is, such as parallel.devices={world_size} without axes",
        field="parallel",
    )


def axes_text(layout: Layout) -> str:
    """The axes that are used, such as ``pipeline 2 x tensor 4``."""
    return " x ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)


@dataclass(frozen=True)
class Stages:
    """A pipeline's stages and schedule; `cure` would make uneven stages even, empty where nothing was found."""

    spans: Sequence[StageSpan]
    table: Table
    cure: str


@dataclass(frozen=True)
class Spread:
    """A layout that can be run, and what follows from it."""

    choice: LayoutChoice
    ranks_per_host: int
    share: int  # sequences per step of one data-parallel rank
    micro_batch: int  # of them, per forward pass; 0 where the device decides when the run starts
    # weights, gradients and optimizer state of the fullest rank; empty where the vocabulary is not known
    held_bytes: Mapping[str, int]
    whole_bytes: Mapping[str, int]  # the same of one process
    available_bytes: int | None  # memory that each rank could have here; None where that is unknown
    stages: Stages | None  # of a pipeline, where the vocabulary is known


def explain_spread(config: RunConfig, vocab_size: int | None, ranks_per_host: int | None) -> Spread:
    """The layout that `phalanx train` would take, as far as it is known before the text is read.

    Args:
        vocab_size: of the tokenizer; None: not known yet.
        ranks_per_host: None: all ranks on this one where they are at most 8, else 8 on each.
    """
    count = wanted_ranks(config)
    per_host = ranks_per_host or min(count, _HOST_RANKS)
    here = machines_here(config, count)
    machines = replace(here, ranks_per_host=per_host) if count <= per_host else Machines(per_host)
    # An unknown vocabulary is taken as one that any layout can share, and so small that it makes nothing too large.
    vocabulary = vocab_size or math.lcm(config.model.vocab_multiple, count)
    choice, task = choose(config, vocabulary, machines), task_of(config, vocabulary)
    parallel = choice.config
    share = config.train.global_batch // (parallel.replicate * parallel.shard)
    on_cpu = here.available_bytes is not None
    micro_batch = choice.micro_batch or (cpu_micro_batch(share, task.sequence_length) if on_cpu else 0)
    known, stages = vocab_size is not None, None
    if known and parallel.pipeline > 1:
        spans = split_stages(task.model, task.sequence_length, parallel.stages)
        table = make_table(parallel.schedule, parallel.pipeline, parallel.num_chunks, share // micro_batch)
        stages = Stages(spans, table, _evener(task.model, task.sequence_length, spans))
    return Spread(
        choice=choice,
        ranks_per_host=per_host,
        share=share,
        micro_batch=micro_batch,
        held_bytes=_held_bytes(parallel, task) if known else {},
        whole_bytes=_held_bytes(ParallelConfig(), task) if known else {},
        available_bytes=machines.available_bytes,
        stages=stages,
    )


def _held_bytes(config: ParallelConfig, task: Task) -> dict[str, int]:
    """`needed_bytes` in its parts; weights count the fp32 masters beside them."""
    nothing = replace(task, weight_bytes=0, gradient_bytes=0, state_bytes=0)
    return {
        "weights": needed_bytes(config, replace(nothing, weight_bytes=task.weight_bytes)),
        "gradients": needed_bytes(config, replace(nothing, gradient_bytes=task.gradient_bytes)),
        "optimizer state": needed_bytes(config, replace(nothing, state_bytes=task.state_bytes)),
    }


def _evener(model: ModelConfig, sequence_length: int, spans: Sequence[StageSpan]) -> str:
    """The nearest number of layers that halves the imbalance, or what else would; empty where stages are even."""
    now, stages = imbalance(spans), len(spans)
    if now <= _UNEVEN:
        return ""
    numbers = [n for n in range(max(stages, model.layers - stages), model.layers + stages + 1) if n != model.layers]
    for layers in sorted(numbers, key=lambda n: (abs(n - model.layers), n)):
        changed = split_stages(model.model_copy(update={"layers": layers}), sequence_length, stages)
        if imbalance(changed) <= now / 2:
            return f"model.layers={layers} would make it {imbalance(changed):.0%}"
    if spans[-1].flops_per_token == max(span.flops_per_token for span in spans) and len(spans[-1].layers) == 1:
        return "the loss head weighs most: a smaller vocabulary, more or wider layers, or fewer stages help"
    return "more layers, or fewer stages, help"
