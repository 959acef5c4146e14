"""Bytes of parameters, gradients and optimizer state on one rank (ZeRO: arXiv 1910.02054).

Both programs count the ranks of `shard` and of `context` together where state is split: ranks that see other tokens of
the same sequences are data-parallel ranks to weights. Of experts, only the ranks that hold the same ones split state.

A rank holds rows of the hidden width, and vectors. Projections that read the stream have a row for each output, those
that write it one for each input, so that dimension 0 counts heads, MLP columns, or words (`phalanx.model.shapes`);
tensor-parallel ranks split it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from phalanx.plan.hardware.formula import largest, least, where
from phalanx.plan.operations import Local
from phalanx.plan.types import BYTES, Floats, Ints, Job, Model, Strategy


@dataclass(frozen=True)
class State:
    """Bytes.

    Attributes:
        gradients: as they stand between the passes of a step whose first backward pass is done.
        gradients_first: the same before any backward pass of the step is done.
    """

    parameters: Floats
    gradients: Floats
    gradients_first: Floats
    optimizer: Floats


def state(job: Job, strategy: Strategy, held: Held) -> State:
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


def _megatron(job: Job, strategy: Strategy, held: Held) -> State:
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
    return State(
        parameters=split(3) * software.weight_bytes,
        gradients=gradients,
        gradients_first=gradients,
        optimizer=master + _moments(job, strategy, held, ways, expert_ways, dense + experts),
    )


def _phalanx(job: Job, strategy: Strategy, held: Held) -> State:
    """Flat buckets of rows: matrices in the type that is multiplied, all else in fp32; masters apart where not fp32."""
    width = job.model.hidden
    alone = strategy.world_size == 1
    ways, expert_ways = ways_of(strategy)
    matrices, experts = held.rows * width, held.expert_rows * width
    ends = held.ends * width
    vectors = where(alone, held.vectors, held.vector_rows * width)
    c = matrix_bytes(job, strategy)
    masters = where(c < 4, 4 * (matrices / ways + experts / expert_ways), 0)
    whole = c * (matrices + experts) + 4 * ends + masters + _casts(job, alone, matrices + experts)
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
    return State(parameters, between, first, _moments(job, strategy, held, ways, expert_ways, elements))


def _casts(job: Job, alone: Any, blocks: Floats) -> Floats:
    """16-bit copies of the blocks' matrices and of the head's, which a program alone keeps beside the fp32 ones."""
    each = BYTES[job.precision]
    return where(alone, each, 0) * (blocks + job.model.vocab_rows * job.model.hidden) if each < 4 else 0.0


def apart(job: Job, strategy: Strategy, held: Held, at_end: Any) -> Floats:
    """Gradients of matrices that Phalanx put off, tensors of their own from the first one until the next backward pass.

    So it is with one chunk at a time, and with two on the last rank, which puts them off longest.
    """
    splits = (strategy.pipeline > 1) & (strategy.schedule in ("interleaved_zero_bubble", "zbv"))
    chunks = least(1 + 1 * at_end, strategy.chunks) / largest(strategy.chunks, 1)
    counted_twice = splits & (strategy.zero < 2) & job.software.is_phalanx
    return counted_twice * chunks * 4 * (held.rows + held.expert_rows) * job.model.hidden


def _moments(job: Job, strategy: Strategy, held: Held, ways: Ints, expert_ways: Ints, elements: Floats) -> Floats:
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
        return 2 * job.moment_bytes * (blocks + rest - vectors) + 8 * vectors
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
class Held:
    """Parameters on one tensor-parallel rank.

    Attributes:
        rows: of the blocks' matrices, of the hidden width.
        expert_rows: of the experts that are split over expert-parallel ranks.
        ends: rows of embedding, positions and head.
        matrices: logical matrices of all three, however they are stored.
        vectors: elements of norms and biases.
        vector_rows: rows of the hidden width that they take, each stored one at least one.
    """

    rows: Floats = 0.0
    expert_rows: Floats = 0.0
    ends: Floats = 0.0
    matrices: Floats = 0.0
    vectors: Floats = 0.0
    vector_rows: Floats = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Floats) -> Held:
        return Held(*(getattr(self, f.name) * times for f in fields(self)))


def of_layer(local: Local, is_mixture: bool) -> Held:
    """One layer."""
    model = local.model
    attention = local.projection_rows + local.query_rows
    norms, biases = _vectors(local, is_mixture)
    vectors, stored = sum(norms) + sum(biases), _rows_of(norms, model) + _rows_of(biases, model)
    matrices = 3 if model.gated else 2
    if not is_mixture:
        return Held(attention + local.dense_inner * matrices, 0.0, 0.0, 4 + matrices, vectors, stored)
    shared = local.inner * matrices * model.shared_experts
    experts = model.experts / local.expert_ranks
    count = 5 + matrices * (experts + model.shared_experts)
    routed = experts * local.inner * matrices
    return Held(attention + shared + model.experts, routed, 0.0, count, vectors, stored)


def of_embedding(model: Model, tensor: Ints) -> Held:
    """The embedding, and learned positions, which are not split."""
    positions = model.max_sequence if model.position == "learned" else 0
    return Held(ends=model.vocab_rows / tensor + positions, matrices=2 if positions else 1)


def of_head(model: Model, tensor: Ints, beside_embedding: bool) -> Held:
    """The last norm, and the head: a copy of the embedding where both are tied and that is on another rank."""
    norms = _norm(model)
    vectors = Held(vectors=sum(norms), vector_rows=_rows_of(norms, model))
    if model.tie_embeddings and beside_embedding:
        return vectors
    return vectors + Held(ends=model.vocab_rows / tensor, matrices=1)


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
