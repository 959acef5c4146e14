"""What the layout of a config means in numbers, for `phalanx explain`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.model.config import ModelConfig
from phalanx.parallel.choose import Choice, Machines
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.pipeline.split import StageSpan, imbalance, split_stages
from phalanx.parallel.pipeline.tables import Table, make_table
from phalanx.parallel.possible import Task, needed_bytes
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import cpu_micro_batch
from phalanx.train.derived.layout import choose, machines_here, task_of, wanted_ranks

_HOST_RANKS = 8
_UNEVEN = 0.05


@dataclass(frozen=True)
class Stages:
    """A pipeline's stages and schedule.

    Attributes:
        cure: what would make uneven stages even; empty where they are, or where nothing was found.
    """

    spans: Sequence[StageSpan]
    table: Table
    cure: str

    @property
    def imbalance(self) -> float:
        """See `phalanx.parallel.pipeline.split.imbalance`."""
        return imbalance(self.spans)


@dataclass(frozen=True)
class Spread:
    """A layout that can be run, and what follows from it.

    Attributes:
        ranks_per_host: as it was said or assumed.
        share: sequences per step of one data-parallel rank.
        micro_batch: of them, per forward pass; 0 where the device decides when the run starts.
        held_bytes: weights, gradients and optimizer state of the fullest rank; empty where the vocabulary is not known.
        whole_bytes: the same of one process.
        available_bytes: memory that each rank could have here; None where that is unknown.
        stages: of a pipeline, where the vocabulary is known.
    """

    choice: Choice
    ranks_per_host: int
    share: int
    micro_batch: int
    held_bytes: Mapping[str, int]
    whole_bytes: Mapping[str, int]
    available_bytes: int | None
    stages: Stages | None

    @property
    def config(self) -> ParallelConfig:
        """With every axis given."""
        return self.choice.config


def explain_spread(config: RunConfig, vocab_size: int | None, ranks_per_host: int | None) -> Spread:
    """The layout that `phalanx train` would take, as far as it is known before the text is read.

    Args:
        vocab_size: of the tokenizer; None: not known yet.
        ranks_per_host: None: all ranks on this one where they are at most 8, else 8 on each.

    Raises:
        UserError: the layout is impossible, as `phalanx train` would say.
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
    known = vocab_size is not None
    return Spread(
        choice=choice,
        ranks_per_host=per_host,
        share=share,
        micro_batch=micro_batch,
        held_bytes=held_bytes(parallel, task) if known else {},
        whole_bytes=held_bytes(ParallelConfig(), task) if known else {},
        available_bytes=machines.available_bytes,
        stages=_stages(parallel, task, share // micro_batch) if known and parallel.pipeline > 1 else None,
    )


def held_bytes(config: ParallelConfig, task: Task) -> dict[str, int]:
    """`needed_bytes` in its parts; weights count the fp32 masters beside them."""
    nothing = replace(task, weight_bytes=0, gradient_bytes=0, state_bytes=0)
    return {
        "weights": needed_bytes(config, replace(nothing, weight_bytes=task.weight_bytes)),
        "gradients": needed_bytes(config, replace(nothing, gradient_bytes=task.gradient_bytes)),
        "optimizer state": needed_bytes(config, replace(nothing, state_bytes=task.state_bytes)),
    }


def _stages(config: ParallelConfig, task: Task, micro_batches: int) -> Stages:
    spans = split_stages(task.model, task.sequence_length, config.stages)
    table = make_table(config.schedule, config.pipeline, config.num_chunks, micro_batches)
    return Stages(spans, table, _evener(task.model, task.sequence_length, spans))


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
