"""Memory of every pipeline rank, as its stages and its schedule have it.

`pieces_of` computes once for a strategy what layers and ends weigh, whatever their stage; `held_by_all` how many passes
a rank holds when it holds most; `rank_memory` puts both together, with messages on their way and fragmentation.

A pass is held from its forward pass to its backward pass; where schedules split the backward pass, what its weight
gradients need is held until they are made. The numbers are those of `phalanx.parallel.pipeline.schedules`, counted from
the order of actions in closed form: after a warm-up of w forward passes one forward and one backward pass take turns,
so that the i-th turn begins with w + 1 + i forward passes and i backward passes done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.jobs import moment_bytes_of
from phalanx.plan.memory import activations
from phalanx.plan.memory.activations import Head, Kept, embedding_mask, head
from phalanx.plan.operations import Local, local_of
from phalanx.plan.pipeline.grid import InFlight, held_by_all, splits_backward
from phalanx.plan.pipeline.step_time import Array
from phalanx.plan.stages import RankShare, Stages, stages_of
from phalanx.plan.types import (
    BYTES,
    Floats,
    Ints,
    Job,
    Model,
    Number,
    RankMemory,
    Software,
    Strategy,
    largest,
    layer_kinds,
    least,
    where,
)

Counts = NDArray[np.int64]


__all__ = ["MemoryParts", "complete", "parts_of", "rank_memory"]


def rank_memory(job: Job, strategy: Strategy) -> tuple[RankMemory, ...]:
    """Bytes on the fullest rank of each pipeline rank, at the moment when it holds most."""
    pieces = pieces_of(job, strategy)
    stages, passes = stages_held(job, strategy, pieces.kinds), _passes(job, strategy)
    kept = np.array([pieces.activations(stage.layers, stage.last) for stage in stages.different], float)
    held: Array = (passes.live * kept[stages.places.T][:, None]).sum(axis=2)
    if passes.waiting.any():
        waiting = np.array([pieces.waiting(stage.layers) for stage in stages.different], float)
        held += (passes.waiting * waiting[stages.places.T][:, None]).sum(axis=2)
    activations = held.max(axis=1).tolist()
    first_passes = passes.live[:, :, 0].max(axis=1).tolist()
    moving, standing = _moving(pieces), dict[RankShare, MemoryParts]()
    found = []
    for rank, share in enumerate(stages.shares):
        # Ranks between the ends of a pipeline hold alike: what stands still is computed once for all of them.
        if share not in standing:
            # In floats: some may be whole numbers, or of NumPy.
            standing[share] = MemoryParts(*map(float, vars(_parts(pieces, share, moving)).values()))
        found.append(RankMemory(rank, **complete(pieces, standing[share], activations[rank], first_passes[rank])))
    return tuple(found)


def _passes(job: Job, strategy: Strategy) -> InFlight:
    if strategy.pipeline == 1:
        return InFlight(np.ones((1, 1, 1), int), np.zeros((1, 1, 1), int))
    micro_batches = strategy.micro_batches(job.global_batch)
    return held_by_all(strategy.schedule, strategy.pipeline, strategy.chunks, micro_batches)


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of a rank whatever is under way; arrays where the strategy has them."""

    parameters: Floats
    gradients: Floats  # when most passes are under way
    all_gradients: Floats  # when the last backward pass ends
    optimizer: Floats
    loss_head: Floats
    mask: Floats
    communication: Floats
    workspace: Floats


@dataclass(frozen=True)
class _Moving:
    passing: Floats  # while a layer's backward pass runs
    messages: Floats  # to and from other stages, and weights that are gathered


def _moving(pieces: Pieces) -> _Moving:
    return _Moving(pieces.widest() + exchanged(pieces), messages(pieces) + gathered(pieces))


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
    software = pieces.job.software
    # As gradients are made activations go, so most is held at one end of the backward pass or at the other: where it
    # begins, or in the first layer, when all gradients are there and nearly nothing else is kept.
    gradients = largest(parts.gradients, parts.all_gradients - activations - head)
    fragmentation: Floats = 0.0 if software.on_cpu else FRAGMENTATION.value * moving
    if not software.on_cpu:
        fragmentation += reserved_share(software) * (parts.parameters + gradients + parts.optimizer + moving)
    return {
        "parameters": parts.parameters,
        "gradients": gradients,
        "optimizer": parts.optimizer,
        "activations": activations,
        "loss_head": head,
        "communication": parts.communication,
        "fragmentation": fragmentation,
        "workspace": parts.workspace,
    }


# As in phalanx.model.offload: layers whose copies may be under way.
LAYERS_ON_THE_WAY = 2

Kind = tuple[int, bool]  # keys that layers see (0: all of the past), and whether they are mixtures


@dataclass(frozen=True)
class Pieces:
    """Bytes and parameters of a model's pieces."""

    job: Job
    strategy: Strategy
    local: Local
    kinds: tuple[Kind, ...]  # of layers
    kept: tuple[Kept, ...]
    weights: tuple[HeldWeights, ...]
    head: Head
    mask: Floats  # kept by the dropout behind the embedding, of a micro-batch
    closing: Floats  # what a stage keeps of its own result, of a micro-batch; nothing on the last

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
    """The stages of a strategy with plain numbers; one where there is no pipeline, whatever its schedule says."""
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

PUBLISHED_PEAKS: Mapping[str, tuple[float, float]] = {
    "fsdp2": (0.004, 0.011),
    "fsdp2-compiled": (-0.066, -0.061),
}
"""How far published peaks of other programs lie from what is counted, least and most, as a share of it.

What torchtitan's allocator reserved (benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan @31a17bf, tables
1 and 3: Llama 3.1 8B on 8 and 128 GPUs). A test works it out again.
"""


def reserved_share(software: Software) -> float:
    """What a program was published to take beside what is counted here, as a share of that: what its allocator holds
    and cannot use, and copies and work space that no formula knows; 0 of programs that were not judged.
    """
    return max(PUBLISHED_PEAKS.get(software.name, (0.0, 0.0))[1], 0.0)


def is_reserved_known(software: Software) -> bool:
    """Whether what is predicted was held against what a program takes of a device, tensors and all else."""
    return software.is_phalanx or software.on_cpu or software.name in PUBLISHED_PEAKS


def reserved_note(software: Software) -> str:
    """What the memory of another program is; empty for ours, and on CPUs."""
    if software.is_phalanx or software.on_cpu:
        return ""
    if (known := PUBLISHED_PEAKS.get(software.name)) is None:
        return (
            f"memory is that of tensors, and {FRAGMENTATION.value:.0%} of what comes and goes: whether more is "
            f"reserved is unknown, as no published peaks of {software.name} were judged"
        ).replace("%", " %")
    least, most = (f"{100 * share:+.1f}" for share in known)
    return (
        f"memory is what is reserved: published peaks of {software.name} lie {least} to {most} % from what is counted"
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


# Bytes of parameters, gradients and optimizer state (ZeRO: arXiv 1910.02054). Ranks of `shard` and of `context` count
# together where state is split: ranks that see other tokens of the same sequences are data-parallel ranks to weights.
# Of experts, only the ranks that hold the same ones split state.


@dataclass(frozen=True)
class ModelState:
    """Bytes."""

    parameters: Floats
    gradients: Floats  # as they stand between the passes of a step whose first backward pass is done
    gradients_first: Floats  # the same before any backward pass of the step is done
    optimizer: Floats


def state(job: Job, strategy: Strategy, held: HeldWeights) -> ModelState:
    """What a rank that holds `held` keeps of it."""
    return _phalanx(job, strategy, held) if job.software.is_phalanx else _megatron(job, strategy, held)


def ways_of(strategy: Strategy) -> tuple[Ints, Ints]:
    """Ranks that split state: of what all data-parallel ranks share, and of experts."""
    ways = strategy.shard * strategy.context
    return ways, largest(ways // strategy.expert, 1)


def matrix_bytes(job: Job, strategy: Strategy) -> Floats:
    """Of an element of a block's matrix as Phalanx multiplies it: ranks of a spread model keep them in 16 bits."""
    alone = strategy.world_size == 1
    return where(alone, 4, BYTES[job.precision])


def _megatron(job: Job, strategy: Strategy, held: HeldWeights) -> ModelState:
    software, width = job.software, job.model.hidden
    dense = (held.rows + held.ends) * width + held.vectors
    experts = held.expert_rows * width
    ways, expert_ways = ways_of(strategy)

    def split(from_stage: int) -> Floats:
        if strategy.zero < from_stage:
            return dense + experts
        return dense / ways + experts / expert_ways

    master = split(1) * software.master_bytes
    gradients = split(2) * software.gradient_bytes
    return ModelState(
        parameters=split(3) * software.weight_bytes,
        gradients=gradients,
        gradients_first=gradients,
        optimizer=master + _moments(job, strategy, held, ways, expert_ways, dense + experts),
    )


def _phalanx(job: Job, strategy: Strategy, held: HeldWeights) -> ModelState:
    """Flat buckets of rows: matrices in the type that is multiplied, all else in fp32; masters apart where not fp32."""
    width = job.model.hidden
    alone = strategy.world_size == 1
    ways, expert_ways = ways_of(strategy)
    matrices, experts = held.rows * width, held.expert_rows * width
    ends = held.ends * width
    vectors = where(alone, held.vectors, held.vector_rows * width)
    c = matrix_bytes(job, strategy)
    masters = where(c < 4, 4 * (matrices / ways + experts / expert_ways), 0)
    # A program alone keeps 16-bit copies of the blocks' matrices and of the head's beside the fp32 ones.
    cast = BYTES[job.precision] if BYTES[job.precision] < 4 else 0
    casts = where(alone, cast, 0) * (matrices + experts + job.model.vocab_rows * width)
    whole = c * (matrices + experts) + 4 * ends + masters + casts
    gradients = 4 * (matrices + experts + ends)
    part = 4 * ((matrices + ends) / ways + experts / expert_ways)
    splits = ways > 1
    if strategy.zero == 3:
        whole = where(splits, part, whole)
    parameters = whole + 4 * vectors
    summed = where(splits & (strategy.zero > 1), part + 4 * vectors / ways, 0)
    between = gradients + 4 * vectors + summed
    if strategy.zero == 3:
        between = where(splits, part + 4 * vectors * (1 + 1 / ways), between)
    kept = (strategy.zero < 2) | ~splits
    first = where(alone, 0, where(kept, between, summed))
    elements = matrices + experts + ends + vectors
    return ModelState(parameters, between, first, _moments(job, strategy, held, ways, expert_ways, elements))


def apart(job: Job, strategy: Strategy, held: HeldWeights, at_end: Any) -> Floats:
    """Gradients of matrices that Phalanx put off, tensors of their own from the first one until the next backward pass.

    So it is with one chunk at a time, and with two on the last rank, which puts them off longest.
    """
    splits = (strategy.pipeline > 1) & splits_backward(strategy.schedule)
    chunks = least(1 + 1 * at_end, strategy.chunks) / largest(strategy.chunks, 1)
    counted_twice = splits & (strategy.zero < 2) & job.software.is_phalanx
    return counted_twice * chunks * 4 * (held.rows + held.expert_rows) * job.model.hidden


def _moments(
    job: Job, strategy: Strategy, held: HeldWeights, ways: Ints, expert_ways: Ints, elements: Floats
) -> Floats:
    """State of the optimizer: split over ranks from ZeRO-1 on, but for CAME's factors of columns.

    It is fp32, but AdamW's moments of matrices, which have `state_bits`.

    CAME keeps one moment, and for each matrix means over rows and columns of two statistics; Muon one for the blocks'
    matrices, and AdamW's two for the rest.
    """
    width = job.model.hidden
    if strategy.zero == 0:
        ways = expert_ways = 1
    blocks = held.rows * width / ways + held.expert_rows * width / expert_ways
    rest = (held.ends * width + held.vectors) / ways
    if job.optimizer in ("adamw", "lamb"):
        vectors = held.vectors / ways
        return 2 * moment_bytes_of(job) * (blocks + rest - vectors) + 8 * vectors
    if job.optimizer == "muon":
        return 4 * blocks + 8 * rest
    rows = (held.rows + held.ends) / ways + held.expert_rows / expert_ways
    factors = 2 * 4 * (rows + held.matrices * width) + 4 * held.vectors / ways
    return 4 * (blocks + rest) + factors + _came_buffer(job, strategy)


def _came_buffer(job: Job, strategy: Strategy) -> Floats:
    """Memory of the size of the largest matrix, in which a program alone updates one after the other."""
    model = job.model
    rows = max(model.vocab_rows, model.mlp_width, model.heads * model.head_dim)
    return (strategy.world_size == 1) * job.software.is_phalanx * 4 * rows * model.hidden


@dataclass(frozen=True)
class HeldWeights:
    """Parameters on one tensor-parallel rank."""

    rows: Floats = 0.0  # of the blocks' matrices, of the hidden width
    expert_rows: Floats = 0.0  # of the experts that are split over expert-parallel ranks
    ends: Floats = 0.0  # rows of embedding, positions and head
    matrices: Floats = 0.0  # logical matrices of all three, however they are stored
    vectors: Floats = 0.0  # elements of norms and biases
    vector_rows: Floats = 0.0  # rows of the hidden width that they take, each stored one at least one

    def __add__(self, other: HeldWeights) -> HeldWeights:
        return HeldWeights(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Floats) -> HeldWeights:
        return HeldWeights(*(getattr(self, f.name) * times for f in fields(self)))


def of_layer(local: Local, is_mixture: bool) -> HeldWeights:
    """One layer."""
    model = local.model
    attention = local.projection_rows + local.query_rows
    norms, biases = _vectors(local, is_mixture)
    vectors, stored = sum(norms) + sum(biases), _rows_of(norms, model) + _rows_of(biases, model)
    matrices = 3 if model.gated else 2
    if not is_mixture:
        return HeldWeights(attention + local.dense_inner * matrices, 0.0, 0.0, 4 + matrices, vectors, stored)
    shared = local.inner * matrices * model.shared_experts
    experts = model.experts / local.expert_ranks
    count = 5 + matrices * (experts + model.shared_experts)
    routed = experts * local.inner * matrices
    return HeldWeights(attention + shared + model.experts, routed, 0.0, count, vectors, stored)


def of_embedding(model: Model, tensor: Ints) -> HeldWeights:
    """The embedding, and learned positions, which are not split."""
    positions = model.max_sequence if model.position == "learned" else 0
    return HeldWeights(ends=model.vocab_rows / tensor + positions, matrices=2 if positions else 1)


def of_head(model: Model, tensor: Ints, beside_embedding: bool) -> HeldWeights:
    """The last norm, and the head: a copy of the embedding where both are tied and that is on another rank."""
    norms = _norm(model)
    vectors = HeldWeights(vectors=sum(norms), vector_rows=_rows_of(norms, model))
    if model.tie_embeddings and beside_embedding:
        return vectors
    return vectors + HeldWeights(ends=model.vocab_rows / tensor, matrices=1)


def _norm(model: Model) -> list[Floats]:
    return [model.hidden] * (2 if model.norm == "layer" and model.bias == "all" else 1)


def _vectors(local: Local, is_mixture: bool) -> tuple[list[Floats], list[Floats]]:
    """Elements of each stored norm, and of each stored bias."""
    model = local.model
    norms = _norm(model) * (1 if model.block == "parallel" else 2)
    norms += [model.head_dim] * (2 if model.qk_norm else 0)
    if model.bias == "none":
        return norms, []
    wide = [] if is_mixture or model.bias == "qkv" else [local.in_width]
    outputs = 0 if model.bias == "qkv" else (1 if is_mixture else 2)
    if model.merged and not is_mixture:
        return norms, [local.projection_rows + sum(wide), *([outputs * model.hidden] if outputs else [])]
    return norms, [local.projection_rows, *wide, *[model.hidden] * outputs]


def _rows_of(lengths: list[Floats], model: Model) -> Floats:
    return sum(-(-length // model.hidden) for length in lengths)
