"""The gate that keeps only its input, beside plain autograd: the same bits, and less that is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.pointwise import _SwiGLU


def plain(inner: Tensor) -> Tensor:
    gate, up = inner.chunk(2, dim=1)
    return F.silu(gate) * up


def kept(make: object, inner: Tensor) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make(inner)  # type: ignore[operator]
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False])
def test_the_same_bits_are_kept_in_less_memory(dtype: torch.dtype, whole: bool) -> None:
    wide = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    inner = (wide if whole else wide[:, 32:]).detach().requires_grad_()  # merged projections give a strided view
    grad = torch.randn(24, inner.shape[1] // 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    outs, grads = [], []
    for make in (plain, _SwiGLU.apply):
        out = make(inner)  # type: ignore[no-untyped-call]
        outs.append(out.detach())
        grads.append(torch.autograd.grad(out, inner, grad)[0])
    assert torch.equal(*outs) and torch.equal(*grads)
    assert kept(_SwiGLU.apply, inner) <= kept(plain, inner) - outs[0].nbytes
