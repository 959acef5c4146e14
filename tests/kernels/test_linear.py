"""Linear layers by oneDNN against torch's own products, and what the private operator must do."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels import linear as room
from phalanx.kernels.linear import linear, project

# Rows, inputs, outputs: large enough for oneDNN, flat and tall, with odd sizes.
SHAPES = [(512, 64, 192), (96, 512, 128), (333, 130, 101), (1, 2048, 2080)]


def tensors(rows, inputs, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    shapes = [(rows, inputs), (outputs, inputs), (rows, outputs), (rows, outputs)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def gradients(out, inputs, grad):
    return torch.autograd.grad(out, inputs, grad)


def close(mine, wide):
    """Within a few roundings of float32 of what float64 makes of the same numbers, scaled by the largest."""
    return (mine.detach().double() - wide.detach()).abs().max() <= 2e-6 * wide.detach().abs().max().clamp(min=1.0)


@pytest.fixture
def calls(monkeypatch):
    """How often the private operator was reached."""
    seen = []
    for name in ("_product", "_product_plus"):
        whole = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *a, whole=whole, name=name: seen.append(name) or whole(*a))
    return seen


@pytest.mark.skipif(not room.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("contiguous", [True, False])
def test_linear_equals_float64(shape, contiguous, calls):
    x, weight, _, grad = tensors(*shape)
    if not contiguous:
        x, grad = (torch.cat([t, t], dim=1)[:, : t.shape[1]] for t in (x, grad))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = linear(x, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.linear(*wide)
    assert close(out, expected)
    pairs = zip(gradients(out, (x, weight), grad), gradients(expected, wide, grad.double()), strict=True)
    assert all(close(mine, theirs) for mine, theirs in pairs)
    assert calls == ["_product"] * 2


@pytest.mark.skipif(not room.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [True, False])
def test_project_equals_float64(shape, with_residual, calls):
    x, weight, residual, grad = tensors(*shape)
    given = [x, weight.t().contiguous(), *([residual] if with_residual else [])]
    given = [t.requires_grad_() for t in given]
    before = residual.clone()
    out = project(*given)
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = wide[0] @ wide[1] + (wide[2] if with_residual else 0.0)
    assert close(out, expected)
    pairs = zip(gradients(out, given, grad), gradients(expected, wide, grad.double()), strict=True)
    assert all(close(mine, theirs) for mine, theirs in pairs)
    assert torch.equal(residual, before)
    forward = "_product_plus" if with_residual else "_product"
    by_mkl = with_residual and shape[1] < 256
    assert calls == (["_product"] if by_mkl else [forward, "_product"])


@pytest.mark.skipif(not room.is_available(), reason="this torch has no oneDNN")
def test_only_what_needs_a_gradient_gets_one(calls):
    x, weight, residual, grad = tensors(512, 64, 192)
    weight.requires_grad_()
    linear(x, weight).backward(grad)
    assert calls == ["_product"]
    assert x.grad is None
    assert close(weight.grad, grad.double().t() @ x.double())
    residual.requires_grad_()
    project(x, weight.detach().t(), residual).backward(grad)
    assert torch.equal(residual.grad, grad)


def test_small_products_are_torchs_own(calls):
    x, weight, residual, _ = tensors(64, 128, 128)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(project(x, weight.t(), residual), torch.addmm(residual, x, weight.t()))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_torchs_own_products(dtype, calls):
    x, weight, residual, _ = tensors(512, 64, 192, dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(linear(x, weight, residual[0]), F.linear(x, weight, residual[0]))
    assert torch.equal(project(x, weight.t(), residual), torch.addmm(residual, x, weight.t()))
    assert torch.equal(project(x, weight.t()), x @ weight.t())
    assert not calls


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("beforehand", [False, True])
def test_masters_are_multiplied_by_their_cast_and_get_gradients_of_their_own_type(inputs_first, added, beforehand):
    """The numbers of a cast in the graph, bit for bit, but for where a bias and its gradient are wider there."""
    x, weight, residual, grad = tensors(96, 64, 48)
    x, grad = x.bfloat16().requires_grad_(), grad.bfloat16()
    weight = (weight.t().contiguous() if inputs_first else weight).requires_grad_()
    extra = {"nothing": None, "bias": residual[0], "residual": residual}[added]
    extra = None if extra is None else extra.bfloat16().requires_grad_()
    cast = weight.detach().bfloat16() if beforehand else None
    if inputs_first:
        out = project(x, weight, extra, cast_IO=cast)
        product = x @ weight.bfloat16()
        expected = product if extra is None else torch.addmm(extra, x, weight.bfloat16())
    else:
        if added == "residual":
            pytest.skip("an input projection adds to nothing")
        out, expected = linear(x, weight, extra, cast_OI=cast), F.linear(x, weight.bfloat16(), extra)
    assert torch.equal(out, expected)
    leaves = [leaf for leaf in (x, weight, extra) if leaf is not None]
    found, wanted = gradients(out, leaves, grad), gradients(expected, leaves, grad)
    assert [g.dtype for g in found] == [leaf.dtype for leaf in leaves]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_16_bits_have_no_second_derivatives():
    x, weight, _, _ = tensors(8, 16, 4)
    x, weight = x.bfloat16().requires_grad_(), weight.requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().square().sum().backward()


def test_without_the_operator_torchs_own_products_run(monkeypatch, calls):
    monkeypatch.setattr(room, "is_available", lambda: False)
    x, weight, residual, _ = tensors(512, 64, 192)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(project(x, weight.t(), residual), torch.addmm(residual, x, weight.t()))
    assert not calls
    assert room.operators() == ()


@pytest.mark.skipif(not room.is_available(), reason="this torch has no oneDNN")
def test_the_operators_are_named_as_they_are_dispatched():
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight, residual, _ = tensors(96, 512, 128)
    with Listener():
        linear(x, weight)
        project(x, weight.t(), residual)
    assert [func for func in seen if func in room.operators()] == list(room.operators())
