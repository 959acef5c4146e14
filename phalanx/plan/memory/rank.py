"""Memory of every pipeline rank, as its stages and its schedule have it.

`pieces_of` computes once for a strategy what layers and ends weigh, whatever their stage; `held_by_all` how many passes
a rank holds when it holds most; `rank_memory` puts both together, with messages on their way and fragmentation.

A pass is held from its forward pass to its backward pass; where schedules split the backward pass, what its weight
gradients need is held until they are made. The numbers are those of `phalanx.parallel.pipeline.schedules`, counted from
the order of actions in closed form: after a warm-up of w forward passes one forward and one backward pass take turns,
so that the i-th turn begins with w + 1 + i forward passes and i backward passes done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.plan.hardware.formula import largest, least, where
from phalanx.plan.memory import activations
from phalanx.plan.memory.activations import Head, Kept, embedding_mask, head
from phalanx.plan.memory.model_state import (
    HeldWeights,
    apart,
    matrix_bytes,
    of_embedding,
    of_head,
    of_layer,
    state,
    ways_of,
)
from phalanx.plan.operations import Local, local_of
from phalanx.plan.pipeline.grid import BACKWARD, FORWARD, WEIGHTS, make_orders
from phalanx.plan.pipeline.step_time import Array
from phalanx.plan.stages import RankShare, Stages, stages_of
from phalanx.plan.types import Floats, Ints, Job, Model, Number, RankMemory, Strategy, layer_kinds

Counts = NDArray[np.int64]


__all__ = ["MemoryParts", "complete", "parts_of", "rank_memory"]


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
    moving, standing = _moving(pieces), dict[RankShare, MemoryParts]()
    found = []
    for rank, share in enumerate(stages.shares):
        # Ranks between the ends of a pipeline hold alike: what stands still is computed once for all of them.
        if share not in standing:
            standing[share] = _plain(_parts(pieces, share, moving))
        found.append(RankMemory(rank, **complete(pieces, standing[share], activations[rank], first_passes[rank])))
    return tuple(found)


def _fullest(pieces: Pieces, stages: Stages, passes: InFlight) -> Array:
    """Bytes of all passes under way when a rank holds most of them, by rank."""
    kept = np.array([pieces.activations(stage.layers, stage.last) for stage in stages.different], float)
    held: Array = (passes.live * kept[stages.places.T][:, None]).sum(axis=2)
    if passes.waiting.any():
        waiting = np.array([pieces.waiting(stage.layers) for stage in stages.different], float)
        held += (passes.waiting * waiting[stages.places.T][:, None]).sum(axis=2)
    most: Array = held.max(axis=1)
    return most


def _passes(job: Job, strategy: Strategy) -> InFlight:
    """What every rank holds."""
    if strategy.pipeline == 1:
        return _ONE
    micro_batches = strategy.micro_batches(job.global_batch)
    return held_by_all(strategy.schedule, strategy.pipeline, strategy.chunks, micro_batches)


@dataclass(frozen=True)
class MemoryParts:
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


def _plain(parts: MemoryParts) -> MemoryParts:
    """The same in floats, where some may be whole numbers, or of NumPy."""
    return MemoryParts(*map(float, vars(parts).values()))


def parts_of(pieces: Pieces, share: RankShare) -> MemoryParts:
    """What a rank with this share of the model holds."""
    return _parts(pieces, share, _moving(pieces))


def _parts(pieces: Pieces, share: RankShare, moving: _Moving) -> MemoryParts:
    job, strategy = pieces.job, pieces.strategy
    weights = pieces.held(share.layers, share.first, share.last)
    kept = state(job, strategy, weights)
    several = strategy.micro_batches(job.global_batch) > 1
    head = pieces.head.kept if share.last else 0.0
    aside = apart(job, strategy, weights, share.at_end)
    return MemoryParts(
        parameters=kept.parameters,
        gradients=where(several, kept.gradients, kept.gradients_first) + aside,
        all_gradients=kept.gradients + aside,
        optimizer=kept.optimizer,
        loss_head=head,
        mask=pieces.mask if share.first else 0.0,
        communication=moving.messages + in_flight(pieces, kept.gradients),
        workspace=largest(moving.passing - head, pieces.head.passing) if share.last else moving.passing,
    )


def complete(pieces: Pieces, parts: MemoryParts, activations: Floats, first_passes: Ints) -> dict[str, Floats]:
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


# As in phalanx.model.offload: layers whose copies may be under way.
LAYERS_ON_THE_WAY = 2

Kind = tuple[int, bool]
"""Keys that layers see (0: all of the past), and whether they are mixtures."""


@dataclass(frozen=True)
class Pieces:
    """Bytes and parameters of a model's pieces.

    Attributes:
        kinds: of layers.
        kept: for each kind.
        weights: for each kind.
        mask: kept by the dropout behind the embedding, of a micro-batch.
        closing: what a stage keeps of its own result, of a micro-batch; nothing on the last.
    """

    job: Job
    strategy: Strategy
    local: Local
    kinds: tuple[Kind, ...]
    kept: tuple[Kept, ...]
    weights: tuple[HeldWeights, ...]
    head: Head
    mask: Floats
    closing: Floats

    def activations(self, layers: Sequence[Ints], last: bool) -> Floats:
        """What a chunk with so many layers of each kind keeps of one micro-batch."""
        each = [kept.chosen for kept in self.kept]
        total = sum(count * size for count, size in zip(layers, each, strict=True)) - self._on_host(layers)
        end = self.head.stream if last else self.closing
        return total + end + self._masks(layers)

    def waiting(self, layers: Sequence[Ints]) -> Floats:
        """What a chunk keeps for weight gradients that are put off, of one micro-batch.

        In Phalanx, what waits knows how it came about, and so keeps the stage's input, its gradient, and masks.
        """
        total = sum(count * kept.waiting for count, kept in zip(layers, self.kept, strict=True))
        return total + 2 * self.head.stream * self.job.software.is_phalanx + self._masks(layers)

    def held(self, layers: Sequence[Ints], first: bool, last: bool) -> HeldWeights:
        """Parameters of a rank with so many layers of each kind, in all its chunks."""
        pieces = [weights * count for count, weights in zip(layers, self.weights, strict=True)]
        if first:
            pieces.append(of_embedding(self.job.model, self.strategy.tensor))
        if last:
            pieces.append(of_head(self.job.model, self.strategy.tensor, first))
        total: HeldWeights = sum(pieces[1:], pieces[0])
        return total

    def widest(self) -> Floats:
        """What the backward pass of the layer that needs most needs besides what is kept."""
        needs = [kept.passing + kept.again for kept in self.kept]
        return needs[0] if len(needs) == 1 else largest(*needs)

    def _on_host(self, layers: Sequence[Ints]) -> Floats:
        """What of a chunk's layers has left the device when most is kept: all of its share but the last two."""
        share = self.strategy.offload
        if not share:
            return 0.0
        count = largest(sum(layers), 1)
        gone = largest(-(-share * count // 1) - LAYERS_ON_THE_WAY, 0)
        return gone * sum(number * kept.leaving for number, kept in zip(layers, self.kept, strict=True)) / count

    def _masks(self, layers: Sequence[Ints]) -> Floats:
        total: Floats = 0.0
        if not self.job.software.is_phalanx:
            return total
        for window in dict.fromkeys(window for window, _ in self.kinds):
            of_window = [n for n, kind in enumerate(self.kinds) if kind[0] == window]
            some = sum(layers[n] for n in of_window) > 0
            total = total + some * self.kept[of_window[0]].masks
        return total


def kinds_of(model: Model) -> tuple[Kind, ...]:
    """The kinds of layers that a model has."""
    return layer_kinds(model)


def stages_held(job: Job, strategy: Strategy, kinds: Sequence[Kind]) -> Stages:
    """The stages of a strategy with plain numbers; one where there is no pipeline, whatever its schedule says.

    Raises:
        UserError: the schedule cannot have so many chunks.
    """
    if strategy.pipeline == 1:
        strategy = replace(strategy, schedule="1f1b", chunks=1)
    return stages_of(job, strategy, kinds)


def pieces_of(job: Job, strategy: Strategy) -> Pieces:
    """The pieces of `job` on a rank of `strategy`."""
    local, kinds = local_of(job, strategy), kinds_of(job.model)
    return Pieces(
        job=job,
        strategy=strategy,
        local=local,
        kinds=kinds,
        kept=tuple(_layer(job, strategy, local, *kind) for kind in kinds),
        weights=tuple(of_layer(local, is_mixture) for _, is_mixture in kinds),
        head=head(job, strategy, local),
        mask=embedding_mask(job, local),
        closing=_closing(job, strategy, local),
    )


def _layer(job: Job, strategy: Strategy, local: Local, window: int, is_mixture: bool) -> Kept:
    if job.software.is_phalanx:
        return activations.phalanx_layer(local, strategy, window, is_mixture)
    return activations.megatron_layer(local, strategy, is_mixture)


def _closing(job: Job, strategy: Strategy, local: Local) -> Floats:
    """Where matrix products are kept that are the stream themselves, the last of a stage is nobody's input there."""
    if not job.software.is_phalanx or strategy.recompute not in ("elementwise", "mlp"):
        return 0.0
    return activations.adds_residual(local, strategy) * local.kept_tokens * job.model.hidden * local.residual_bytes


# Megatron-LM: an activation and a gradient that come, and as many that go.
_MESSAGES = 4
# Reductions of buckets on their way while another is made (phalanx.parallel.zero.chunk), by ZeRO stage.
_BUCKETS_IN_FLIGHT = {0: 1, 1: 1, 2: 3, 3: 1}

FRAGMENTATION = Number(
    0.03,
    "ratio",
    "assumed",
    "share of what comes and goes within a step that a caching GPU allocator holds and cannot use",
)


def messages(pieces: Pieces) -> Floats:
    """Activations and gradients between pipeline stages that are on their way.

    Phalanx lets go of what it sent when something comes back that says it has arrived: where there are chunks, about a
    turn of the pipeline later, for activations as for gradients.
    """
    local, software, strategy = pieces.local, pieces.job.software, pieces.strategy
    one = local.kept_tokens * pieces.job.model.hidden * software.residual_bytes
    count: Floats = _MESSAGES
    if software.is_phalanx:
        count = where(strategy.chunks > 1, 2 * strategy.pipeline + 2, _MESSAGES)
    return (strategy.pipeline > 1) * count * one


def gathered(pieces: Pieces) -> Floats:
    """Weights of ZeRO-3 that are whole for a moment: those of a layer, and of the next one, which are asked for.

    And in Phalanx whole fp32 gradients of a layer, which are reduced while the next ones are made.
    """
    if pieces.strategy.zero < 3:
        return 0.0
    ways, _ = ways_of(pieces.strategy)
    software = pieces.job.software
    each = matrix_bytes(pieces.job, pieces.strategy) if software.is_phalanx else software.weight_bytes
    rows = pieces.weights[0].rows
    for weights in pieces.weights[1:]:
        rows = largest(rows, weights.rows)
    reduced = 4 if software.is_phalanx else 0
    return where(ways > 1, rows * pieces.job.model.hidden * (2 * each + reduced), 0)


def in_flight(pieces: Pieces, gradients: Floats) -> Floats:
    """Copies of gradients as they travel: of narrower type than they are kept in, or of ZeRO-2's and 3's buckets.

    Args:
        gradients: bytes of whole fp32 gradients of the rank, which no buckets exceed.
    """
    software, strategy = pieces.job.software, pieces.strategy
    if software.reduce_bytes == software.gradient_bytes:
        return 0.0
    bucket = strategy.bucket_bytes if strategy.bucket_bytes else gradients
    narrow = software.reduce_bytes / software.gradient_bytes
    copies = least(_BUCKETS_IN_FLIGHT[strategy.zero] * bucket, gradients) * narrow
    return where(strategy.data * strategy.context > 1, copies, 0)


def exchanged(pieces: Pieces) -> Floats:
    """Rows that tensor-parallel ranks gather for a product: of the stream, and of its gradient."""
    local = pieces.local
    whole = local.tokens * pieces.job.model.hidden * local.compute_bytes
    split = (local.tensor > 1) & bool(pieces.strategy.sequence_parallel)
    return where(split, 2 * whole, 0)


@dataclass(frozen=True, eq=False)
class InFlight:
    """Passes that a rank holds, by moment and chunk: (moments, chunks); or that all ranks do, ranks first.

    Attributes:
        live: between forward and backward pass.
        waiting: whose gradients of activations are made, and those of weights are not.
    """

    live: Counts
    waiting: Counts


_ONE = InFlight(np.ones((1, 1, 1), int), np.zeros((1, 1, 1), int))
"""Without a pipeline."""


def held(schedule: Schedule, ranks: int, chunks: int, micro_batches: int, rank: int) -> InFlight:
    """What `rank` holds at moments among which the fullest is, whatever its chunks weigh."""
    found = held_by_all(schedule, ranks, chunks, micro_batches)
    return InFlight(found.live[rank], found.waiting[rank])


@lru_cache(maxsize=4096)
def held_by_all(schedule: Schedule, ranks: int, chunks: int, micro_batches: int) -> InFlight:
    """What every rank holds, each at moments of its own among which its fullest is."""
    if schedule == "zbv":
        return _counted(ranks, min(micro_batches, 2 * ranks + 1))
    rank, total, splits = np.arange(ranks)[:, None], chunks * micro_batches, _splits(schedule)
    turn_length = round_length(micro_batches, ranks) if chunks > 1 or schedule != "1f1b" else 1
    begun = warmup(schedule, ranks, chunks, micro_batches, rank) + 1
    if schedule == "1f1b":
        turns = np.zeros_like(rank)  # with one chunk, the first turn is as full as any
    else:
        turns = _corners(begun, rank if splits else None, turn_length, total, chunks * turn_length + ranks)
    forwards = _by_chunk(np.minimum(begun + turns, total), chunks, turn_length)
    live, waiting = [], []
    for ended in (0, 1) if splits else (0,):  # after the forward pass of a turn, and after its backward pass
        made = _by_chunk(turns + ended, chunks, turn_length, backward=True)
        live.append(forwards - made)
        late = _by_chunk(weights_done(turns, rank), chunks, turn_length, backward=True) if splits else made
        waiting.append(made - late)
    return InFlight(np.concatenate(live, axis=1), np.concatenate(waiting, axis=1))


def _corners(begun: Counts, late: Counts | None, turn_length: int, total: int, last: int) -> Counts:
    """The turns, by rank, from which on another chunk is counted; between them all numbers change evenly.

    Args:
        begun: forward passes before the end of the first turn's.
        late: turns by which weight gradients are put off; None: they are not.
        last: turn after which the same numbers come again.
    """
    rounds = turn_length * np.arange(last // turn_length + 2)
    corners = [np.broadcast_to(rounds, (len(begun), len(rounds))), rounds - begun % turn_length, total - begun]
    if late is not None:
        corners += [corners[0] - 1, rounds + late]
    return np.clip(np.concatenate(corners, axis=1), 0, min(total - 1, last))


def warmup(schedule: Schedule, ranks: Any, chunks: Any, micro_batches: Any, rank: Any) -> Any:
    """Forward passes that a rank makes before it begins to alternate; arrays too. Not of ``"zbv"``."""
    if schedule == "1f1b":
        return np.minimum(ranks - 1 - rank, micro_batches)
    behind = (1 if _splits(schedule) else 2) * (ranks - 1 - rank)
    return np.minimum((chunks - 1) * round_length(micro_batches, ranks) + behind, chunks * micro_batches)


def round_length(micro_batches: Any, ranks: Any) -> Any:
    """Micro-batches that go through a chunk before the next chunk's turn; arrays too."""
    return micro_batches // np.maximum(micro_batches // ranks, 1)


def weights_done(turns: Any, rank: Any) -> Any:
    """Weight gradients that were made before a turn's own, where they are put off; arrays too."""
    return np.maximum(turns - rank, 0)


def passes_by_chunk(
    count: Any, chunks: Any, turn_length: Any, most_chunks: int, *, backward: bool = False
) -> list[Any]:
    """How many of the first `count` passes of a rank are of each of `most_chunks` chunks; arrays too.

    Rounds of `turn_length` micro-batches go through the chunks one after the other, `backward` from the last to the
    first. Of chunks that a rank does not have the numbers mean nothing.
    """
    whole, rest = np.divmod(count, chunks * turn_length)
    done = whole * turn_length
    order = [chunks - 1 - chunk if backward else chunk for chunk in range(most_chunks)]
    return [done + np.minimum(np.maximum(rest - place * turn_length, 0), turn_length) for place in order]


def _splits(schedule: Schedule) -> bool:
    return schedule in ("interleaved_zero_bubble", "zbv")


def _by_chunk(count: Counts, chunks: int, turn_length: int, backward: bool = False) -> Counts:
    return np.stack(passes_by_chunk(count, chunks, turn_length, chunks, backward=backward), axis=-1)


def _counted(ranks: int, micro_batches: int) -> InFlight:
    """Counted from the actions themselves: those of a V have no short formula."""
    orders = make_orders("zbv", ranks, 2, 1, micro_batches)
    part, stage = np.divmod(orders.codes, orders.stages)
    of_chunk = (stage == orders.stages_of[:, :1])[..., None] == [True, False]  # by rank, place and chunk
    made, late = (part == BACKWARD)[..., None] & of_chunk, (part == WEIGHTS)[..., None] & of_chunk
    live = ((part == FORWARD)[..., None] & of_chunk).cumsum(axis=1) - made.cumsum(axis=1)
    waiting = made.cumsum(axis=1) - late.cumsum(axis=1)
    fullest = [_fullest_moments(moments) for moments in np.concatenate([live, waiting], axis=2)]
    # A rank with fewer moments than others has its last one several times.
    most = max(map(len, fullest))
    both = np.stack([moments[np.minimum(np.arange(most), len(moments) - 1)] for moments in fullest])
    return InFlight(both[..., :2], both[..., 2:])


def _fullest_moments(moments: Counts) -> Counts:
    """Each moment once, and only those that no other holds as much as in every respect."""
    codes = moments @ (int(moments.max()) + 1) ** np.arange(moments.shape[1])
    different = moments[np.unique(codes, return_index=True)[1]]
    as_much = (different[:, None] >= different).all(axis=2)
    fullest: Counts = different[as_much.sum(axis=0) == 1]  # each holds as much as itself
    return fullest
