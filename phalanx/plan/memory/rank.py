"""Memory of every pipeline rank, exactly as its stages and its schedule have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.hardware.either import largest, where
from phalanx.plan.memory.buffers import FRAGMENTATION, exchanged, gathered, in_flight, messages
from phalanx.plan.memory.flight import Held, held
from phalanx.plan.memory.pieces import Pieces, pieces_of, stages_held
from phalanx.plan.memory.state import apart, state
from phalanx.plan.step.stages import Stage
from phalanx.plan.types import Floats, Ints, Job, RankMemory, Strategy

_ONE = Held(np.ones((1, 1), int), np.zeros((1, 1), int))
"""Without a pipeline."""


@dataclass(frozen=True)
class Share:
    """What one pipeline rank has of the model.

    Attributes:
        layers: of each kind, in all its chunks.
        first: it has the embedding.
        last: it has the loss head.
        at_end: it is the last of the pipeline.
    """

    layers: tuple[Ints, ...]
    first: bool
    last: bool
    at_end: bool


def rank_memory(job: Job, strategy: Strategy) -> tuple[RankMemory, ...]:
    """Bytes on the fullest rank of each pipeline rank, at the moment when it holds most.

    Args:
        strategy: with plain numbers.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    pieces = pieces_of(job, strategy)
    stages = stages_held(job, strategy, pieces.kinds)
    # Few stages differ, so that each is weighed once.
    kept = {stage: pieces.activations(*stage) for stage in {(s.layers, s.last) for s in stages}}
    waiting = {layers: pieces.waiting(layers) for layers in {s.layers for s in stages}}
    some_wait = any(waiting.values())
    standing: dict[Share, Parts] = {}
    found = []
    for rank in range(strategy.pipeline):
        chunks = [stage for stage in stages if stage.rank == rank]
        share = _share(chunks, rank == strategy.pipeline - 1)
        if share not in standing:
            standing[share] = parts_of(pieces, share)
        passes = _passes(job, strategy, rank)
        total = passes.live @ [kept[s.layers, s.last] for s in chunks]
        if some_wait:
            total += passes.waiting @ [waiting[s.layers] for s in chunks]
        activations = float(total.max())
        parts = complete(pieces, standing[share], activations, passes.live[:, 0].max())
        found.append(RankMemory(rank, **{name: float(value) for name, value in parts.items()}))
    return tuple(found)


def _share(chunks: Sequence[Stage], at_end: bool) -> Share:
    layers = tuple(sum(counts) for counts in zip(*(stage.layers for stage in chunks), strict=True))
    return Share(layers, chunks[0].first, any(stage.last for stage in chunks), at_end)


def _passes(job: Job, strategy: Strategy, rank: int) -> Held:
    if strategy.pipeline == 1:
        return _ONE
    micro_batches = strategy.micro_batches(job.global_batch)
    return held(strategy.schedule, strategy.pipeline, strategy.chunks, micro_batches, rank)


@dataclass(frozen=True)
class Parts:
    """Bytes of a rank whatever is under way; arrays where the strategy has them."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    loss_head: Floats
    mask: Floats
    communication: Floats
    workspace: Floats


def parts_of(pieces: Pieces, share: Share) -> Parts:
    """What a rank with this share of the model holds."""
    job, strategy = pieces.job, pieces.strategy
    weights = pieces.held(share.layers, share.first, share.last)
    kept = state(job, strategy, weights)
    several = strategy.micro_batches(job.global_batch) > 1
    passing = pieces.widest() + exchanged(pieces)
    head = pieces.head.kept if share.last else 0.0
    return Parts(
        parameters=kept.parameters,
        gradients=where(several, kept.gradients, kept.gradients_first) + apart(job, strategy, weights, share.at_end),
        optimizer=kept.optimizer,
        loss_head=head,
        mask=pieces.mask if share.first else 0.0,
        communication=messages(pieces) + gathered(pieces) + in_flight(pieces, kept.gradients),
        workspace=largest(passing - head, pieces.head.passing) if share.last else passing,
    )


def complete(pieces: Pieces, parts: Parts, activations: Floats, first_passes: Ints) -> dict[str, Floats]:
    """The parts of `RankMemory` by name, but its rank.

    Args:
        activations: of all passes under way.
        first_passes: through the first chunk, under way at a time.
    """
    head = parts.loss_head + first_passes * parts.mask
    moving = activations + head + parts.communication + parts.workspace
    return {
        "parameters": parts.parameters,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": activations,
        "loss_head": head,
        "communication": parts.communication,
        "fragmentation": 0.0 if pieces.job.software.on_cpu else FRAGMENTATION.value * moving,
        "workspace": parts.workspace,
    }
