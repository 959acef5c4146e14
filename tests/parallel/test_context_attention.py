"""Attention over sequences that are split over ranks, against attention over whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.kernels.attention import AttentionDropout, attention
from phalanx.model.config import ModelConfig
from phalanx.model.context import Attending, DropoutState
from phalanx.parallel.config import ContextMethod
from phalanx.parallel.context.spread import ContextSpread

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
        layers=2, heads=HEADS, hidden=HEADS * SIZE, vocab_size=8, max_sequence=LENGTH, attention=attention,
        window=case.window or 0,
    )  # fmt: skip


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, n, LENGTH, SIZE) for n in (HEADS, case.kv_heads, case.kv_heads, HEADS)]
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


@pytest.mark.parametrize("name", ["ring", "ring of 4 with documents", "ring with a window"])
def test_a_ring_needs_no_two_messages_at_a_time(name: str) -> None:
    """NCCL does what is started in a group in that order: ranks that all sent first, or received, would hang."""
    case = CASES[name]
    expected = whole(case)
    layout = Layout(context=case.ranks)
    for positions, found in run_ranks(layout, lambda groups: split(case, groups), in_order=True):
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
