"""The Triton kernels of the loss head against plain torch: on a GPU where there is one, else under the interpreter."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from compiled_offline import compile_offline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels import loss as loss_kernels
from phalanx.kernels.linear import add_product
from phalanx.kernels.loss import (
    LogitTerms,
    chunk_tokens,
    linear_cross_entropy,
    row_gradient,
    row_losses,
    row_statistics,
)

# numpy, on which the interpreter runs, speaks of exp(-1e30) and log(0), which are meant
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("phalanx.kernels.cross_entropy_triton")


@pytest.fixture
def fused(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels are used, on a CPU too."""
    monkeypatch.setattr(loss_kernels, "twin", lambda like: kernels)


def rows(C: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(C, V, generator=generator).mul(4.0).to(dtype)
    targets, weights = torch.randint(V, (C,), generator=generator), torch.rand(C, generator=generator)
    return logits.to(DEVICE), targets.to(DEVICE), weights.to(DEVICE)


def expected(logits: Tensor, targets: Tensor, weights: Tensor, terms: LogitTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp and gradient by autograd in fp64; zero gradients for padding."""
    wide = logits.double().requires_grad_()
    words = wide[:, : terms.words]
    if terms.softcap:
        words = terms.softcap * torch.tanh(words / terms.softcap)
    loss, lse = F.cross_entropy(words, targets, reduction="none"), words.logsumexp(1)
    total = ((loss + terms.z_loss * lse.square()) * weights).sum()
    return loss.detach(), lse.detach(), torch.autograd.grad(total, wide)[0]


TERMS = st.builds(LogitTerms, st.just(0), st.sampled_from([0.0, 2.0, 30.0]), st.sampled_from([0.0, 1e-2]))
DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Of a gradient: half a unit of bf16's last place on a GPU, which rounds; the interpreter cuts off."""
    unit = 2.0**-8 if DEVICE == "cuda" else 2.0**-7
    return {"rtol": (unit if dtype == torch.bfloat16 else 0.0) + 1e-5, "atol": 1e-6}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(C=st.integers(1, 4), words=st.integers(1, 70), padding=st.sampled_from([0, 1, 30]), given=TERMS)
def test_losses_and_gradients_of_whole_rows(
    dtype: torch.dtype, C: int, words: int, padding: int, given: LogitTerms
) -> None:
    terms = LogitTerms(words, given.softcap, given.z_loss)
    logits, targets, weights = rows(C, words + padding, dtype, seed=C * 100 + words)
    targets %= words
    logits[:, words:] = 1e4  # padding may hold anything
    want_loss, want_lse, want = expected(logits, targets, weights, terms)
    loss, lse, grad = row_losses(logits, targets, weights, terms, needs_gradient=True)
    assert grad is logits and lse is not None
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(grad.double(), want, **tolerance(dtype))
    assert not grad[:, words:].any()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(C=st.integers(1, 3), words=st.integers(1, 60), ranks=st.integers(2, 4), given=TERMS)
def test_columns_that_are_spread_over_ranks(
    dtype: torch.dtype, C: int, words: int, ranks: int, given: LogitTerms
) -> None:
    """Some rank may have no word at all, and only one has a row's target."""
    width = -(-words // ranks) + 1
    logits, targets, weights = rows(C, width * ranks, dtype, seed=C * 100 + words)
    targets %= words
    whole = LogitTerms(words, given.softcap, given.z_loss)
    want_loss, want_lse, want = expected(logits, targets, weights, whole)
    own = [LogitTerms(min(max(words - k * width, 0), width), given.softcap, given.z_loss) for k in range(ranks)]
    local = [targets - k * width for k in range(ranks)]
    local = [torch.where((column < 0) | (column >= width), -1, column) for column in local]
    parts = [logits[:, k * width : (k + 1) * width].contiguous() for k in range(ranks)]
    seen = [row_statistics(*args) for args in zip(parts, local, own, strict=True)]
    lse = torch.stack([one.lse_C for one in seen]).logsumexp(0)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)
    loss = lse - torch.stack([one.target_C for one in seen]).sum(0)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=2e-5)
    grads = [
        row_gradient(one, lse, column, weights, terms) for one, column, terms in zip(seen, local, own, strict=True)
    ]
    torch.testing.assert_close(torch.cat(grads, 1).double(), want, **tolerance(dtype))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_many_blocks_with_extreme_logits(dtype: torch.dtype) -> None:
    """The greatest logit comes first, last, or in the middle; a row may have -inf, and logits that overflow exp."""
    V = 9000
    logits, targets, weights = rows(5, V, dtype)
    logits[0, 0], logits[1, V - 1], logits[2, 5000] = 300.0, 300.0, 300.0
    logits[3, : V - 2] = -torch.inf
    logits[4] = -1e30
    targets[3] = V - 1
    terms = LogitTerms(V)
    want_loss, _, want = expected(logits, targets, weights, terms)
    loss, lse, grad = row_losses(logits, targets, weights, terms, needs_gradient=True)
    assert lse is not None and grad is not None
    torch.testing.assert_close(loss[:4].double(), want_loss[:4], rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(grad[:4].double(), want[:4], **tolerance(dtype))
    assert torch.isfinite(grad[4]).all() and torch.isfinite(lse[4])


@pytest.mark.usefixtures("fused")
def test_without_a_gradient_the_logits_stay_as_they_are() -> None:
    logits, targets, weights = rows(3, 50, torch.bfloat16)
    before = logits.clone()
    loss, _, grad = row_losses(logits, targets, weights, LogitTerms(50), needs_gradient=False)
    assert grad is None and torch.equal(logits, before)
    torch.testing.assert_close(loss, F.cross_entropy(before.float(), targets, reduction="none"))


@pytest.mark.usefixtures("fused")
def test_a_target_that_is_no_word_is_loud() -> None:
    logits, targets, weights = rows(3, 50, torch.float32)
    targets[1] = 50
    loss, _, _ = row_losses(logits, targets, weights, LogitTerms(50), needs_gradient=True)
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_the_head_is_the_same_by_either(
    dtype: torch.dtype, chunk: int, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 16, generator=generator).to(dtype).to(DEVICE).requires_grad_()
    weight = torch.randn(70, 16, generator=generator).mul(0.3).to(DEVICE).requires_grad_()
    targets = torch.randint(60, (10,), generator=generator).to(DEVICE)
    weights = torch.rand(10, generator=generator).to(DEVICE)
    found = []
    for module in (kernels, None):
        monkeypatch.setattr(loss_kernels, "twin", lambda like, module=module: module)
        sums = linear_cross_entropy(x, weight, targets, weights, softcap=5.0, z_loss=1e-2, vocabulary=60, chunk=chunk)
        found.append((*sums, *torch.autograd.grad(sum(sums) * 0.37, (x, weight))))
    close = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, **close)


def test_chunks_are_as_large_as_memory_allows_on_an_accelerator_and_as_caches_on_a_cpu() -> None:
    assert chunk_tokens(32_768, 50_304, 768, "cpu") == 256
    assert chunk_tokens(32_768, 50_304, 768, "cuda") == 2**28 // 50_304
    assert chunk_tokens(16_384, 128_256, 4096, "cuda") == 4096  # as much as the gradient of the weight, in 16 bit half
    assert chunk_tokens(100, 50_304, 768, "cuda") == 100
    assert chunk_tokens(0, 50_304, 768, "cuda") == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_products_is_fp32_and_keeps_its_memory(dtype: torch.dtype) -> None:
    left, right = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((20, 30), (30, 8)))
    first = add_product(None, left, right)
    assert first.dtype == torch.float32
    before = first.data_ptr()
    second = add_product(first, left, right)
    assert second.data_ptr() == before
    torch.testing.assert_close(second, 2 * left.float() @ right.float(), rtol=2e-2, atol=5e-2)


_PROGRAM = """
from phalanx.kernels import cross_entropy_triton as kernels

kinds = {"targets": "*i64", "stride": "i32", "words": "i32", "width": "i32", "softcap": "fp32", "z_loss": "fp32"}
fixed = {"BLOCK": 4096, "CAPPED": True, "GRADIENT": True}
for kernel in (kernels._row_losses, kernels._row_statistics, kernels._row_gradient):
    for dtype in ("bf16", "fp32"):
        for capability, made in compiled(kernel, kinds | {"logits": "*" + dtype}, fixed, num_warps=8):
            assert made.metadata.shared <= 48 << 10, (kernel, capability)
            assert ".local" not in made.asm["ptx"], (kernel, capability)  # no array in memory of a thread's own
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert compile_offline(_PROGRAM, tmp_path) == 12


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
class TestOnAGpu:
    def case(self, tokens: int = 8192, words: int = 50_257, rows: int = 50_304, width: int = 256) -> tuple[Tensor, ...]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        x = torch.randn(tokens, width, device=DEVICE, generator=generator).bfloat16().requires_grad_()
        weight = torch.randn(rows, width, device=DEVICE, generator=generator).mul(0.05).requires_grad_()
        return x, weight, torch.randint(words, (tokens,), device=DEVICE, generator=generator)

    def test_many_chunks_equal_one(self) -> None:
        x, weight, targets = self.case()
        found = []
        for chunk in (8192, 1000):
            loss, z = linear_cross_entropy(x, weight, targets, vocabulary=50_257, z_loss=1e-4, chunk=chunk)
            found.append((loss, *torch.autograd.grad(loss + z, (x, weight))))
        for one, many in zip(*found, strict=True):
            torch.testing.assert_close(many, one, rtol=2e-3, atol=2e-3)

    def test_no_fp32_copy_of_the_logits(self) -> None:
        """The most memory is that of bf16 logits of one chunk, both gradients, and the weight in 16 bit."""
        x, weight, targets = self.case()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = linear_cross_entropy(x, weight, targets, vocabulary=50_257, chunk=8192)
        held = 8192 * 50_304 * 2 + weight.numel() * (4 + 2) + x.numel() * 2
        assert torch.cuda.max_memory_allocated() - before < held * 1.05
        loss.backward()

    def test_a_kept_graph_cannot_be_differentiated_again(self) -> None:
        x, weight, targets = self.case(tokens=256)
        loss, _ = linear_cross_entropy(x, weight, targets, chunk=256)
        loss.backward(retain_graph=True)
        with pytest.raises(UserError, match="already"):
            loss.backward()

    def test_no_synchronisation(self) -> None:
        x, weight, targets = self.case(tokens=1024)
        weights = torch.rand(1024, device=DEVICE)
        linear_cross_entropy(x, weight, targets, weights, z_loss=1e-4)[0].detach()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sums = linear_cross_entropy(x, weight, targets, weights, z_loss=1e-4, softcap=30.0)
            (sums[0] + sums[1]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_on_a_cpu_the_reference_runs() -> None:
    assert loss_kernels.twin(torch.zeros(1)) is None and loss_kernels.row_losses is row_losses
