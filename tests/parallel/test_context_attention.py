"""Attention over sequences that are split over ranks, against attention over whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from fused_on_cpu import fused_on_cpu
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.kernels.attention import AttentionDropout, CausalKernel, Kernel, attention
from phalanx.kernels.attention_trial import Shape, find_fault
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import Attending, DropoutState
from phalanx.parallel.config import ContextMethod
from phalanx.parallel.context.blocks import Block, Partial, Piece, attend, attend_backward, tried, way_of
from phalanx.parallel.context.context_parallel import ContextSpread
from phalanx.parallel.process_groups import make_gloo

BATCH, HEADS, LENGTH, SIZE = 2, 4, 24, 8


@dataclass(frozen=True)
class Case:
    method: ContextMethod = "ring"
    ranks: int = 2
    kv_heads: int = 4
    window: int | None = None
    documents: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    size: int = SIZE
    kernel: Kernel | None = None


CASES = {
    "ring": Case(),
    "ring of 3, grouped": Case(ranks=3, kv_heads=2),
    "ring of 4 with documents": Case(ranks=4, documents=True),
    "ring with a window": Case(ranks=3, window=5),
    "ring of windows and documents": Case(ranks=4, window=7, documents=True, kv_heads=1),
    "ring with dropout": Case(ranks=2, dropout=0.3, kv_heads=2),
    "ring in float64": Case(ranks=3, window=4, documents=True, dtype=torch.float64),
    "ring in bf16": Case(ranks=2, documents=True, dtype=torch.bfloat16),
    "all-to-all": Case("all_to_all"),
    "all-to-all of 4 with documents": Case("all_to_all", ranks=4, documents=True),
    "all-to-all with a window, grouped": Case("all_to_all", kv_heads=2, window=5),
    "all-to-all with dropout": Case("all_to_all", dropout=0.3),
}


def config(case: Case) -> ModelConfig:
    attention = ["window"] if case.window else ["full"]
    return ModelConfig(
        layers=2, heads=HEADS, hidden=HEADS * case.size, vocab_size=8, max_sequence=LENGTH, attention=attention,
        window=case.window or 0,
    )  # fmt: skip


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, n, LENGTH, case.size) for n in (HEADS, case.kv_heads, case.kv_heads, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]


def documents(case: Case) -> Tensor | None:
    if not case.documents:
        return None
    ends = torch.tensor([[5, 13, 14], [1, 2, 20]])
    return (torch.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1).to(torch.int32)


def whole(case: Case) -> list[Tensor]:
    *qkv, grad = inputs(case)
    qkv = [x.requires_grad_() for x in qkv]
    state = DropoutState(1, 7, torch.tensor([3, 9]))
    dropped = None
    if case.dropout:
        rows = state.sample_index_B[:, None] * LENGTH + torch.arange(LENGTH)
        dropped = AttentionDropout(case.dropout, state.key("here"), rows)
    out = attention(*qkv, window=case.window, documents_BS=documents(case), dropout=dropped, backend="math")
    out.backward(grad)
    return [out.detach(), *(x.grad for x in qkv if x.grad is not None)]


def split(case: Case, groups: ThreadGroups) -> tuple[Tensor, list[Tensor]]:
    spread = ContextSpread(config(case), groups.group("context"), case.method, LENGTH)
    spread.kernel = None if case.kernel is None else CausalKernel(case.kernel, LENGTH)
    *qkv, grad = (x[:, :, spread.positions_S] for x in inputs(case))
    qkv = [x.clone().requires_grad_() for x in qkv]
    state = DropoutState(1, 7, torch.tensor([3, 9])) if case.dropout else None
    attend = spread.attend_with(documents(case), state)
    assert attend is not None
    out = attend(*qkv, Attending(case.window, "math", case.dropout, "here"))
    out.backward(grad)
    return spread.positions_S, [out.detach(), *(x.grad for x in qkv if x.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_whole_sequence(name: str) -> None:
    case = CASES[name]
    expected = whole(case)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[case.dtype]
    for positions, found in run_ranks(Layout(context=case.ranks), lambda groups: split(case, groups)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs[:, :, positions], rtol=tolerance, atol=tolerance)


ON_CUDA = {
    "zig-zag": Case(ranks=2, kv_heads=2),
    "runs of a window": Case(ranks=3, window=9, kv_heads=1),
    "documents": Case(ranks=2, documents=True),
    "windows and documents": Case(ranks=4, window=7, documents=True, kv_heads=2),
    "dropout": Case(ranks=2, dropout=0.3),
}


def flex_written_out(q, k, v, *, block_mask, scale, enable_gqa, return_aux):
    """FlexAttention as it is on a GPU: what no key is seen by is 0, with a log-sum-exp of -inf."""
    assert return_aux.lse and enable_gqa == (q.shape[1] != k.shape[1])
    batch, i, j = (torch.arange(n) for n in (q.shape[0], q.shape[2], k.shape[2]))
    seen = block_mask.mask_mod(batch[:, None, None], None, i[:, None], j).expand(len(batch), len(i), len(j))[:, None]
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ wide_k.mT * scale).masked_fill(~seen, -1e30)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp() * seen
    return weights @ wide_v, SimpleNamespace(lse=lse.masked_fill(~seen.any(-1).expand_as(lse), -torch.inf))


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "flex"])
@pytest.mark.parametrize("name", ON_CUDA)
def test_blocks_by_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, name: str) -> None:
    """By stand-ins on a CPU: every block that a fused kernel can do goes to it, and none keeps its scores."""
    monkeypatch.setattr("phalanx.kernels.attention._compiled_flex", lambda: flex_written_out)
    case = replace(ON_CUDA[name], size=16, kernel=kernel)
    expected = whole(case)
    with fused_on_cpu() as calls:
        for positions, found in run_ranks(Layout(context=case.ranks), lambda groups: split(case, groups)):
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs[:, :, positions], rtol=1e-4, atol=1e-4)
    is_fused = kernel != "flex" and not case.documents and not case.dropout
    assert bool(calls.counts) == is_fused
    if is_fused:
        assert calls.counts[kernel] == calls.counts[f"{kernel} backward"]


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "flex"])
def test_the_trial_of_a_ring(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """What is right passes; a wrong gradient is found, which the lengths of pieces may be the cause of."""
    monkeypatch.setattr("phalanx.kernels.attention._compiled_flex", lambda: flex_written_out)
    shape = Shape(2, 4, 2, 64, 16, torch.float32, past=64)
    with fused_on_cpu() as calls:
        assert find_fault(kernel, shape, torch.device("cpu"), tried(kernel, 64)) == ""
        calls.spoilt[kernel] = 1.3
        fault = find_fault(kernel, shape, torch.device("cpu"), tried(kernel, 64))
    assert ("gradient of queries" in fault) == (kernel != "flex")


def test_which_kernel_does_a_block() -> None:
    early, late, far = Piece(0, 64), Piece(64, 128), Piece(192, 256)
    documents = torch.zeros(1, 256, dtype=torch.int32)
    whole_block, causal = Block(late, early, None, None), Block(late, late, None, None)
    at_the_edge, of_documents = Block(far, late, 150, None), Block(late, early, None, documents)

    class OnCuda:
        device, dtype, shape = torch.device("cuda", 0), torch.bfloat16, (1, 2, 64, 64)

    class InFp32(OnCuda):
        dtype = torch.float32

    class OfSmallHeads(OnCuda):
        shape = (1, 2, 64, 8)

    for block, way in ((whole_block, "cudnn"), (causal, "cudnn"), (at_the_edge, "flex"), (of_documents, "flex")):
        assert way_of(OnCuda, block, None, "cudnn") == way
        assert way_of(OnCuda, block, AttentionDropout(0.1, 1, torch.zeros(1, 64)), "cudnn") == "products"
    assert way_of(OnCuda, causal, None, None) == "flash"
    assert way_of(InFp32, causal, None, None) == "flex"
    assert way_of(OfSmallHeads, causal, None, None) == "flash"
    assert way_of(OfSmallHeads, of_documents, None, None) == "products"
    assert Block(late, late, 64, None).is_causal
    assert not Block(late, late, 63, None).is_causal


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "flex"])
@pytest.mark.parametrize(("length", "kv_heads"), [(256, 8), (1024, 2), (192, 1)])
def test_blocks_on_a_gpu(kernel: Kernel, length: int, kv_heads: int) -> None:
    """Two pieces of a ring on one device; cuDNN may be found wrong, but then in words."""
    device = torch.device("cuda", torch.cuda.current_device())
    shape = Shape(2, 8, kv_heads, length, 64, torch.bfloat16, past=length)
    fault = find_fault(kernel, shape, device, tried(kernel, length))
    assert not fault or kernel == "cudnn", fault


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 100])
def test_blocks_of_documents_on_a_gpu(window: int | None) -> None:
    """Every pair of pieces by FlexAttention, against products."""
    device, piece = torch.device("cuda", torch.cuda.current_device()), 256
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(2, n, piece, 64) for n in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes)
    documents = (torch.arange(2 * piece, device=device) // 150).expand(2, -1).int()
    for mine, theirs in ((Piece(256, 512), Piece(0, 256)), (Piece(256, 512), Piece(256, 512))):
        block = Block(mine, theirs, window, documents)
        by_flex, wide = attend(q, k, v, block, 0.125, kernel="flex"), [x.float() for x in (q, k, v, grad)]
        by_products = attend(*wide[:3], block, 0.125, kernel="math")
        sees = by_products.lse > -1e29
        torch.testing.assert_close(by_flex.lse[sees], by_products.lse[sees], rtol=1e-2, atol=2e-2)
        final = Partial(by_products.out, by_products.lse.clamp(min=0.0))
        expected = attend_backward(wide[3], *wide[:3], final, block, 0.125, kernel="math")
        narrow = Partial(final.out.to(q.dtype), final.lse)
        found = attend_backward(grad, q, k, v, narrow, block, 0.125, kernel="flex")
        for a, b in zip(found, expected, strict=True):
            assert (a.float() - b).norm() <= 0.03 * b.norm() + 1e-3


@pytest.mark.parametrize("name", ["ring of 4 with documents", "ring with a window"])
def test_a_ring_over_gloo(name: str) -> None:
    """Where messages are told apart by tags, and many go at a time."""
    case = CASES[name]
    expected = whole(case)
    layout = Layout(context=case.ranks)
    for positions, found in run_ranks(layout, lambda groups: split(case, groups), make_gloo):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs[:, :, positions], rtol=1e-5, atol=1e-5)


def test_windows_send_to_neighbours_only() -> None:
    def sent(case: Case) -> int:
        def body(groups: ThreadGroups) -> int:
            split(case, groups)
            return groups.group("context").traffic.calls.get("send", 0)

        return sum(run_ranks(Layout(context=4), body))

    # Forward and backward send keys, the backward sends gradients home: three messages for each pair of ranks.
    assert sent(Case(ranks=4, window=5)) == 3 * 3
    assert sent(Case(ranks=4)) == 3 * 4 * 3


def test_a_group_of_one_changes_nothing() -> None:
    def body(groups: ThreadGroups) -> None:
        spread = ContextSpread(config(Case()), groups.group("context"), "ring", LENGTH)
        x = torch.arange(2 * LENGTH).view(2, LENGTH)
        assert spread.cut(x) is x and spread.attend_with(None, None) is None

    run_ranks(1, body)


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    case = replace(CASES["all-to-all"], kv_heads=1)
    with pytest.raises(UserError, match=r"parallel\.context = 2.*1 heads.*ring"):
        run_ranks(Layout(context=2), lambda groups: split(case, groups))


def test_cut_takes_this_rank_s_positions() -> None:
    def body(groups: ThreadGroups) -> Tensor:
        spread = ContextSpread(config(Case()), groups.group("context"), "ring", LENGTH)
        return spread.cut(torch.arange(LENGTH)[None])

    first, second = run_ranks(Layout(context=2), body)
    quarter = LENGTH // 4
    assert first[0].tolist() == [*range(quarter), *range(3 * quarter, LENGTH)]
    assert second[0].tolist() == list(range(quarter, 3 * quarter))
