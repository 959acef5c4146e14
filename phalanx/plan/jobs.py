"""From the settings of a run to what is computed and how it is spread, and back to settings to paste."""

from __future__ import annotations

from phalanx.model.config import ModelConfig
from phalanx.optim.config import Kind as Optimizer
from phalanx.parallel.config import ParallelConfig
from phalanx.plan.types import BYTES, Job, Model, Overlap, Precision, Recompute, Software, StateBits, Strategy

# What `train.recompute` says, in the words of the cost model.
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "elementwise", "mlp": "mlp", "full": "full"}
_OVERLAP: dict[str, Overlap] = {"none": "none", "chunked": "chunked", "fused": "fused", "tiles": "fused"}


def make_job(
    model: ModelConfig,
    *,
    sequence: int,
    global_batch: int,
    precision: Precision,
    optimizer: Optimizer,
    software: Software | None = None,
    state_bits: StateBits = 32,
) -> Job:
    """What one step of a run computes.

    Args:
        model: with vocabulary and longest sequence known.
        sequence: tokens.
        global_batch: sequences.
        software: which program trains; None: Phalanx, with its defaults.
        state_bits: of AdamW's moments.

    Raises:
        UserError: the model's sizes are not known yet.
    """
    return Job(Model.of(model), sequence, global_batch, precision, optimizer, software or Software(), state_bits)


def software_of(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    *,
    compiled: bool,
    on_cpu: bool,
    documents: bool = True,
) -> Software:
    """Phalanx as these settings have it run.

    Args:
        compiled: torch.compile fuses element-wise operations.
        on_cpu: it runs on a CPU.
        documents: attention stops at their borders (`data.document_mask`).
    """
    residual_bytes = BYTES[precision] if model.residual == "compute" else 4
    return Software(
        fused_attention=model.attention_backend != "math",
        fused_elementwise=compiled,
        compiled=compiled,
        residual_bytes=residual_bytes,
        sent_bytes=residual_bytes,
        reduce_bytes=2 if parallel.reduce_dtype == "bf16" else 4,
        gather_bytes=BYTES[precision],  # matrices travel as they are multiplied; embedding and head in fp32
        data_overlap=not on_cpu,  # the cores that would compute copy messages meanwhile
        on_cpu=on_cpu,
        document_masks=documents,
    )


def make_strategy(parallel: ParallelConfig, *, micro_batch: int, recompute: str, offload: float = 0.0) -> Strategy:
    """How a run is spread.

    Args:
        parallel: with every axis given.
        micro_batch: sequences per forward pass and data-parallel rank.
        recompute: as `train.recompute` has it.
        offload: as `train.offload` has it.
    """
    return Strategy(
        pipeline=parallel.pipeline,
        replicate=parallel.replicate,
        shard=parallel.shard,
        context=parallel.context,
        tensor=parallel.tensor,
        micro_batch=micro_batch,
        chunks=parallel.num_chunks if parallel.pipeline > 1 else 1,
        schedule=parallel.schedule,
        zero=parallel.zero,
        recompute=_RECOMPUTE[recompute],
        offload=offload,
        tensor_overlap=_OVERLAP[parallel.tensor_overlap],
        tensor_chunks=parallel.tensor_chunks,
        context_method=parallel.context_method,
        bucket_bytes=parallel.bucket_bytes,
    )


def settings_of(strategy: Strategy) -> dict[str, int | str]:
    """The settings that give this strategy, by dotted key; those with their default are left out.

    The inverse of `make_strategy` for whatever Phalanx itself can run.
    """
    plain = ParallelConfig()
    overlap = next(name for name, value in _OVERLAP.items() if value == strategy.tensor_overlap)
    recompute = next((name for name, value in _RECOMPUTE.items() if value == strategy.recompute), "none")
    chunks = strategy.chunks if strategy.pipeline > 1 else 0
    parallel: dict[str, int | str] = {
        "pipeline": int(strategy.pipeline),
        "replicate": int(strategy.replicate),
        "shard": int(strategy.shard),
        "context": int(strategy.context),
        "tensor": int(strategy.tensor),
        "zero": strategy.zero if strategy.shard * strategy.context > 1 else plain.zero,
        "bucket_bytes": strategy.bucket_bytes,
        "schedule": strategy.schedule if strategy.pipeline > 1 else plain.schedule,
        "chunks": 0 if strategy.schedule in ("1f1b", "zbv") else int(chunks),
        "tensor_overlap": overlap if strategy.tensor > 1 else plain.tensor_overlap,
        "tensor_chunks": strategy.tensor_chunks if overlap == "chunked" else plain.tensor_chunks,
        "context_method": strategy.context_method if strategy.context > 1 else plain.context_method,
    }
    given = {f"parallel.{name}": value for name, value in parallel.items() if value != getattr(plain, name)}
    return {"train.micro_batch": int(strategy.micro_batch), "train.recompute": recompute, **given}
