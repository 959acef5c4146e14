"""Values that the rooms of the planner hand to each other.

A field typed `Ints` is one number, or a NumPy array with one number for each layout of a set: every formula of the cost
model takes both, so that a search scores hundreds of thousands of layouts in one pass through the same code.

Letters in formulas: B global batch, b micro-batch, S sequence length, D hidden width, L layers, t tensor, p pipeline,
v chunks, d data-parallel ranks, m micro-batches per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.optim.config import Kind as Optimizer
from phalanx.parallel.config import ContextMethod, Schedule

Ints: TypeAlias = Any
"""A whole number, or an array of them; `Any`, since NumPy types mixed arithmetic more widely than formulas mean."""
Floats: TypeAlias = Any  # A number, or a NumPy array of them
Mark = Literal["measured", "derived", "assumed"]  # how a number is known, from the best to the weakest
StateBits = Literal[32, 16, 8]
Precision = Literal["bf16", "fp16", "fp32"]
Format = Literal["half", "fp32"]  # what the speed of arithmetic depends on: bf16 and fp16 are equally fast
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
class Tile:
    """One way to cut a product: tiles of the result, whose sums over k can be split between cores."""

    rows: float
    columns: float
    splits: float  # parts of k that different cores sum up; more than one costs memory traffic to add them
    share: float  # of a core's peak that long tiles of this size reach
    start_columns: float  # what it costs to start and to end a tile, in columns of k


@dataclass(frozen=True)
class Model:
    """What a decoder is made of, as far as its cost depends on it."""

    layers: int
    hidden: int
    heads: int
    vocab_rows: int
    max_sequence: int
    kv_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 0  # inner width of the MLP, or of each expert
    gated: bool = False
    block: Literal["serial", "parallel"] = "serial"
    merged: bool = False
    windows: tuple[int, ...] = (0,)  # keys that the layers see, repeated over depth; 0 sees all of the past
    position: Literal["rotary", "learned", "none"] = "learned"
    norm: Literal["rms", "layer"] = "layer"
    bias: Literal["none", "all", "qkv"] = "all"
    qk_norm: bool = False
    dropout: bool = True
    attention_dropout: bool = True
    tie_embeddings: bool = True
    experts: int = 0  # in each mixture layer; 0: dense
    experts_per_token: int = 2  # experts that each token visits
    shared_experts: int = 0  # experts that every token visits
    moe_every: int = 1  # each so many-th layer is a mixture, the others are dense
    capacity_factor: float = 1.0  # tokens an expert has room for, over the mean
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


@lru_cache(maxsize=256)
def layer_kinds(model: Model) -> tuple[tuple[int, bool], ...]:
    """The different kinds of layers that a model has, in order of use: keys seen, and whether it is a mixture."""
    return tuple(dict.fromkeys((model.window_of(n), model.is_mixture(n)) for n in range(model.layers)))


@dataclass(frozen=True)
class Software:
    """Which program trains: what its kernels fuse, in which types it keeps things, and what it overlaps."""

    name: str = "phalanx"
    # Scores stay on the chip (FlashAttention); else they are written and read, S x S of them.
    fused_attention: bool = True
    # Bias with GELU, bias with dropout and residual, scale with mask and softmax are one kernel each; else every
    # operation reads and writes memory.
    fused_elementwise: bool = False
    # Layers are compiled: their kernels have ratios of their own where a device's file has them, and the host takes
    # another time for each.
    compiled: bool = False
    merged_projections: bool = True  # q, k and v are one product, and gate and up another; else each is one of its own
    # Computing a layer again ends with what its last product reads (torch's checkpoint that does not re-enter
    # autograd); else the last product is made again too.
    stops_early: bool = True
    # Cross-entropy reads the logits once each way; else every step of it reads and writes them in fp32.
    fused_loss: bool = True
    torch_loss: bool = False  # torch's cross-entropy of logits cast to fp32, whose copies count for memory
    # The product that makes a weight's gradient adds it to the sum; else a kernel of its own does.
    fused_gradients: bool = False
    residual_bytes: int = 4  # of one element of the residual stream
    gradient_bytes: int = 4  # of one accumulated gradient
    reduce_bytes: int = 4  # of one gradient as it travels between data-parallel ranks
    gather_bytes: int = 4  # of one updated weight as it travels between ranks that split the optimizer's state
    sent_bytes: int = 4  # of one element of the residual stream as it travels between pipeline stages
    master_bytes: int = 0  # of the optimizer's own copy of a weight; 0 where the weights themselves are fp32
    weight_bytes: int = 4  # of a weight as the model uses it
    # Gradients are reduced while the last backward passes run; weights gathered while the first forward passes do.
    data_overlap: bool = True
    first_gather_hidden: bool = False  # the first gather of weights starts before the step (MegaScale 3.2)
    # Gradients of inputs are summed beside the products that make gradients of weights.
    tensor_backward_overlap: bool = False
    pipeline_overlap: bool = True  # sends and receives run beside computing; else a rank waits for each
    # What goes between stages is sent in equal parts by the tensor-parallel ranks, and gathered.
    split_sends: bool = True
    # All stages have as many layers; else those beside the embedding and the loss head have fewer.
    even_stages: bool = False
    loader_hidden: bool = True  # the next batch is made while the step runs
    on_cpu: bool = False  # it runs on a CPU, where Phalanx has other attention kernels, which keep other things
    # Attention stops at the borders of documents; its masks are kept, one for each sequence.
    document_masks: bool = False
    host_factor: float = 1.0  # how much longer than a bare launch the program needs per kernel, ratio

    @property
    def is_phalanx(self) -> bool:
        """Whether it is this program, of which it is known what its kernels keep; others are taken for Megatron-LM."""
        return self.name == "phalanx"


INTERVAL_SHARE = 0.8  # of steps that lie inside an interval


@dataclass(frozen=True)
class Residual:
    """What steps take beyond what the model explains, as others' or one's own measured steps say."""

    # How many times as long as their bytes at the rate of a copy the memory-bound kernels between a layer's products
    # take (norms, activations, rotation, additions, copies). It stands for all that grows with them, not for their own
    # time alone.
    kernels: float = 1.0
    efficiency: float = 1.0  # share of the predicted speed that a program reaches; step times are divided by it
    # The logarithm by which 80 % of steps lie at most above or below what is predicted; 0: not known.
    spread: float = 0.0


_NOTHING = Residual()


@dataclass(frozen=True)
class Job:
    """What is computed in one optimizer step, however it is spread."""

    model: Model
    sequence: int
    global_batch: int
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    software: Software = field(default_factory=Software)
    state_bits: StateBits = 32  # of AdamW's moments of matrices, as `optim.state_bits`
    # What is added to what the model explains; None: what is learnt, where it holds (`phalanx.plan.overheads`).
    # `Residual()` is the model alone.
    residual: Residual | None = None
    fp8: bool = False  # layers multiply in 8 bits, whose times are not known: predicted as `precision`

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
    """How a job is spread over ranks, and what each rank does in which order."""

    pipeline: Ints = 1
    replicate: Ints = 1  # data-parallel copies that hold the same state, ranks
    shard: Ints = 1  # data-parallel ranks that split state as `zero` says, ranks
    context: Ints = 1  # ranks that split every sequence
    tensor: Ints = 1  # ranks that split every matrix; neighbours, so they share a host as far as it has room
    expert: Ints = 1  # data-parallel ranks that hold different experts; divides `data`
    micro_batch: Ints = 1  # sequences per forward pass and data-parallel rank
    chunks: Ints = 1  # model chunks on each pipeline rank
    schedule: Schedule = "1f1b"
    # What `shard` splits: 0 nothing, 1 optimizer state, 2 and summed gradients, 3 and parameters.
    zero: Literal[0, 1, 2, 3] = 1
    recompute: Recompute = "none"
    offload: float = 0.0  # share of the layers whose activations wait on the host (Phalanx alone)
    sequence_parallel: bool = True
    tensor_overlap: Overlap = "none"
    tensor_chunks: int = 3
    context_method: ContextMethod = "ring"
    # Of gradients that are reduced together; 0: one bucket for each model chunk (MegaScale 3.2).
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
    """A part of a step's time, or of a run's start."""

    path: str  # where it belongs, such as ``compute/mlp`` or ``data/reduce``
    seconds: float
    mark: Mark  # how far it can be trusted: derived from measurements, or resting on an assumption
    source: str


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank of one pipeline rank, at the moment when it holds most."""

    pipeline_rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward passes, by all micro-batches under way
    loss_head: float  # logits and their gradient, and what the loss needs besides
    communication: float  # buckets, gathered parameters, receive buffers
    fragmentation: float  # what the allocator holds and cannot use
    # What one layer's passes need while they run: gradients of activations, what is computed again.
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
    """Of a pipeline: seconds of one micro-batch on each stage, in the order of the model."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # of schedules that do not split it; of those that do, both halves
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: float  # of a message to the next stage
    blocking: bool  # ranks compute nothing while they send


@dataclass(frozen=True)
class Prediction:
    """What one step costs."""

    job: Job
    strategy: Strategy
    cluster: str
    devices: int
    step_s: float
    parts: tuple[Part, ...]  # exposed times; they sum to `step_s`
    hidden: tuple[Part, ...]  # work that other work covers, beside the sum
    memory: tuple[RankMemory, ...]  # one for each pipeline rank
    start_up: tuple[Part, ...]  # parts of the time from start to the first step
    model_flops: float  # of the whole step, as `mfu` counts them
    mfu: float  # share of the peak that useful matrix products take
    notes: tuple[str, ...] = ()
    stages: StageTimes | None = None  # what a drawing of its pipeline is made of; None: there is no pipeline
    unjudged: str = ""  # why there is no interval; empty where predictions were judged on published steps

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


# Formulas over plain numbers and over arrays. NumPy costs about a microsecond for each operation on a plain number, and
# one prediction asks for hundreds of them; a search asks for a few, on arrays of hundreds of thousands.
@dataclass(frozen=True)
class Functions:
    """Functions for one kind of argument."""

    largest: Callable[..., Any]
    least: Callable[..., Any]
    up: Callable[[Any], Any]
    log: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]


def _array_largest(*values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.maximum(found, value)
    return found


def _array_least(*values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.minimum(found, value)
    return found


def _scalar_where(condition: bool, yes: Any, no: Any) -> Any:
    return yes if condition else no


SCALARS = Functions(max, min, math.ceil, math.log, math.exp, _scalar_where)
ARRAYS = Functions(_array_largest, _array_least, np.ceil, np.log, np.exp, np.where)


def functions(*values: object) -> Functions:
    """Functions for arrays where any of `values` is one, else for plain numbers."""
    return ARRAYS if any_array(values) else SCALARS


def any_array(values: Iterable[object]) -> bool:
    """Whether one of `values` is an array."""
    return np.ndarray in map(type, values)  # a third of the time of as many calls of isinstance


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`."""
    return functions(condition, yes, no).where(condition, yes, no)


def largest(*values: Any) -> Any:
    """The largest of several values."""
    return functions(*values).largest(*values)


def least(*values: Any) -> Any:
    """The smallest of several values."""
    return functions(*values).least(*values)


def broadcast(*values: Any) -> tuple[tuple[Any, ...], tuple[int, ...] | None]:
    """Flat float arrays of one length with the shape that they had together; plain floats and None where all are."""
    if not any_array(values):
        return tuple(map(float, values)), None
    arrays = np.broadcast_arrays(*values)
    return tuple(np.asarray(array, dtype=np.float64).ravel() for array in arrays), arrays[0].shape


_ROOM = 2**62


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different rows of columns of whole numbers from 0 on.

    Ten times as fast as ``numpy.unique(..., axis=0)``, which compares rows byte by byte.

    Returns:
        where each different row is first; and for every row, which of these it is.
    """
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        base = int(column.max(initial=0)) + 1
        if (int(codes.max(initial=0)) + 1) * base > _ROOM:
            codes = np.unique(codes, return_inverse=True)[1]
        codes = codes * base + column
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    return first, which
