"""Settings of ``[parallel]``: how a run is spread over ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from phalanx.core.config import Config
from phalanx.core.layout import Layout

Schedule = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
ContextMethod = Literal["ring", "all_to_all"]
TensorOverlap = Literal["none", "chunked", "fused", "tiles", "auto"]


class ParallelConfig(Config):
    """How many ranks each axis has, and how each kind of parallelism works."""

    devices: int = Field(0, ge=0, description="ranks in all; the axes that are not given are chosen; 0: their product")
    pipeline: int = Field(1, ge=1, description="pipeline stages side by side, ranks")
    replicate: int = Field(1, ge=1, description="data-parallel copies that hold the same state, ranks")
    shard: int = Field(1, ge=1, description="data-parallel ranks that split state among them (see zero), ranks")
    context: int = Field(1, ge=1, description="ranks that split every sequence among them")
    tensor: int = Field(1, ge=1, description="ranks that split every matrix among them (with sequence parallel)")

    zero: Literal[1, 2, 3] = Field(
        1, description="what `shard` splits: 1: optimizer state; 2: and gradients, once summed; 3: and parameters"
    )
    bucket_bytes: int = Field(
        25_000_000, ge=1, description="gradients that are reduced together, and parameters gathered together, bytes"
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="type in which gradients travel between ranks")

    schedule: Schedule = Field("1f1b", description="order of forward and backward passes in the pipeline")
    chunks: int = Field(
        0, ge=0, description="model chunks on each pipeline rank; 0: 1 with 1f1b, 2 with the schedules that interleave"
    )

    tensor_overlap: TensorOverlap = Field(
        "none",
        description="matrix products against the collectives beside them: one after the other, in pipelined chunks, "
        "or fused over memory that GPUs share (NVLink), by torch's operators or (tiles) Triton kernels of ours; "
        "auto: fused where the GPUs can, else chunked",
    )
    tensor_chunks: int = Field(3, ge=1, description="chunks of `tensor_overlap = chunked`")
    context_method: ContextMethod = Field(
        "ring", description="attention over split sequences: keys travel in a ring, or heads are exchanged (Ulysses)"
    )

    nccl_max_ctas: int = Field(
        0,
        ge=0,
        le=64,
        description="most thread blocks that NCCL takes of a GPU for what runs beside computing (replicate, shard); "
        "0: its own choice",
    )
    share_device: bool = Field(
        False,
        description="let ranks of a host share its GPUs, which NCCL refuses: gloo carries everything through the host. "
        "To try layouts, not for speed",
    )
    host_loader: bool = Field(True, description="one loader process per host for all its ranks, over shared memory")
    timeout_s: float = Field(600.0, gt=0, description="longest wait for another rank in a collective, seconds")
    first_timeout_s: float = Field(1800.0, gt=0, description="the same until the first step is done, seconds")

    @property
    def layout(self) -> Layout:
        """The axes as given (`devices` is resolved by `phalanx.parallel.layout_choice`)."""
        return Layout(self.pipeline, self.replicate, self.shard, self.context, self.tensor)

    @property
    def num_chunks(self) -> int:
        """Model chunks on each pipeline rank, resolved."""
        return self.chunks or (1 if self.schedule == "1f1b" else 2)

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline: chunks of all its ranks."""
        return self.pipeline * self.num_chunks if self.pipeline > 1 else 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are made apart from those of activations."""
        return self.pipeline > 1 and self.schedule in ("interleaved_zero_bubble", "zbv")

    @field_validator("tensor_overlap", mode="before")
    @classmethod
    def _former_name(cls, value: object) -> object:
        """Configs of before say "symmetric"."""
        return "fused" if value == "symmetric" else value

    @model_validator(mode="after")
    def _check_chunks(self) -> ParallelConfig:
        if self.schedule == "1f1b" and self.chunks > 1:
            raise ValueError(
                f"chunks = {self.chunks} does not fit schedule = '1f1b', which has one chunk on each rank: "
                "set schedule = 'interleaved_1f1b', or remove chunks"
            )
        if self.schedule == "zbv" and self.num_chunks != 2:
            raise ValueError(f"chunks = {self.chunks} does not fit schedule = 'zbv', which has two: remove chunks")
        return self
