"""The Triton kernels of gradients that fill one tensor, against autograd: on a GPU, else under the interpreter."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from compiled_offline import compile_offline

from phalanx.kernels import pointwise
from phalanx.model.rotary import _plain, rotate_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-5}  # the interpreter cuts bf16 off


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("phalanx.kernels.pointwise_triton")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "wide"), [(5, 8, 0), (3, 1030, 0), (2, 64, 24), (0, 16, 0)])
def test_the_gradient_of_a_gate(kernels: ModuleType, dtype: torch.dtype, rows: int, width: int, wide: int) -> None:
    inner = drawn(rows, wide + 2 * width, dtype=dtype)[:, wide:]  # merged projections give a strided view
    grad = drawn(rows, width, dtype=dtype)
    exact = inner.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, exact, grad.double())
    found = kernels.swiglu_gradient(grad, inner)
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)
    strided = drawn(width, rows, dtype=dtype).t()
    torch.testing.assert_close(kernels.swiglu_gradient(strided, inner), kernels.swiglu_gradient(strided.clone(), inner))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 8), (6, 2, 12), (17, 1, 64), (30, 10, 6)])
@pytest.mark.parametrize("own_positions", [False, True])
def test_the_gradient_of_rotated_heads(
    kernels: ModuleType, dtype: torch.dtype, heads: int, kv_heads: int, size: int, own_positions: bool
) -> None:
    batch, length = 2, 5
    angles = 7 * torch.rand(*((batch,) if own_positions else ()), length, 1, size // 2)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    # As attention leaves them: heads before positions.
    grads = [drawn(batch, n, length, size, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads)]
    used = (cos.to(dtype).double(), sin.to(dtype).double())
    qkv = drawn(batch, length, heads + 2 * kv_heads, size).double().requires_grad_()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    outs = [_plain(q, *used), _plain(k, *used), v]
    (expected,) = torch.autograd.grad(outs, qkv, [grad.double() for grad in grads])
    found = kernels.rotate_heads_gradient(*grads, cos, sin)
    assert found.is_contiguous() and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    # What runs where there is no Triton.
    plain = torch.ops.phalanx.rotate_heads_gradient(*(grad.cpu() for grad in grads), cos.cpu(), sin.cpu())
    torch.testing.assert_close(plain.double(), expected.cpu(), rtol=2 * ROUNDING[dtype], atol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("own_positions", [False, True])
def test_operators_say_beforehand_what_they_give(own_positions: bool) -> None:
    """What a compiler is told of their results is what they are."""
    inner, grad = drawn(6, 40)[:, 8:], drawn(6, 16)
    torch.library.opcheck(pointwise.swiglu_gradient, (grad, inner))
    angles = torch.rand(*((2,) if own_positions else ()), 3, 1, 4, device=DEVICE)
    grads = [drawn(2, n, 3, 8).transpose(1, 2) for n in (4, 2, 2)]
    torch.library.opcheck(pointwise.rotate_heads_gradient, (*grads, angles.cos(), angles.sin()))


def test_one_graph_of_a_gate_and_rotated_heads() -> None:
    """Compiled, with the operators left as they are, both have the gradients that they have as written."""
    angles = torch.rand(3, 1, 4, device=DEVICE)

    def both(inner: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = pointwise_heads(qkv)
        return pointwise._SwiGLU.apply(inner).sum() + (q * 2).sum() + (k * v).sum()  # type: ignore[no-untyped-call]

    def pointwise_heads(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rotate_heads(qkv, angles.cos(), angles.sin(), 4, 2)

    results = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        inner, qkv = drawn(6, 40).requires_grad_(), drawn(2, 3, 8, 8).requires_grad_()
        results.append(torch.autograd.grad(function(inner, qkv), (inner, qkv)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


_PROGRAM = """
from phalanx.kernels import pointwise_triton as kernels

sizes = ("width", "length", "heads", "kv_heads", "grad_stride", "inner_stride", "angle_batch", "angle_token")
kinds = dict.fromkeys(sizes, "i32") | {f"{x}_{what}": "i32" for x in "qkv" for what in ("batch", "token", "head")}
kinds |= {"cos": "*fp32", "sin": "*fp32"}
cases = [(kernels._swiglu_gradient, {"COLUMNS": kernels._COLUMNS})]
cases += [(kernels._rotated_back, {"HALF": half, "COLUMNS": 64, "HEADS": kernels._HEADS}) for half in (64, 48)]
for kernel, given in cases:
    for capability, made in compiled(kernel, kinds, given, others="*bf16", num_warps=4):
        assert ".local" not in made.asm["ptx"], (kernel, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert compile_offline(_PROGRAM, tmp_path) == 6


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_has_the_gradients_of_a_cpu(compiled: bool) -> None:
    angles = torch.rand(130, 1, 32)

    def both(inner: torch.Tensor, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = rotate_heads(qkv, cos, sin, 6, 2)
        heads = q.float().square().sum() + (k.float() * v.float()).sum()
        return pointwise.swiglu(inner).float().square().sum() + heads

    function = torch.compile(both, fullgraph=True) if compiled else both
    inner, qkv = torch.randn(300, 2 * 1100), torch.randn(2, 130, 10, 64)
    results = []
    for device, dtype, made in (("cuda", torch.bfloat16, function), ("cpu", torch.float64, both)):
        given = [x.bfloat16().to(device, dtype).requires_grad_() for x in (inner, qkv)]
        turn = [x.bfloat16().float().to(device) for x in (angles.cos(), angles.sin())]
        results.append([x.cpu().double() for x in torch.autograd.grad(made(*given, *turn), given)])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine, exact, rtol=2**-5, atol=2**-5)
