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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.errors import UserError
from phalanx.kernels import attention_aten
from phalanx.kernels.counter import dropout as counter_dropout
from phalanx.kernels.masks import AttentionMask, flex_mask

Backend = Literal["auto", "sdpa", "chunked", "flex", "cudnn", "flash", "efficient", "math"]
Kernel = Literal["cudnn", "flash", "flex", "efficient", "math"]
CpuEngine = Literal["flash", "matmul"]

_CAUSAL_ONLY = ("cudnn", "flash", "efficient")
SMALLEST_FLEX_HEAD = 16
"""FlexAttention has no kernel for smaller heads."""


@dataclass(frozen=True)
class CausalKernel:
    """The kernel of plain causal attention on CUDA that a run's self-test found right for sequences of `length`."""

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
    """Dropout of attention probabilities, element (sample position, head, key) of a counter hash."""

    rate: float  # probability of dropping a probability, in [0, 1)
    key: int  # 64 bits of (seed, step, layer), from :func:`phalanx.kernels.counter.make_key`
    rows: Tensor  # (B, S) int64 identity of every query token, such as ``sample * sequence_length + position``
    first_head: int = 0  # logical index of head 0, when the heads are a slice
    num_heads: int | None = None  # logical number of heads (default: those present)

    def apply(self, probabilities_BHSK: Tensor) -> Tensor:
        """Drop elements of the probabilities."""
        heads = probabilities_BHSK.shape[1]
        head = torch.arange(self.first_head, self.first_head + heads, device=probabilities_BHSK.device)
        rows = self.rows[:, None, :] * (self.num_heads or heads) + head[:, None]
        return counter_dropout(probabilities_BHSK, self.rate, self.key, rows)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None) -> Tensor:
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
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    engine: CpuEngine = "matmul"
    if q.device.type == "cpu" and attention_aten.is_available():
        engine = cpu_engine(q, mask)
    size = chunk or (64 if engine == "flash" else 128)
    return blocked_attention(q, k, v, mask, scale=factor, chunk=size, engine=engine)


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float | None, dropout: AttentionDropout | None
) -> Tensor:
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
    if torch.compiler.is_compiling():  # part of a graph that is compiled as a whole
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attend(q, k, v, mask, scale, flex_attention)
    return flex_attend(q, k, v, mask, scale, _compiled_flex())


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
    if torch.compiler.is_compiling():  # part of a larger graph, which decides all this
        out = attend(q, k, v)
        return out
    with torch.compiler.set_stance("default"):
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            out = attend(q, k, v)
            return out
        with torch.enable_grad():
            out = attend(*(x.detach().requires_grad_() for x in (q, k, v)))
        return out.detach()


def cpu_engine(q: Tensor, mask: AttentionMask) -> CpuEngine:
    """The faster engine of :func:`blocked_attention` for these queries on a CPU.

    Matrix products win in bf16 (docs/kernels.md) for as long as the probabilities, kept for the backward, stay below
    64 MiB a layer; the flash kernel wins in fp32, and keeps none.
    """
    keys = mask.key_length // 2 if mask.window is None else min(mask.window + 128, mask.key_length)
    kept_bytes = q.shape[0] * q.shape[1] * q.shape[2] * keys * q.element_size()
    return "matmul" if q.dtype == torch.bfloat16 and kept_bytes <= 64 << 20 else "flash"


def choose_backend(
    q_BHSE: Tensor, mask: AttentionMask, *, has_dropout: bool = False, kernel: CausalKernel | None = None
) -> Backend:
    """The back end that ``auto`` stands for: the fastest that honours the request (figures: docs/kernels.md)."""
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
    q_BHSE: Tensor,  # queries, the last S positions of the keys
    k_BKSE: Tensor,  # keys; their heads may be fewer than the queries' by a whole factor (grouped-query attention)
    v_BKSE: Tensor,  # values, shaped as the keys
    *,
    window: int | None = None,  # position i sees ``i - window + 1 .. i``; None for all of the past
    # integer document identity of every key position; attention stays inside a document
    documents_BS: Tensor | None = None,
    scale: float | None = None,  # factor of the scores (default ``E ** -0.5``)
    dropout: AttentionDropout | None = None,  # of the probabilities, honoured by ``math`` alone
    backend: Backend = "auto",  # see the module's table
    # a mask built once for several layers, instead of ``window`` and ``documents_BS``
    mask: AttentionMask | None = None,
    chunk: int | None = None,  # queries per chunk of the chunked back end (default: by engine)
    # what ``auto`` takes for plain causal attention on CUDA (default: what torch prefers)
    kernel: CausalKernel | None = None,
) -> Tensor:
    """Causal attention of queries over keys, exact in every back end; (B, H, S, E).

    Raises:
        UserError: shapes do not fit, or the back end cannot honour the request.
    """
    heads, kv_heads = q_BHSE.shape[1], k_BKSE.shape[1]
    if heads % kv_heads:
        raise UserError(
            f"{kv_heads} key/value heads do not divide {heads} query heads",
            cure="make the number of query heads a multiple of the number of key/value heads",
        )
    if k_BKSE.shape != v_BKSE.shape or q_BHSE.shape[::3] != k_BKSE.shape[::3]:
        shapes = f"queries {tuple(q_BHSE.shape)}, keys {tuple(k_BKSE.shape)} and values {tuple(v_BKSE.shape)}"
        raise UserError(
            f"shapes of {shapes} do not fit",
            cure="pass (batch, heads, positions, head size) with equal batch and head size",
        )
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


# Blocked attention on a CPU, a block of queries at a time, each over just the keys it can see.
#
# Two engines do the work of a block. `flash` runs torch's CPU flash kernel and keeps only the log-sum-exp; it is the
# faster one in fp32. `matmul` writes the probabilities out with matrix products and keeps them for the backward; in
# bf16 it is two to four times faster than the flash kernel up to a few hundred tokens (figures: docs/kernels.md),
# at the price of the probabilities' memory.
#
# Autograd over slices of k and v would make a full-size gradient for every block; here every block's gradient is added
# in place to its rows. Shapes besides: R = H / G, C queries of a block, W keys of a block, N = B G.

# Elements of the key gradients that one call of the flash kernel makes for a run of blocks.
_RUN_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class _Plan:
    """What both passes of one call need beside tensors."""

    mask: AttentionMask
    scale: float
    chunk: int

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """The positions of each block's queries and of the keys that they can see."""
        mask = self.mask
        for start in range(mask.key_length - mask.query_length, mask.key_length, self.chunk):
            stop = min(start + self.chunk, mask.key_length)
            first = 0 if mask.window is None else max(0, start - mask.window + 1)
            yield slice(start, stop), slice(first, stop)

    def rows(self, queries: slice) -> slice:
        past = self.mask.key_length - self.mask.query_length
        return slice(queries.start - past, queries.stop - past)


@dataclass(frozen=True)
class _Run:
    """Neighbouring blocks of one shape: each starts ``step`` positions after the one before, in queries and in keys."""

    queries: slice
    keys: slice
    rows: slice
    step: int
    count: int = 1

    def joined(self, other: _Run) -> _Run:
        queries, keys = slice(self.queries.start, other.queries.stop), slice(self.keys.start, other.keys.stop)
        return _Run(queries, keys, slice(self.rows.start, other.rows.stop), self.step, self.count + 1)

    def first(self) -> tuple[slice, slice]:
        back = (self.count - 1) * self.step
        return slice(self.queries.start, self.queries.stop - back), slice(self.keys.start, self.keys.stop - back)


def _runs(plan: _Plan, most: int) -> list[_Run]:
    """The blocks, with up to ``most`` of one shape and one mask joined, so that a kernel call does many."""
    runs: list[_Run] = []
    for queries, keys in plan.blocks():
        run = _Run(queries, keys, plan.rows(queries), plan.chunk)
        last = runs[-1] if runs else None
        if last is not None and plan.mask.documents_BS is None and last.count < most:
            shift = last.count * last.step
            if [slice(s.start + shift, s.stop + shift) for s in last.first()] == [run.queries, run.keys]:
                runs[-1] = last.joined(run)
                continue
        runs.append(run)
    return runs


def _blocks_of(x_BHSE: Tensor, rows: slice, run: _Run) -> list[Tensor]:
    """Views of a run's blocks: all samples of a single block, or for every sample (count, H, length, E)."""
    if run.count == 1:
        return [x_BHSE[:, :, rows]]
    length = rows.stop - rows.start - (run.count - 1) * run.step
    return [x[:, rows].unfold(1, length, run.step).permute(1, 0, 3, 2) for x in x_BHSE]


def _add_blocks(total_BHSE: Tensor, sample: int, run: _Run, part: Tensor) -> None:
    """Add a run's key gradients, whose blocks overlap, in strips that do not."""
    if run.count == 1:
        total_BHSE[:, :, run.keys] += part
        return
    rows, reach = total_BHSE[sample, :, run.keys], (run.count - 1) * run.step
    for start in range(0, part.shape[2], run.step):
        width = min(run.step, part.shape[2] - start)
        strips = rows[:, start : start + reach + width].unfold(1, width, run.step).permute(1, 0, 3, 2)
        strips += part[:, :, start : start + width]


def _flash_runs(plan: _Plan, k: Tensor) -> list[_Run]:
    """Runs of as many blocks as bounded memory allows: every call waits for all threads, so fewer calls are faster."""
    if torch.compiler.is_compiling():  # adding to strided views of blocks that overlap, it loses gradients (torch 2.13)
        return _runs(plan, 1)
    keys = plan.chunk + (plan.mask.window or plan.mask.key_length)
    return _runs(plan, max(1, _RUN_ELEMENTS // (k.shape[1] * keys * k.shape[3])))


class _Flash(torch.autograd.Function):
    """Blocks through torch's CPU flash kernel; the log-sum-exps are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        B, H, S, E = q.shape
        out = torch.empty(B, S, H, E, dtype=q.dtype, device=q.device).transpose(1, 2)
        kept = []
        for run in _flash_runs(plan, k):
            bias = plan.mask.bias(*run.first(), q.dtype, q.device)
            views = (
                _blocks_of(x, rows, run) for x, rows in ((out, run.rows), (q, run.rows), (k, run.keys), (v, run.keys))
            )
            for out_, q_, k_, v_ in zip(*views, strict=True):
                result, lse = attention_aten.cpu_forward(q_, k_, v_, bias, plan.scale)
                out_.copy_(result)
                kept.append(lse)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        lses = iter(kept)
        for run in _flash_runs(plan, k):
            bias = plan.mask.bias(*run.first(), q.dtype, q.device)
            by_query = (_blocks_of(x, run.rows, run) for x in (dq, out, grad, q))
            by_key = (_blocks_of(x, run.keys, run) for x in (k, v))
            for sample, (dq_, out_, g_, q_, k_, v_) in enumerate(zip(*by_query, *by_key, strict=True)):
                parts = attention_aten.cpu_backward(g_, q_, k_, v_, out_, next(lses), bias, plan.scale)
                dq_.copy_(parts[0])
                _add_blocks(dk, sample, run, parts[1])
                _add_blocks(dv, sample, run, parts[2])
        return dq, dk, dv, None


def _fold(x_BHSE: Tensor, groups: int) -> Tensor:
    """(B, H, S, E) -> (N, R, S, E): the query heads that share a key head side by side, in dense memory."""
    B, H, S, E = x_BHSE.shape
    return x_BHSE.reshape(B * groups, H // groups, S, E)


def _rows_of(x_NRSE: Tensor, rows: slice) -> Tensor:
    """(N, R C, E): a block's queries of all heads that share a key head; a view when there is one such head."""
    return x_NRSE[:, :, rows].flatten(1, 2)


def _folded_bias(bias: Tensor, batch: int, groups: int, repeats: int) -> Tensor:
    bias = bias.repeat(1, 1, repeats, 1) if repeats > 1 else bias
    if bias.shape[0] == 1:
        return bias[0]
    return bias.expand(batch, groups, *bias.shape[2:]).reshape(batch * groups, *bias.shape[2:])


def _added(total: Tensor | None, like: Tensor, rows: slice, part: Tensor) -> Tensor:
    """The sum over blocks of a gradient's rows; a first block that covers all rows is taken as it is."""
    if total is None:
        if part.shape == like.shape:
            return part
        total = torch.zeros_like(like)
    total[:, rows] += part
    return total


class _Matmul(torch.autograd.Function):
    """Blocks through matrix products; the probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        (B, H, S, E), G = q.shape, k.shape[1]
        queries_, keys_, values_ = _fold(q, G), k.flatten(0, 1), v.flatten(0, 1)
        out = torch.empty(B, S, H, E, dtype=q.dtype, device=q.device).transpose(1, 2)
        kept = []
        for queries, keys in plan.blocks():
            rows, bias = plan.rows(queries), plan.mask.bias(queries, keys, q.dtype, q.device)
            transposed = keys_[:, keys].transpose(1, 2)
            bias = _folded_bias(bias, B, G, H // G)
            scores = torch.baddbmm(bias, _rows_of(queries_, rows), transposed, alpha=plan.scale)
            probabilities = torch.softmax(scores, dim=-1)
            out[:, :, rows] = torch.bmm(probabilities, values_[:, keys]).view(B, H, -1, E)
            kept.append(probabilities)
        ctx.plan = plan
        ctx.save_for_backward(queries_, keys_, values_, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        (B, H, S, E), G, K = grad.shape, k.shape[0] // grad.shape[0], k.shape[1]
        grads = _fold(grad, G)
        dq = torch.empty_like(q)
        dk: Tensor | None = None
        dv: Tensor | None = None
        for (queries, keys), probabilities in zip(plan.blocks(), kept, strict=True):
            rows = plan.rows(queries)
            block_grad = _rows_of(grads, rows)
            dv = _added(dv, v, keys, torch.bmm(probabilities.transpose(1, 2), block_grad))
            d_probabilities = torch.bmm(block_grad, v[:, keys].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_probabilities, probabilities, -1, q.dtype)
            dq[:, :, rows] = torch.bmm(d_scores, k[:, keys]).mul_(plan.scale).view(B * G, H // G, -1, E)
            dk = _added(dk, k, keys, torch.bmm(d_scores.transpose(1, 2), _rows_of(q, rows)))
        assert dk is not None and dv is not None, "there is at least one block"
        return dq.view(B, H, S, E), dk.mul_(plan.scale).view(B, G, K, E), dv.view(B, G, K, E), None


def blocked_attention(
    q_BHSE: Tensor, k_BGKE: Tensor, v_BGKE: Tensor, mask: AttentionMask, *, scale: float, chunk: int, engine: CpuEngine
) -> Tensor:
    """Attention of ``chunk`` queries at a time, each block over the keys that its mask lets it see, itself at least.

    The result (B, H, S, E) is stored as (B, S, H, E), so that joining the heads copies nothing. ``flash`` falls back to
    ``matmul`` where torch lacks the operators.
    """
    if engine == "flash" and not attention_aten.is_available():
        engine = "matmul"
    function = _Flash if engine == "flash" else _Matmul
    out: Tensor = function.apply(q_BHSE, k_BGKE, v_BGKE, _Plan(mask, scale, chunk))  # type: ignore[no-untyped-call]
    return out
