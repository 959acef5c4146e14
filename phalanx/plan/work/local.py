"""What one rank has of a micro-batch and of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.hardware.either import largest
from phalanx.plan.types import BYTES, Ints, Job, Model, Software, Strategy


@dataclass(frozen=True)
class Local:
    """Sizes on one rank.

    Attributes:
        tokens: that its matrix products see, T = b S / c.
        kept_tokens: of the residual stream, which sequence parallelism splits over the tensor-parallel ranks.
        sequences: of a micro-batch.
        heads: query heads.
        query_rows, projection_rows: outputs of q, and of q, k and v together.
        inner: width of the MLP, or of each expert.
        dense_inner: width of the MLP in layers without experts.
        expert_ranks: data-parallel ranks that hold different experts.
        compute_bytes: of one element of what is multiplied.
        weight_bytes: of one element of a matrix as it is kept; what is multiplied is cast from it where it is wider.
    """

    model: Model
    software: Software
    sequence: int
    tensor: Ints
    tokens: Ints
    kept_tokens: Ints
    sequences: Ints
    heads: Ints
    query_rows: Ints
    projection_rows: Ints
    inner: Ints
    dense_inner: Ints
    expert_ranks: Ints
    compute_bytes: int
    weight_bytes: int

    def kernel(self, name: str) -> str:
        """What a device's file calls a kernel of a layer."""
        return f"{name}_compiled" if self.software.compiled else name

    @property
    def residual_bytes(self) -> int:
        """Of one element of the residual stream."""
        return self.software.residual_bytes

    @property
    def gates(self) -> int:
        """Matrices that the MLP's first product has: gate and up, or up."""
        return 2 if self.model.gated else 1

    @property
    def in_width(self) -> Ints:
        """Outputs of a dense MLP's first product."""
        return self.dense_inner * self.gates


def local_of(job: Job, strategy: Strategy) -> Local:
    """The sizes on a rank of `strategy`; they are the same on all of them, up to what does not divide."""
    model, tensor = job.model, strategy.tensor
    tokens = strategy.micro_batch * job.sequence // strategy.context
    query_rows = model.heads * model.head_dim // tensor
    # Where there are fewer key/value heads than ranks, ranks hold copies.
    kv_rows = largest(model.kv_heads / tensor, 1) * model.head_dim
    return Local(
        model=model,
        software=job.software,
        sequence=job.sequence,
        tensor=tensor,
        tokens=tokens,
        kept_tokens=tokens // tensor if strategy.sequence_parallel else tokens,
        sequences=strategy.micro_batch,
        heads=model.heads // tensor,
        query_rows=query_rows,
        projection_rows=query_rows + 2 * kv_rows,
        inner=model.mlp_width // tensor,
        dense_inner=model.dense_mlp_width // tensor,
        expert_ranks=strategy.expert,
        compute_bytes=BYTES[job.precision],
        weight_bytes=weight_bytes(job, strategy),
    )


def weight_bytes(job: Job, strategy: Strategy) -> int:
    """Of one element of a matrix as the model keeps it.

    Phalanx keeps fp32 matrices in a single process; spread, what it multiplies and fp32 masters beside.

    Sets of layouts count as spread: a single process has nothing to choose from.
    """
    axes = (strategy.pipeline, strategy.replicate, strategy.shard, strategy.context, strategy.tensor)
    alone = all(isinstance(size, int) and size == 1 for size in axes)
    spread_bytes = BYTES[job.precision] if job.software.is_phalanx else job.software.weight_bytes
    return job.software.weight_bytes if alone else spread_bytes
