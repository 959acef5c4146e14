"""cuDNN's and FlashAttention's operators on a CPU, where torch has none: written out, under torch's own schemas.

What calls them is run as it would be on a GPU: through dispatcher, autograd formulas and compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Calls:
    """How often each operator ran, and what the gradients of queries are multiplied with: a fault to be found."""

    counts: dict[str, int] = field(default_factory=dict)
    spoilt: dict[str, float] = field(default_factory=dict)


@contextmanager
def fused_on_cpu() -> Iterator[Calls]:
    """Within it the operators run on CPU tensors."""
    calls = Calls()
    with torch.library._scoped_library("aten", "IMPL") as library:
        for kernel in ("cudnn", "flash"):
            forward, backward = _operators(kernel, calls)
            library.impl(f"_scaled_dot_product_{kernel}_attention", forward, "CPU")
            library.impl(f"_scaled_dot_product_{kernel}_attention_backward", backward, "CPU")
        yield calls


def _operators(kernel, calls):
    def attend(q, k, v, causal, scale):
        calls.counts[kernel] = calls.counts.get(kernel, 0) + 1
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        scores = _scores(q, k, causal, scale)
        out = (scores.softmax(-1) @ _expanded(v, q)).to(q.dtype)
        lse, nothing = scores.logsumexp(-1).float(), torch.empty(0)
        seed = torch.zeros(2, dtype=torch.uint64) if kernel == "flash" else torch.zeros((), dtype=torch.int64)
        offset = torch.zeros((), dtype=seed.dtype)
        lse = lse[..., None] if kernel == "cudnn" else lse
        laid = torch.empty_like(q).copy_(out)  # as q
        return laid, lse, None, None, q.shape[2], k.shape[2], seed, offset, nothing

    def gradients(grad, q, k, v, out, lse, lengths, causal, scale):
        calls.counts[f"{kernel} backward"] = calls.counts.get(f"{kernel} backward", 0) + 1
        assert lengths == (q.shape[2], k.shape[2])
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        assert lse.shape == (*q.shape[:3], 1) if kernel == "cudnn" else q.shape[:3]
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        grad, out = grad.double(), out.double()
        weights = (_scores(q, k, causal, scale) - lse.reshape(*q.shape[:3], 1)).exp()
        change = grad @ _expanded(v, q).mT
        change = weights * (change - (grad * out).sum(-1, keepdim=True)) * factor
        dq = change @ _expanded(k, q) * calls.spoilt.get(kernel, 1.0)
        dk, dv = (_folded(x, k) for x in (change.mT @ q.double(), weights.mT @ grad))
        return tuple(x.to(like.dtype) for x, like in zip((dq, dk, dv), (q, k, v), strict=True))

    if kernel == "cudnn":

        def forward(q, k, v, bias, wants_lse, p=0.0, causal=False, debug=False, *, scale=None):
            assert bias is None
            assert wants_lse
            assert (p, debug) == (0.0, False)
            return attend(q, k, v, causal, scale)

        def backward(grad, q, k, v, out, lse, _s, _o, bias, _cq, _ck, mq, mk, p, causal, *, scale=None):
            return gradients(grad, q, k, v, out, lse, (mq, mk), causal, scale)
    else:

        def forward(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
            assert (p, debug) == (0.0, False)
            return attend(q, k, v, causal, scale)

        def backward(grad, q, k, v, out, lse, _cq, _ck, mq, mk, p, causal, _s, _o, *, scale=None):
            return gradients(grad, q, k, v, out, lse, (mq, mk), causal, scale)

    return forward, backward


def _scores(q, k, causal, scale):
    scores = q.double() @ _expanded(k, q).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _expanded(x, q):
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _folded(x, like):
    return x.unflatten(1, (like.shape[1], -1)).sum(2)
