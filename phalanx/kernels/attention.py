"""Causal attention behind one function, with interchangeable exact back ends.

=========== ========================================================================================================
back end    what it does
=========== ========================================================================================================
``sdpa``    torch's scaled_dot_product_attention, by the kernel that torch prefers; windows and documents as a mask
``chunked`` chunks of queries, each over just the keys it can see: the way to do a sliding window, and on a CPU the
            faster way for full attention too, but in fp32 for very short and very long sequences
``flex``    FlexAttention, compiled; CUDA only (it has no backward on a CPU)
``cudnn``   CUDA only: cuDNN's kernel where attention is plain causal, FlexAttention where it is not
``flash``   the same by FlashAttention 2, and ``efficient`` by torch's memory-efficient kernel, which takes fp32 too
``math``    plain matrix products and a softmax in fp32; the only one that honours attention dropout
``auto``    the fastest of these that honours the request
=========== ========================================================================================================

On CUDA a run finds out once which kernel is right for it (`phalanx.kernels.attention_trial`) and hands it on as a
`CausalKernel`, which decides what ``auto`` does.

Shapes: B batch, S queries, K keys, H query heads, G key/value heads (G divides H), E head size. The queries are the
last S positions of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.errors import UserError
from phalanx.kernels import attention_aten
from phalanx.kernels.blocked import Engine, blocked_attention
from phalanx.kernels.counter import dropout as counter_dropout
from phalanx.kernels.masks import AttentionMask, flex_mask

Backend = Literal["auto", "sdpa", "chunked", "flex", "cudnn", "flash", "efficient", "math"]
Kernel = Literal["cudnn", "flash", "flex", "efficient", "math"]

_CAUSAL_ONLY = ("cudnn", "flash", "efficient")
SMALLEST_FLEX_HEAD = 16
"""FlexAttention has no kernel for smaller heads."""


@dataclass(frozen=True)
class CausalKernel:
    """The kernel of plain causal attention on CUDA: what a run's self-test found to be right.

    Attributes:
        name: of the kernel.
        length: positions of the sequences that it was tested with.
    """

    name: Kernel
    length: int

    def of(self, length: int) -> Kernel:
        """The kernel for sequences of `length`: cuDNN's and FlexAttention only where they were tried.

        cuDNN's faults depend on the length, and both make something anew for each (a plan, a kernel), which prompts of
        ever new lengths are not worth.
        """
        if length == self.length or self.name not in ("cudnn", "flex"):
            return self.name
        return "flash" if self.name == "cudnn" else "efficient"


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention probabilities, element (sample position, head, key) of a counter hash.

    Attributes:
        rate: probability of dropping a probability, in [0, 1).
        key: 64 bits of (seed, step, layer), from :func:`phalanx.kernels.counter.make_key`.
        rows: (B, S) int64 identity of every query token, such as ``sample * sequence_length + position``.
        first_head: logical index of head 0, when the heads are a slice.
        num_heads: logical number of heads (default: those present).
    """

    rate: float
    key: int
    rows: Tensor
    first_head: int = 0
    num_heads: int | None = None

    def apply(self, probabilities_BHSK: Tensor) -> Tensor:
        """Drop elements of the probabilities."""
        heads = probabilities_BHSK.shape[1]
        head = torch.arange(self.first_head, self.first_head + heads, device=probabilities_BHSK.device)
        rows = self.rows[:, None, :] * (self.num_heads or heads) + head[:, None]
        return counter_dropout(probabilities_BHSK, self.rate, self.key, rows)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise UserError(
            f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads",
            cure="make the number of query heads a multiple of the number of key/value heads",
        )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(
            f"shapes of queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit",
            cure="pass (batch, heads, positions, head size) with equal batch and head size",
        )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    """torch's own kernel, told of causality by its flag where that suffices and by a boolean mask elsewhere."""
    grouped = q.shape[1] != k.shape[1]
    if mask.is_plain_causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if mask.sees_everything:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
    if q.device.type == "cuda":
        return _efficient(q, k, v, mask, scale)  # cuDNN's backward makes NaN of masks (pytorch #196678)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q.device), scale=scale, enable_gqa=grouped)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    """torch's memory-efficient kernel, or else products; it takes no grouped heads, so that keys are repeated."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    dense = None if mask.is_plain_causal else mask.dense(q.device)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=dense is None, scale=scale)


def _chunked(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None, chunk: int | None) -> Tensor:
    """Attention chunk by chunk of queries: each sees ``chunk + window - 1`` keys at most."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    engine: Engine = "matmul"
    if q.device.type == "cpu" and attention_aten.is_available():
        engine = cpu_engine(q, mask)
    size = chunk or (64 if engine == "flash" else 128)
    return blocked_attention(q, k, v, mask, scale=factor, chunk=size, engine=engine)


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None, dropout: AttentionDropout | None
) -> Tensor:
    """Softmax(QK^T) V written out, softmax in fp32 or wider."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if not mask.sees_everything:
        scores = scores.masked_fill(~mask.dense(q.device), float("-inf"))
    probabilities = scores.softmax(dim=-1).to(q.dtype)
    if dropout is not None:
        probabilities = dropout.apply(probabilities)
    return probabilities @ v


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """FlexAttention, compiled for the shapes that it is called with (imported late: a CPU run never needs it)."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _causal(backend: Backend, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    """Plain causal attention by one of torch's kernels for CUDA, named."""
    if q.device.type != "cuda":
        raise UserError(
            "this kernel is one of CUDA's", cure="use auto on this device", field="attention back end", value=backend
        )
    if backend == "efficient":
        return _efficient(q, k, v, mask, scale)
    return attention_aten.causal("cudnn" if backend == "cudnn" else "flash", q, k, v, scale)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
    if q.device.type != "cuda":
        raise UserError(
            "FlexAttention trains on CUDA only",
            cure="use sdpa, chunked or auto on this device",
            field="attention back end",
            value="flex",
        )
    return flex_attend(q, k, v, mask, scale, _traced_flex() if torch.compiler.is_compiling() else _compiled_flex())


def _traced_flex() -> Callable[..., Any]:
    """FlexAttention as part of a graph that is compiled as a whole."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None, flex: Callable[..., Any]
) -> Tensor:
    """Attention by `flex`, which is FlexAttention, compiled or not, on any device that it runs on."""
    block_mask, grouped = flex_mask(mask, q.device), q.shape[1] != k.shape[1]
    return one_kernel(partial(flex, block_mask=block_mask, scale=scale, enable_gqa=grouped), q, k, v)


def flex_partial(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Attention to some of the keys by FlexAttention on CUDA, so that it can be put together with that to others.

    Args:
        block_mask: see `phalanx.kernels.masks.block_mask`.

    Returns:
        The leaves that autograd can give gradients to, the result (B, H, S, E), and the fp32 log-sum-exp (B, H, S) of
        the scores: -inf where a query sees none of the keys.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    flex, grouped = _compiled_flex(), q.shape[1] != k.shape[1]
    # Always with gradients, as in `one_kernel`.
    with torch.compiler.set_stance("default"), torch.enable_grad():
        leaves = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
        request = AuxRequest(lse=True)
        out, also = flex(*leaves, block_mask=block_mask, scale=scale, enable_gqa=grouped, return_aux=request)
    return leaves, out, also.lse


def one_kernel(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``attend(q, k, v)`` of a compiled function by the kernel of training, in evaluation too.

    The compiler makes another kernel for calls without gradients, which would be made, and trusted, at the first
    evaluation of a run; and none at all where the caller has it run models as they are written, which of FlexAttention
    alone would keep all scores.
    """
    out: Tensor
    if torch.compiler.is_compiling():  # part of a larger graph, whose affair all this is
        out = attend(q, k, v)
        return out
    with torch.compiler.set_stance("default"):
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            out = attend(q, k, v)
            return out
        with torch.enable_grad():
            out = attend(*(x.detach().requires_grad_() for x in (q, k, v)))
        return out.detach()


def cpu_engine(q: Tensor, mask: AttentionMask) -> Engine:
    """The faster engine of :func:`phalanx.kernels.blocked.blocked_attention` for these queries on a CPU.

    Matrix products win in bf16 (docs/kernels.md) for as long as the probabilities, kept for the backward, stay below
    64 MiB a layer; the flash kernel wins in fp32, and keeps none.
    """
    keys = mask.key_length // 2 if mask.window is None else min(mask.window + 128, mask.key_length)
    kept_bytes = q.shape[0] * q.shape[1] * q.shape[2] * keys * q.element_size()
    return "matmul" if q.dtype == torch.bfloat16 and kept_bytes <= 64 << 20 else "flash"


def choose_backend(
    q_BHSE: Tensor, mask: AttentionMask, *, has_dropout: bool = False, kernel: CausalKernel | None = None
) -> Backend:
    """The back end that ``auto`` stands for: the fastest that honours the request (figures: docs/kernels.md).

    Args:
        kernel: of plain causal attention on CUDA; None: as torch chooses.
    """
    if has_dropout:
        return "math"
    if mask.sees_everything or mask.query_length == 1:
        return "sdpa"
    if q_BHSE.device.type == "cuda":
        if mask.is_plain_causal:
            return "sdpa" if kernel is None else kernel.of(mask.query_length)
        return "flex" if q_BHSE.shape[-1] >= SMALLEST_FLEX_HEAD else "sdpa"
    if q_BHSE.device.type != "cpu" or torch.compiler.is_compiling():
        return "sdpa"
    if q_BHSE.dtype == torch.bfloat16 and cpu_engine(q_BHSE, mask) == "matmul":
        return "chunked"
    if mask.window is not None:
        return "chunked" if mask.key_length >= max(128, mask.window) else "sdpa"
    return "chunked" if 128 <= mask.query_length <= 1024 else "sdpa"


def prepare(
    mask: AttentionMask,
    device: torch.device,
    backend: Backend = "auto",
    *,
    has_dropout: bool = False,
    kernel: CausalKernel | None = None,
) -> None:
    """Make what kernels on `device` need of a mask, before layers, which may be compiled one by one, ask for it."""
    if device.type != "cuda" or has_dropout or mask.query_length == 1:
        return
    restricted = not mask.is_plain_causal and backend in ("auto", *_CAUSAL_ONLY)
    chosen = backend == "auto" and kernel is not None and kernel.of(mask.query_length) == "flex"
    if backend == "flex" or restricted or chosen:
        flex_mask(mask, device)


def attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    *,
    window: int | None = None,
    documents_BS: Tensor | None = None,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
    backend: Backend = "auto",
    mask: AttentionMask | None = None,
    chunk: int | None = None,
    kernel: CausalKernel | None = None,
) -> Tensor:
    """Causal attention of queries over keys, exact in every back end.

    Args:
        q_BHSE: queries, the last S positions of the keys.
        k_BKSE: keys; their heads may be fewer than the queries' by a whole factor (grouped-query attention).
        v_BKSE: values, shaped as the keys.
        window: position i sees ``i - window + 1 .. i``; None for all of the past.
        documents_BS: integer document identity of every key position; attention stays inside a document.
        scale: factor of the scores (default ``E ** -0.5``).
        dropout: dropout of the probabilities, honoured by ``math`` alone.
        backend: see the module's table.
        mask: a mask built once for several layers, instead of ``window`` and ``documents_BS``.
        chunk: queries per chunk of the chunked back end (default: by engine).
        kernel: what ``auto`` takes for plain causal attention on CUDA (default: what torch prefers).

    Returns:
        (B, H, S, E).

    Raises:
        UserError: shapes do not fit, or the back end cannot honour the request.
    """
    _check(q_BHSE, k_BKSE, v_BKSE)
    if dropout is not None and dropout.rate == 0.0:
        dropout = None
    if mask is None:
        mask = AttentionMask(q_BHSE.shape[2], k_BKSE.shape[2], window=window, documents_BS=documents_BS)
    if backend == "auto" or (backend in _CAUSAL_ONLY and not mask.is_plain_causal and q_BHSE.device.type == "cuda"):
        backend = choose_backend(q_BHSE, mask, has_dropout=dropout is not None, kernel=kernel)
    if dropout is not None and backend != "math":
        raise UserError(
            "only the math back end drops attention probabilities",
            cure="set attention dropout to 0 or the back end to math",
            field="attention back end",
            value=backend,
        )
    if backend == "math":
        return _math(q_BHSE, k_BKSE, v_BKSE, mask, scale, dropout)
    if backend in _CAUSAL_ONLY:
        return _causal(backend, q_BHSE, k_BKSE, v_BKSE, mask, scale)
    if backend == "flex":
        return _flex(q_BHSE, k_BKSE, v_BKSE, mask, scale)
    if backend == "chunked":
        return _chunked(q_BHSE, k_BKSE, v_BKSE, mask, scale, chunk)
    return _sdpa(q_BHSE, k_BKSE, v_BKSE, mask, scale)
