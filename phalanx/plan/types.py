"""Values that the rooms of the planner hand to each other.

A field typed `Ints` is one number, or a NumPy array with one number for each layout of a set: every formula of the cost
model takes both, so that a search scores hundreds of thousands of layouts in one pass through the same code.

Letters in formulas: B global batch, b micro-batch, S sequence length, D hidden width, L layers, t tensor, p pipeline,
v chunks, d data-parallel ranks, m micro-batches per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from phalanx.model.config import ModelConfig
from phalanx.optim.config import Kind as Optimizer
from phalanx.optim.groups import LEAST_NUMEL, moment_bytes
from phalanx.parallel.config import ContextMethod, Schedule

Ints: TypeAlias = Any
"""A whole number, or an array of them; `Any`, since NumPy types mixed arithmetic more widely than formulas mean."""
Floats: TypeAlias = Any
"""A number, or a NumPy array of them."""
Mark = Literal["measured", "derived", "assumed"]
"""How a number is known, from the best to the weakest."""
StateBits = Literal[32, 16, 8]
Precision = Literal["bf16", "fp16", "fp32"]
Recompute = Literal["none", "attention", "elementwise", "mlp", "alternate", "full"]
"""What is computed again in the backward pass: nothing; scores, softmax and what follows up to the product with values
(Korthikanti et al., "selective"); all but matrix products and attention
(`train.recompute = selective` here); these and the first product of the MLP (``mlp``); these and every second product
(``alternate``: torchtitan's "selective op"); all."""
Overlap = Literal["none", "chunked", "fused"]
"""Collectives beside matrix products: after each other; in pipelined chunks; in one kernel (Flux)."""

BYTES: Mapping[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}

_ORDER: tuple[Mark, ...] = ("measured", "derived", "assumed")


def weakest(marks: Sequence[Mark]) -> Mark:
    """What a number computed from numbers with these marks may claim; at best `derived`."""
    return max((*marks, "derived"), key=_ORDER.index)


@dataclass(frozen=True)
class Number:
    """A number with its unit, how it is known, and where it comes from."""

    value: float
    unit: str
    mark: Mark
    source: str


@dataclass(frozen=True)
class Model:
    """What a decoder is made of, as far as its cost depends on it.

    Attributes:
        windows: keys that the layers see, repeated over depth; 0 sees all of the past.
        mlp_width: inner width of the MLP, or of each expert.
        experts: in each mixture layer; 0: dense.
        experts_per_token: experts that each token visits.
        shared_experts: experts that every token visits.
        moe_every: each so many-th layer is a mixture, the others are dense.
        capacity_factor: tokens an expert has room for, over the mean.
    """

    layers: int
    hidden: int
    heads: int
    vocab_rows: int
    max_sequence: int
    kv_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    gated: bool = False
    block: Literal["serial", "parallel"] = "serial"
    merged: bool = False
    windows: tuple[int, ...] = (0,)
    position: Literal["rotary", "learned", "none"] = "learned"
    norm: Literal["rms", "layer"] = "layer"
    bias: Literal["none", "all", "qkv"] = "all"
    qk_norm: bool = False
    dropout: bool = True
    attention_dropout: bool = True
    tie_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 2
    shared_experts: int = 0
    moe_every: int = 1
    capacity_factor: float = 1.0
    dense_mlp_width: int = 0

    def __post_init__(self) -> None:
        derived = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.hidden // max(self.heads, 1),  # no heads: refused where it is predicted
            "mlp_width": self.mlp_width or 4 * self.hidden,
        }
        derived["dense_mlp_width"] = self.dense_mlp_width or derived["mlp_width"]
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def window_of(self, layer: int) -> int:
        """Keys that `layer` sees; 0: all of the past."""
        return self.windows[layer % len(self.windows)]

    def is_mixture(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0

    @classmethod
    def of(cls, config: ModelConfig) -> Model:
        """The model that `[model]` describes.

        Raises:
            UserError: the vocabulary or the longest sequence is not known yet.
        """
        config.require_sizes()
        return cls(
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            vocab_rows=config.vocab_rows,
            max_sequence=config.max_sequence,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            mlp_width=config.mlp_width,
            gated=config.gated,
            block=config.block,
            merged=config.merged,
            windows=tuple(config.window if kind == "window" else 0 for kind in config.attention),
            position=config.position,
            norm=config.norm,
            bias=config.bias,
            qk_norm=config.qk_norm,
            dropout=config.dropout > 0,
            attention_dropout=config.attention_dropout > 0,
            tie_embeddings=config.tie_embeddings,
        )


@lru_cache(maxsize=256)
def layer_kinds(model: Model) -> tuple[tuple[int, bool], ...]:
    """The different kinds of layers that a model has, in order of use: keys seen, and whether it is a mixture."""
    return tuple(dict.fromkeys((model.window_of(n), model.is_mixture(n)) for n in range(model.layers)))


@dataclass(frozen=True)
class Software:
    """Which program trains: what its kernels fuse, in which types it keeps things, and what it overlaps.

    Attributes:
        fused_attention: scores stay on the chip (FlashAttention); else they are written and read, S x S of them.
        fused_elementwise: bias with GELU, bias with dropout and residual, scale with mask and softmax are one kernel
            each; else every operation reads and writes memory.
        compiled: layers are compiled: their kernels have ratios of their own where a device's file has them, and the
            host takes another time for each.
        merged_projections: q, k and v are one product, and gate and up another; else each is one of its own.
        stops_early: computing a layer again ends with what its last product reads (torch's checkpoint that does not
            re-enter autograd); else the last product is made again too.
        fused_loss: cross-entropy reads the logits once each way; else every step of it reads and writes them in fp32.
        fused_gradients: the product that makes a weight's gradient adds it to the sum; else a kernel of its own does.
        residual_bytes: of one element of the residual stream.
        gradient_bytes: of one accumulated gradient.
        reduce_bytes: of one gradient as it travels between data-parallel ranks.
        gather_bytes: of one updated weight as it travels between ranks that split the optimizer's state.
        sent_bytes: of one element of the residual stream as it travels between pipeline stages.
        master_bytes: of the optimizer's own copy of a weight; 0 where the weights themselves are fp32.
        weight_bytes: of a weight as the model uses it.
        data_overlap: gradients are reduced while the last backward passes run; weights gathered while the first
            forward passes do.
        first_gather_hidden: the first gather of weights starts before the step (MegaScale 3.2).
        tensor_backward_overlap: gradients of inputs are summed beside the products that make gradients of weights.
        pipeline_overlap: sends and receives run beside computing; else a rank waits for each.
        split_sends: what goes between stages is sent in equal parts by the tensor-parallel ranks, and gathered.
        even_stages: all stages have as many layers; else those beside the embedding and the loss head have fewer.
        loader_hidden: the next batch is made while the step runs.
        on_cpu: it runs on a CPU, where Phalanx has other attention kernels, which keep other things.
        document_masks: attention stops at the borders of documents; its masks are kept, one for each sequence.
        host_factor: how much longer than a bare launch the program needs per kernel, ratio.
    """

    name: str = "phalanx"
    fused_attention: bool = True
    fused_elementwise: bool = False
    compiled: bool = False
    merged_projections: bool = True
    stops_early: bool = True
    fused_loss: bool = True
    fused_gradients: bool = False
    residual_bytes: int = 4
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    gather_bytes: int = 4
    sent_bytes: int = 4
    master_bytes: int = 0
    weight_bytes: int = 4
    data_overlap: bool = True
    first_gather_hidden: bool = False
    tensor_backward_overlap: bool = False
    pipeline_overlap: bool = True
    split_sends: bool = True
    even_stages: bool = False
    loader_hidden: bool = True
    on_cpu: bool = False
    document_masks: bool = False
    host_factor: float = 1.0

    @property
    def is_phalanx(self) -> bool:
        """Whether it is this program, of which it is known what its kernels keep; others are taken for Megatron-LM."""
        return self.name == "phalanx"


INTERVAL_SHARE = 0.8
"""Of steps that lie inside an interval."""


@dataclass(frozen=True)
class Residual:
    """What steps take beyond what the model explains, as others' or one's own measured steps say.

    Attributes:
        kernels: how many times as long as their bytes at the rate of a copy the memory-bound kernels between a layer's
            products take (norms, activations, rotation, additions, copies). It stands for all that grows with them, not
            for their own time alone.
        efficiency: share of the predicted speed that a program reaches; step times are divided by it.
        spread: the logarithm by which 80 % of steps lie at most above or below what is predicted; 0: not known.
    """

    kernels: float = 1.0
    efficiency: float = 1.0
    spread: float = 0.0


_NOTHING = Residual()


@dataclass(frozen=True)
class Job:
    """What is computed in one optimizer step, however it is spread.

    Attributes:
        state_bits: of AdamW's moments of matrices, as `optim.state_bits`.
        residual: what is added to what the model explains; None: what is learnt, where it holds
            (`phalanx.plan.overheads`). `Residual()` is the model alone.
    """

    model: Model
    sequence: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    software: Software = field(default_factory=Software)
    state_bits: StateBits = 32
    residual: Residual | None = None

    @property
    def moment_bytes(self) -> float:
        """Of one moment of a matrix, for each of its elements."""
        rows_of_one = (LEAST_NUMEL, self.model.hidden)  # every matrix is stored in rows of this width
        return moment_bytes(rows_of_one, self.state_bits) / math.prod(rows_of_one)

    @property
    def added(self) -> Residual:
        """The residual, once it is known what it is."""
        return self.residual or _NOTHING

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.sequence


@dataclass(frozen=True)
class Strategy:
    """How a job is spread over ranks, and what each rank does in which order.

    Attributes:
        replicate: data-parallel copies that hold the same state, ranks.
        shard: data-parallel ranks that split state as `zero` says, ranks.
        context: ranks that split every sequence.
        tensor: ranks that split every matrix; neighbours, so they share a host as far as it has room.
        expert: data-parallel ranks that hold different experts; divides `data`.
        micro_batch: sequences per forward pass and data-parallel rank.
        chunks: model chunks on each pipeline rank.
        zero: what `shard` splits: 0 nothing, 1 optimizer state, 2 and summed gradients, 3 and parameters.
        offload: share of the layers whose activations wait on the host (Phalanx alone).
        bucket_bytes: of gradients that are reduced together; 0: one bucket for each model chunk (MegaScale 3.2).
    """

    pipeline: Ints = 1
    replicate: Ints = 1
    shard: Ints = 1
    context: Ints = 1
    tensor: Ints = 1
    expert: Ints = 1
    micro_batch: Ints = 1
    chunks: Ints = 1
    schedule: Schedule = "1f1b"
    zero: Literal[0, 1, 2, 3] = 1
    recompute: Recompute = "none"
    offload: float = 0.0
    sequence_parallel: bool = True
    tensor_overlap: Overlap = "none"
    tensor_chunks: int = 3
    context_method: ContextMethod = "ring"
    bucket_bytes: int = 25_000_000

    @property
    def data(self) -> Ints:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def world_size(self) -> Ints:
        """Ranks in all."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def stages(self) -> Ints:
        """Stages of the whole pipeline: chunks of all its ranks."""
        return self.pipeline * self.chunks

    def micro_batches(self, global_batch: int) -> Ints:
        """Forward passes of every stage in one step."""
        return global_batch // (self.data * self.micro_batch)


@dataclass(frozen=True)
class Part:
    """A part of a step's time, or of a run's start.

    Attributes:
        path: where it belongs, such as ``compute/mlp`` or ``data/reduce``.
        mark: how far it can be trusted: derived from measurements, or resting on an assumption.
        source: the numbers that it rests on.
    """

    path: str
    seconds: float
    mark: Mark
    source: str


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline rank, at the moment when it holds most.

    Attributes:
        activations: kept for backward passes, by all micro-batches under way.
        loss_head: logits and their gradient, and what the loss needs besides.
        communication: buckets, gathered parameters, receive buffers.
        fragmentation: what the allocator holds and cannot use.
        workspace: what one layer's passes need while they run: gradients of activations, what is computed again.
    """

    pipeline_rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss_head: float
    communication: float
    fragmentation: float
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.loss_head
            + self.communication
            + self.fragmentation
            + self.workspace
        )


@dataclass(frozen=True)
class StageTimes:
    """Of a pipeline: seconds of one micro-batch on each stage, in the order of the model.

    Attributes:
        backward_s: of schedules that do not split it; of those that do, both halves.
        send_s: of a message to the next stage.
        blocking: ranks compute nothing while they send.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: float
    blocking: bool


@dataclass(frozen=True)
class Prediction:
    """What one step costs.

    Attributes:
        parts: exposed times; they sum to `step_s`.
        hidden: work that other work covers, beside the sum.
        memory: one for each pipeline rank.
        start_up: parts of the time from start to the first step.
        model_flops: of the whole step, as `mfu` counts them.
        mfu: share of the peak that useful matrix products take.
        notes: limits and assumptions that a reader should know of.
        stages: what a drawing of its pipeline is made of; None: there is no pipeline.
    """

    job: Job
    strategy: Strategy
    cluster: str
    devices: int
    step_s: float
    parts: tuple[Part, ...]
    hidden: tuple[Part, ...]
    memory: tuple[RankMemory, ...]
    start_up: tuple[Part, ...]
    model_flops: float
    mfu: float
    notes: tuple[str, ...] = ()
    stages: StageTimes | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole job per second."""
        return self.job.tokens / self.step_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which a step of such a run lies in 8 of 10 cases; None: not known."""
        spread = self.job.added.spread
        return (self.step_s * math.exp(-spread), self.step_s * math.exp(spread)) if spread else None

    def seconds(self, path: str) -> float:
        """Exposed time of `path` and everything below it."""
        return sum(part.seconds for part in self.parts if part.path == path or part.path.startswith(path + "/"))
