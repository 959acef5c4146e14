"""8-bit products against the formats as arXiv 2209.05433 defines them, and a GPU's against the emulation of a CPU."""

import importlib

import pytest
import torch
from compiled_offline import compile_offline

from phalanx.kernels import fp8 as room
from phalanx.kernels.fp8 import (
    E4M3,
    E5M2,
    LEAST_CAPABILITY,
    Fp8Weight,
    fp8_linear,
    quantise,
    quantise_weight,
    requantise,
)

# Bits of exponent, bits of mantissa, the exponent's bias, the largest value (table 1 of the paper).
FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
SHAPE = (48, 64, 32)  # tokens, inputs, outputs

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY,
    reason="needs a GPU that multiplies 8-bit floating point (compute capability 8.9)",
)


def representable(dtype):
    """Every magnitude of a format, ascending, so that an even index is an even mantissa."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[dtype]
    values = []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            share = mantissa / (1 << mantissa_bits)
            value = (1 + share) * 2.0 ** (exponent - bias) if exponent else share * 2.0 ** (1 - bias)
            values.append(value)
    return torch.tensor([v for v in values if v <= largest], dtype=torch.float64)


def rounded(x, dtype):
    """To the nearest of a format, of two as near the even one; within the format's range."""
    table, x = representable(dtype), x.double()
    above = torch.searchsorted(table, x.abs()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = (table[above] - x.abs()).abs(), (x.abs() - table[below]).abs()
    index = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return table[index] * x.sign()


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(dtype=torch.bfloat16, device="cpu"):
    tokens, inputs, outputs = SHAPE
    x, weight = randn(tokens, inputs, seed=1, dtype=dtype), randn(outputs, inputs, seed=2).bfloat16().float()
    grad = randn(tokens, outputs, seed=3, dtype=dtype) * 1e-3
    return x.to(device).requires_grad_(), weight.to(device).requires_grad_(), grad.to(device)


def held_weight(weight):
    held = Fp8Weight(weight.detach())
    requantise([(weight.detach(), held)])
    return held


def results(x, weight, grad, *, inputs_first=False, function=fp8_linear):
    """Output, input gradient and weight gradient of a weight (O, I), however it is stored."""
    weight = (weight.t() if inputs_first else weight).detach().contiguous().requires_grad_()
    out = function(x, weight, held_weight(weight), inputs_first=inputs_first)
    dx, dw = torch.autograd.grad(out, (x, weight), grad)
    return out, dx, dw.t() if inputs_first else dw


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-9, 1.0, 448.0, 1.8e30])
def test_values_are_the_nearest_of_the_format(dtype, source, size):
    spread = torch.exp2(-20 * torch.rand(4000, generator=torch.Generator().manual_seed(5)))
    x = (randn(4000) * spread * size).to(source)
    values, scale = quantise(x, dtype)
    assert values.dtype == dtype
    assert scale.dtype == torch.float32
    assert scale.shape == ()
    assert torch.equal(values.double(), rounded(x.double() / scale.double(), dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scale_is_the_least_power_of_two_that_fits(dtype):
    largest = FORMATS[dtype][-1]
    for amax in (1.0, 1.75, 1.7500001, 1.9999999, 2.0, 3.5, 448.0, 449.0, 1e-6):
        x = torch.tensor([-amax, amax / 3], dtype=torch.float32)
        _, scale = quantise(x, dtype)
        assert torch.frexp(scale).mantissa == 0.5
        assert x.abs().max() / scale <= largest < x.abs().max() / scale * 2


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7F800000, -0x400000, -1, -0x800000, -0x7FFFFF])
def test_whatever_the_bits_of_nan_its_scale_is_infinite(bits):
    """A GPU's has all bits set but the sign, a CPU's but one of the mantissa, or all where its vector unit rounds."""
    largest = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert not largest.isfinite()
    for dtype in (E4M3, E5M2):
        scale, inverse = room._scales(largest, dtype)
        assert scale == float("inf")
        assert inverse == 0


def test_values_are_row_major_however_a_tensor_lies():
    x = randn(48, 32)
    for other in (x.t().contiguous().t(), torch.cat([x, x], dim=1)[:, :32], x[:1].expand(48, 32)):
        values, _ = quantise(other, E5M2)
        assert values.is_contiguous()
        assert torch.equal(values.float(), quantise(other.contiguous(), E5M2).values.float())


def test_zeros_stay_zeros():
    x, weight, grad = tensors()
    nothing = [torch.zeros_like(t).requires_grad_() for t in (x, weight)]
    for out in results(*nothing, torch.zeros_like(grad)):
        assert not out.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(value):
    x, weight, grad = tensors()
    bad = x.detach().clone()
    bad[3, 5] = value
    out, _, dw = results(bad.requires_grad_(), weight, grad)
    assert not out.isfinite().any()
    assert not dw.isfinite().any()
    bad = grad.clone()
    bad[0, 0] = value
    _, dx, dw = results(x, weight, bad)
    assert not dx.isfinite().any()
    assert not dw.isfinite().any()
    bad = weight.detach().clone()
    bad[0, 0] = value
    assert not results(x, bad, grad)[0].isfinite().any()


@pytest.mark.parametrize("inputs_first", [False, True])
def test_products_are_those_of_the_rounded_factors(inputs_first):
    x, weight, grad = tensors()
    made = results(x, weight, grad, inputs_first=inputs_first)
    x8, w8, g8 = quantise(x, E4M3), quantise_weight(weight), quantise(grad, E5M2)
    x64, w64, g64 = (
        rounded(t.detach() / q.scale, f) * q.scale.double()
        for t, q, f in ((x.float(), x8, E4M3), (weight, w8, E4M3), (grad.float(), g8, E5M2))
    )
    expected = (x64 @ w64.t(), g64 @ w64, g64.t() @ x64)
    for mine, theirs, dtype in zip(made, expected, (torch.bfloat16, torch.bfloat16, torch.float32), strict=True):
        assert mine.dtype == dtype
        rtol = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=1e-5 * theirs.abs().max().item())


def test_errors_are_those_of_the_formats():
    """Half a step of either factor at most: 2^-4 of it in E4M3, 2^-3 in E5M2, below normal values half a step there."""
    x, weight, grad = tensors(torch.float32)
    made = results(x, weight, grad)

    def off(t, dtype):
        mantissa, scale = FORMATS[dtype][1], quantise(t, dtype).scale.double()
        bias = FORMATS[dtype][2]
        return t.detach().double().abs() * 2.0 ** -(mantissa + 1) + scale * 2.0 ** (-bias - mantissa)

    def bound(left, right, left_off, right_off):
        return left.abs() @ right_off + left_off @ right.abs() + left_off @ right_off

    x64, w64, g64 = (t.detach().double() for t in (x, weight, grad))
    ox, ow, og = off(x, E4M3), off(weight, E4M3), off(grad, E5M2)
    wanted = (
        (x64 @ w64.t(), bound(x64, w64.t(), ox, ow.t())),
        (g64 @ w64, bound(g64, w64, og, ow)),
        (g64.t() @ x64, bound(g64.t(), x64, og.t(), ox)),
    )
    for mine, (exact, most) in zip(made, wanted, strict=True):
        error = (mine.double() - exact).abs()
        assert (error <= most * (1 + 1e-5)).all()
        assert error.mean() > most.mean() / 100  # they are rounded indeed


@pytest.mark.parametrize("inputs_first", [False, True])
def test_a_weight_quantised_at_every_use_gives_the_same_bits_and_is_not_kept(inputs_first):
    x, weight, grad = tensors()
    weight = (weight.t() if inputs_first else weight).detach().contiguous().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        anew = fp8_linear(x, weight, inputs_first=inputs_first)
    assert [t for t in kept if t.shape == weight.shape] == [weight]  # the parameter itself, and no copy of it
    held = fp8_linear(x, weight, held_weight(weight), inputs_first=inputs_first)
    assert torch.equal(anew, held)
    for mine, theirs in zip(*(torch.autograd.grad(out, (x, weight), grad) for out in (anew, held)), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_are_kept_as_the_weight_says():
    x, weight, grad = tensors()
    for weight_dtype, kept, expected in (
        (torch.float32, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
    ):
        stored = torch.nn.Parameter(weight.detach().to(weight_dtype))
        if kept is not None:
            stored.grad_dtype = kept
        fp8_linear(x, stored).backward(grad)
        assert stored.grad.dtype == expected


def test_a_weight_is_made_anew_where_it_lies():
    weights = [randn(32, 64), randn(16, 48) * 1e-3, torch.zeros(16, 16)]
    held = [held_weight(weight) for weight in weights]
    places = [t.data_ptr() for h in held for t in (h.stored, h.transposed, h.scale)]
    changed = [weight * 100 for weight in weights]
    requantise(list(zip(changed, held, strict=True)))
    assert places == [t.data_ptr() for h in held for t in (h.stored, h.transposed, h.scale)]
    for weight, mine in zip(changed, held, strict=True):
        values, scale = quantise_weight(weight)
        for layout, expected in ((mine.stored, values), (mine.transposed, values.t())):
            assert layout.is_contiguous()
            assert torch.equal(layout.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(mine.scale, scale)
    requantise([])


def test_only_what_needs_a_gradient_gets_one():
    x, weight, grad = tensors()
    held = held_weight(weight)
    assert not fp8_linear(x.detach(), weight.detach(), held).requires_grad
    fp8_linear(x.detach(), weight, held).backward(grad)
    assert x.grad is None
    assert weight.grad is not None


@pytest.mark.parametrize("inputs_first", [False, True])
def test_one_graph_and_equal_bits_when_compiled(inputs_first):
    compiled = torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)
    plain = results(*tensors(), inputs_first=inputs_first)
    for mine, theirs in zip(results(*tensors(), inputs_first=inputs_first, function=compiled), plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_equal_quantised_values_by_inductor():
    compiled = torch.compile(quantise, fullgraph=True, dynamic=False)
    for dtype in (E4M3, E5M2):
        for x in (randn(64, 48), randn(64, 48, dtype=torch.bfloat16) * 1e-7):
            for mine, theirs in zip(compiled(x, dtype), quantise(x, dtype), strict=True):
                assert torch.equal(mine.float(), theirs.float())


@pytest.fixture(scope="module")
def kernels():
    """Those of Triton, which a CPU interprets."""
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("phalanx.kernels.fp8_triton")


@pytest.mark.parametrize("shape", [(16, 16), (200, 336), (130, 48), (0, 16)])
def test_the_kernel_transposes(kernels, shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randint(0, 127, shape, dtype=torch.uint8).to(device).view(E4M3)
    found = kernels.transposed(x)
    assert found.dtype == E4M3 and found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())
    assert torch.equal(torch.ops.phalanx.transposed_8_bit(x).view(torch.uint8), x.view(torch.uint8).t())


def test_a_compiler_is_told_what_a_transpose_gives():
    torch.library.opcheck(room.transposed_8_bit, (randn(48, 32).to(torch.uint8),))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64), (80, 208)])
def test_the_kernel_quantises_a_weight_in_both_layouts(kernels, source, shape):
    on_gpu = torch.cuda.is_available()
    weight = randn(*shape, seed=7) * 3e-2
    if not on_gpu:  # the interpreter loses what is carried where a value is rounded up to the next power of two
        values, scale = quantise_weight(weight)
        weight = values.float() * scale
    weight = weight.bfloat16().to("cuda" if on_gpu else "cpu", source)
    wide = torch.cat([weight, weight], dim=1)[:, : shape[1]]
    for given in (weight, wide):
        values, scale = quantise_weight(weight)
        stored, transposed = torch.empty_like(values), torch.empty_like(values.t().contiguous())
        kernels.quantise_weight(given, 1 / scale, stored, transposed)
        assert torch.equal(stored.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(transposed.view(torch.uint8), values.t().view(torch.uint8))


_PROGRAM = """
from phalanx.kernels import fp8_triton as kernels

kinds = dict.fromkeys(("rows", "columns", "stride"), "i32") | {"stored": "*fp8e4nv", "transposed": "*fp8e4nv"}
cases = [(kernels._transpose, kernels._TRANSPOSED_TILE, "*u8")]
cases += [(kernels._quantise_weight, kernels._WEIGHT_TILE, source) for source in ("*fp32", "*bf16")]
for kernel, tile, source in cases:
    own = kinds | ({"inverse": "*fp32"} if source != "*u8" else {})
    for capability, made in compiled(kernel, own, {"TILE": tile}, others=source, capabilities=(90,), num_warps=8):
        assert ".local" not in made.asm["ptx"], (kernel, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    assert compile_offline(_PROGRAM, tmp_path) == 3


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_a_gpu_makes_the_numbers_of_the_emulation(compiled, inputs_first):
    function = torch.compile(fp8_linear, fullgraph=True) if compiled else fp8_linear
    mine = results(*tensors(device="cuda"), inputs_first=inputs_first, function=function)
    for made, expected in zip(mine, results(*tensors(), inputs_first=inputs_first), strict=True):
        assert made.dtype == expected.dtype
        # Sums of tensor cores are kept in fewer bits than fp32: 2^-11 of the largest, and a rounding of the output.
        atol = 2.0**-11 * expected.abs().max().item()
        torch.testing.assert_close(made.cpu(), expected, rtol=2.0**-7, atol=atol)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_gpu_quantises_to_the_same_bits(compiled, dtype):
    function = torch.compile(quantise, fullgraph=True) if compiled else quantise
    for x in (randn(512, 256), randn(512, 256, dtype=torch.bfloat16) * 1e-7, torch.zeros(16, 16)):
        values, scale = function(x.cuda(), dtype)
        expected = quantise(x, dtype)
        assert torch.equal(values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(scale.cpu(), expected.scale)


@gpu
@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_and_hides_nothing():
    x, weight, grad = tensors(device="cuda")
    results(x, weight, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(x, weight, grad)
        bad = x.detach().clone()
        bad[3, 5].fill_(float("nan"))
        out, _, dw = results(bad.requires_grad_(), weight, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not out.isfinite().any()
    assert not dw.isfinite().any()
