"""The self-test of an attention kernel: what is right passes, and every kind of fault is found."""

from __future__ import annotations

import pytest
import torch

from phalanx.core.errors import UserError
from phalanx.kernels import attention_trial
from phalanx.kernels.attention import attention
from phalanx.kernels.attention_trial import KERNELS, Shape, find_fault, reference

CPU = torch.device("cpu")
SHAPES = [
    Shape(2, 4, 2, 192, 16, torch.bfloat16),
    Shape(1, 2, 2, 64, 64, torch.bfloat16, layout="all"),
    Shape(3, 4, 1, 300, 8, torch.float32, layout="none"),
    Shape(2, 4, 2, 130, 16, torch.bfloat16, past=130),
]


def right(q, k, v, grad):
    """torch's own kernel for CPUs; queries are the last positions."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend="sdpa")
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def spoilt(index, change):
    """A kernel that is right but for one of its results."""

    def attend(*given):
        results = list(right(*given))
        results[index] = change(results[index].clone())
        return tuple(results)

    return attend


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_right_passes(shape):
    assert find_fault("cudnn", shape, CPU, right) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.slow
def test_rounding_is_no_fault_in_long_sequences(dtype):
    assert find_fault("flash", Shape(1, 2, 1, 4096, 64, dtype), CPU, right) == ""


def put(value, *where):
    def change(x):
        x[where] = value
        return x

    return change


NAMES = ["output", "gradient of queries", "gradient of keys", "gradient of values"]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_element_that_is_not_finite(index, value):
    """Anywhere, also in heads and samples whose values are not compared."""
    shape = Shape(3, 8, 4, 64, 8, torch.bfloat16)
    assert find_fault("cudnn", shape, CPU, spoilt(index, put(value, 1, 2, 63, 5))) == f"not finite: {NAMES[index]}"


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("tile", [slice(0, 64), slice(448, 512)])
def test_one_tile_that_is_wrong(index, tile):
    shape = Shape(1, 2, 2, 512, 16, torch.bfloat16)
    fault = find_fault("flash", shape, CPU, spoilt(index, put(0.0, 0, 1, tile)))
    assert fault.startswith("further than 6% from the reference: ")
    assert NAMES[index] in fault


def test_no_mask():
    def attend(q, k, v, grad):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    assert "output" in find_fault("flash", SHAPES[0], CPU, attend)


def test_scores_far_below_zero():
    """The fault of cuDNN that this was made for: NaN where the log-sum-exp is below -88.7, in the last tile."""
    shape = Shape(1, 1, 1, 192, 64, torch.bfloat16)
    q, k, _, _ = attention_trial._tensors(shape, CPU)
    lse = torch.logsumexp((q @ k.mT).float() * 64**-0.5, -1)
    assert (lse[..., 128:] < -88.7).sum() == 32


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid plans\nand a trace"), "No valid plans"),
        (NotImplementedError("not on this device"), "NotImplementedError: not on this device"),
    ],
)
def test_errors_are_faults(error, words):
    def attend(*_given):
        raise error

    fault = find_fault("cudnn", SHAPES[0], CPU, attend)
    assert words in fault
    assert "\n" not in fault


def test_no_memory_is_no_fault():
    def attend(*_given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        find_fault("cudnn", SHAPES[0], CPU, attend)


def test_a_broken_device_ends_the_run(monkeypatch):
    """After an illegal access nothing runs in this process any more: no other kernel can be tried."""
    wedged = []

    def attend(*_given):
        wedged.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    zeros = torch.zeros

    def refuse(*given, **options):
        if wedged:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return zeros(*given, **options)

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(UserError, match=r"broke the device.*illegal memory.*set model.attention_backend=flash"):
        find_fault("cudnn", SHAPES[0], CPU, attend)


def test_determinism_rules_cudnn_out():
    q = torch.empty(1, 1, 1, 8)
    torch.use_deterministic_algorithms(True)
    try:
        assert "train.deterministic" in attention_trial._refused("cudnn", q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("length", "past"), [(50, 0), (20, 30)])
def test_reference(monkeypatch, length, past):
    """In chunks of any size it is what autograd makes of the textbook."""
    monkeypatch.setattr(attention_trial, "_REFERENCE_ELEMENTS", 7 * 2 * (length + past))
    generator = torch.Generator().manual_seed(0)
    keys = length + past
    q, k, v = (torch.randn(1, n, s, 8, generator=generator) for n, s in ((2, length), (1, keys), (1, keys)))
    grad = torch.randn(1, 2, length, 8, generator=generator)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend="math")
    expected = out, *torch.autograd.grad(out, leaves, grad)
    got = reference(q[0].detach(), k[0, 0].detach(), v[0, 0].detach(), grad[0])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.detach().reshape(a.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [256, 192, 2048])
def test_kernels_on_a_gpu(kernel, length):
    """Each is right, or is told to be wrong in words; one of the fast ones must be right."""
    device = torch.device("cuda", torch.cuda.current_device())
    shape = Shape(2, 8, 2, length, 64, torch.bfloat16)
    fault = find_fault(kernel, shape, device)
    assert not fault or kernel == "cudnn", fault


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_trial():
    """Of 32,768 positions a matrix of all scores would take 8 GiB for two heads."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert find_fault("flash", Shape(1, 2, 1, 32768, 128, torch.bfloat16), device) == ""
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
