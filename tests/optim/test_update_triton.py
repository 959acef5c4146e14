"""The Triton kernels of the optimizers against plain torch: on a GPU where there is one, else under the interpreter."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled_offline import compile_offline
from torch import Tensor

from phalanx.optim import quantise, skipping
from phalanx.optim.adamw import AdamW
from phalanx.optim.lamb import LAMB

try:
    import triton
    import triton.language as tl

    from phalanx.optim.update_triton import _code
except ImportError:
    triton = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Blocks that end within a row, rows that are not aligned, more than a tile of blocks, a vector, nothing at all.
SHAPES = [(40, 300), (5, 512), (70, 7), (0, 512), (3, 1000)]
VECTORS = [(5000,), (3,), (0,)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("phalanx.optim.update_triton")


def made(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(DEVICE)) for s in shapes]


def give(ps: list[torch.nn.Parameter], step: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
    """Gradients over five decades."""
    generator = torch.Generator().manual_seed(step)
    for p in ps:
        wide = torch.randn(p.shape, generator=generator) * 10 ** (-5 * torch.rand(p.shape, generator=generator))
        p.grad = None
        p.grad_dtype = dtype  # type: ignore[attr-defined]
        p.grad = (wide * scale).to(DEVICE, dtype)


def steps(optimizer: Any, ps: list[torch.nn.Parameter], dtype: torch.dtype, *, skip: int = 3) -> None:
    for step in range(6):
        give(ps, step, dtype, scale=float("nan") if step == skip else 1.0)
        optimizer.found_inf = torch.full((), float(step == skip), device=DEVICE) if step else None
        optimizer.grad_scale = torch.full((), 0.5 + step, device=DEVICE) if step else None
        optimizer.step()


def both(make: Any, shapes: Any, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> list[Any]:
    """The optimizer after some steps, by the kernels and by plain torch, and its parameters."""
    found = []
    for by_kernels in (True, False):
        monkeypatch.setattr(skipping, "on_gpu", lambda tensor, by_kernels=by_kernels: by_kernels)
        ps = made(shapes)
        optimizer = make(ps)
        optimizer.as_on_device = True
        steps(optimizer, ps, dtype)
        found.append((optimizer, ps))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1}
    (mine, ps), (theirs, qs) = both(lambda ps: LAMB(ps, **settings), SHAPES + VECTORS, kernels, monkeypatch, dtype)
    assert mine._launches and not theirs._launches
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for name, value in mine.state[p].items():
            torch.testing.assert_close(value, theirs.state[q][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_adamw(bits: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The same but where a sum's last bit decides how a state is rounded: that may be one code apart."""
    shapes = SHAPES + VECTORS if bits == 32 else SHAPES
    make = lambda ps: AdamW(ps, lr=0.01, weight_decay=0.1, state_bits=bits)  # noqa: E731
    (mine, ps), (theirs, qs) = both(make, shapes, kernels, monkeypatch, dtype)
    assert mine._kernels and not theirs._kernels
    differing = 0
    for p, q in zip(ps, qs, strict=True):
        assert float(mine.state[p]["step"]) == 5
        if not p.numel():
            continue
        for name, value in mine.state[p].items():
            other = theirs.state[q][name]
            if bits == 32 or value.dtype == torch.float32:
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)
            else:
                apart = (value.float() - other.float()).abs()
                assert (apart <= (1.0 if bits == 8 else value.float().abs().max() / 128)).all(), name
                differing += int((apart > 0).sum())
        torch.testing.assert_close(p, q, rtol=1e-4, atol=5e-4 if bits == 16 else 1e-4)  # of steps of 1e-2
    assert differing <= 0.01 * sum(2 * p.numel() for p in ps)


def test_gradients_that_move_are_found(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of addresses follows what moves: gradients that are made anew, states that were loaded."""
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: True)
    ps, kept = made([(64, 256)]), []
    optimizer = AdamW(ps, state_bits=8)
    for step in range(3):
        kept.append(ps[0].grad)  # so that the next one lies elsewhere
        give(ps, step)
        before = ps[0].detach().clone()
        optimizer.step()
        assert not torch.equal(before, ps[0])
    table = optimizer._kernels[0]._table
    optimizer.step()
    assert optimizer._kernels[0]._table is table
    optimizer.state[ps[0]]["exp_avg"] = torch.full_like(ps[0], 127, dtype=torch.uint8)
    optimizer.step()
    assert not (optimizer.state[ps[0]]["exp_avg"] == 127).all()


def test_what_the_kernels_are_not_made_for_takes_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: True)
    (p,) = made([(8, 16)])
    give([p], 0)
    assert skipping.twin([p]) is not None
    turned = torch.nn.Parameter(torch.zeros(16, 8, device=DEVICE).t())
    turned.grad = torch.zeros(8, 16, device=DEVICE)
    wide = torch.nn.Parameter(torch.zeros(8, 16, dtype=torch.float64, device=DEVICE))
    wide.grad = torch.zeros_like(wide)
    assert skipping.twin([turned]) is skipping.twin([wide]) is skipping.twin([p, turned]) is skipping.twin([]) is None
    monkeypatch.undo()
    assert DEVICE == "cuda" or skipping.twin([p]) is None


if triton is not None:

    @triton.jit
    def _codes(units, borders, out, COUNT: tl.constexpr, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, COUNT)
        tl.store(out + at, _code(tl.load(units + at), borders, SIGNED))


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_the_kernel_are_the_nearest(signed: bool) -> None:
    """Every border, every value of the book, and both neighbours of each in fp32."""
    books = torch.cat([quantise.book_tensor(signed, "cpu"), quantise.border_tensor(signed, "cpu"), torch.zeros(1)])
    near = [books.nextafter(torch.full_like(books, torch.inf)), books.nextafter(torch.full_like(books, -torch.inf))]
    powers = torch.tensor([10.0**-n for n in range(9)]).repeat(56)
    units = torch.cat([books, *near, powers]).clamp(-1.0 if signed else 0.0, 1.0)[:2048]
    units = torch.cat([units, units.new_zeros(2048 - len(units))]).to(DEVICE)
    found = torch.empty(2048, dtype=torch.int32, device=DEVICE)
    _codes[(1,)](units, quantise.border_tensor(signed, DEVICE), found, COUNT=2048, SIGNED=signed)
    wanted = torch.bucketize(units, quantise.border_tensor(signed, DEVICE))
    assert torch.equal(found.long(), wanted)
    assert torch.equal(quantise.nearest_codes(units, signed=signed), wanted)


_PROGRAM = """
from phalanx.optim import update_triton as kernels

kinds = {"table": "*i64", "shapes": "*i64", "tiles": "*i64", "ranges": "*i64", "seed": "*i64"}
tile = {"ALIGNED": True, "ROWS": kernels._ROWS, "WIDTH": kernels._WIDTH}
types = (tl.float32, tl.bfloat16)
cases = [(kernels._adamw, {"BITS": bits, "GRADIENT": gradient} | tile) for bits in (8, 16, 32) for gradient in types]
cases += [(kernels._lamb_moments, {"GRADIENT": tl.float32} | tile), (kernels._lamb_apply, tile)]
cases += [(kernels._lamb_squares, {"COUNT": 1024})]
for kernel, given in cases:
    for capability, made in compiled(kernel, kinds, given, num_warps=kernels._WARPS):
        ptx = made.asm["ptx"]
        assert made.metadata.shared <= 48 << 10, (kernel, capability)
        assert ".local" not in ptx, (kernel, capability)  # no array in memory of a thread's own
        assert kernel is kernels._lamb_squares or "ld.global.v4.b32" in ptx, (kernel, capability)  # four floats at once
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert compile_offline(_PROGRAM, tmp_path) == 18


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("make", [lambda ps: AdamW(ps, state_bits=8), lambda ps: AdamW(ps, state_bits=16), LAMB])
def test_no_synchronisation_after_the_first_step(make: Any) -> None:
    ps = made([(256, 512), (100, 300)])
    optimizer = make(ps)
    give(ps, 0)
    optimizer.step()
    optimizer.found_inf, optimizer.grad_scale = (torch.zeros((), device=DEVICE) for _ in range(2))
    grads: list[Tensor] = [torch.ones_like(p) for p in ps]
    for p, grad in zip(ps, grads, strict=True):
        p.grad = grad
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
