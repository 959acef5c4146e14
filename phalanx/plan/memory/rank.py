"""Memory of every pipeline rank, exactly as its stages and its schedule have it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.hardware.either import largest, where
from phalanx.plan.memory.buffers import FRAGMENTATION, exchanged, gathered, in_flight, messages
from phalanx.plan.memory.flight import Held, held_by_all
from phalanx.plan.memory.pieces import Pieces, pieces_of, stages_held
from phalanx.plan.memory.state import apart, state
from phalanx.plan.pipeline.costs import Array
from phalanx.plan.step.stages import Share, Stages
from phalanx.plan.types import Floats, Ints, Job, RankMemory, Strategy

__all__ = ["Parts", "Share", "complete", "parts_of", "rank_memory"]

_ONE = Held(np.ones((1, 1, 1), int), np.zeros((1, 1, 1), int))
"""Without a pipeline."""


def rank_memory(job: Job, strategy: Strategy) -> tuple[RankMemory, ...]:
    """Bytes on the fullest rank of each pipeline rank, at the moment when it holds most.

    Args:
        strategy: with plain numbers.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    pieces = pieces_of(job, strategy)
    stages, passes = stages_held(job, strategy, pieces.kinds), _passes(job, strategy)
    activations = _fullest(pieces, stages, passes).tolist()
    first_passes = passes.live[:, :, 0].max(axis=1).tolist()
    moving, standing = _moving(pieces), dict[Share, Parts]()
    found = []
    for rank, share in enumerate(stages.shares):
        if share not in standing:
            standing[share] = _plain(_parts(pieces, share, moving))
        found.append(RankMemory(rank, **complete(pieces, standing[share], activations[rank], first_passes[rank])))
    return tuple(found)


def _fullest(pieces: Pieces, stages: Stages, passes: Held) -> Array:
    """Bytes of all passes under way when a rank holds most of them, by rank."""
    kept = np.array([pieces.activations(stage.layers, stage.last) for stage in stages.different], float)
    held: Array = (passes.live * kept[stages.places.T][:, None]).sum(axis=2)
    if passes.waiting.any():
        waiting = np.array([pieces.waiting(stage.layers) for stage in stages.different], float)
        held += (passes.waiting * waiting[stages.places.T][:, None]).sum(axis=2)
    most: Array = held.max(axis=1)
    return most


def _passes(job: Job, strategy: Strategy) -> Held:
    """What every rank holds."""
    if strategy.pipeline == 1:
        return _ONE
    micro_batches = strategy.micro_batches(job.global_batch)
    return held_by_all(strategy.schedule, strategy.pipeline, strategy.chunks, micro_batches)


@dataclass(frozen=True)
class Parts:
    """Bytes of a rank whatever is under way; arrays where the strategy has them.

    Attributes:
        gradients: when most passes are under way.
        all_gradients: when the last backward pass ends.
    """

    parameters: Floats
    gradients: Floats
    all_gradients: Floats
    optimizer: Floats
    loss_head: Floats
    mask: Floats
    communication: Floats
    workspace: Floats


@dataclass(frozen=True)
class _Moving:
    """Bytes that come and go, the same on all ranks but for the loss head.

    Attributes:
        passing: while a layer's backward pass runs.
        messages: to and from other stages, and weights that are gathered.
    """

    passing: Floats
    messages: Floats


def _moving(pieces: Pieces) -> _Moving:
    return _Moving(pieces.widest() + exchanged(pieces), messages(pieces) + gathered(pieces))


def _plain(parts: Parts) -> Parts:
    """The same in floats, where some may be whole numbers, or of NumPy."""
    return Parts(*map(float, vars(parts).values()))


def parts_of(pieces: Pieces, share: Share) -> Parts:
    """What a rank with this share of the model holds."""
    return _parts(pieces, share, _moving(pieces))


def _parts(pieces: Pieces, share: Share, moving: _Moving) -> Parts:
    job, strategy = pieces.job, pieces.strategy
    weights = pieces.held(share.layers, share.first, share.last)
    kept = state(job, strategy, weights)
    several = strategy.micro_batches(job.global_batch) > 1
    head = pieces.head.kept if share.last else 0.0
    aside = apart(job, strategy, weights, share.at_end)
    return Parts(
        parameters=kept.parameters,
        gradients=where(several, kept.gradients, kept.gradients_first) + aside,
        all_gradients=kept.gradients + aside,
        optimizer=kept.optimizer,
        loss_head=head,
        mask=pieces.mask if share.first else 0.0,
        communication=moving.messages + in_flight(pieces, kept.gradients),
        workspace=largest(moving.passing - head, pieces.head.passing) if share.last else moving.passing,
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
        # As gradients are made activations go, so most is held at one end of the backward pass or at the other: where
        # it begins, or in the first layer, when all gradients are there and nearly nothing else is kept.
        "gradients": largest(parts.gradients, parts.all_gradients - activations - head),
        "optimizer": parts.optimizer,
        "activations": activations,
        "loss_head": head,
        "communication": parts.communication,
        "fragmentation": 0.0 if pieces.job.software.on_cpu else FRAGMENTATION.value * moving,
        "workspace": parts.workspace,
    }
