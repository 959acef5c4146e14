"""Chunks: how rows are cut, and that every function gives what the plain one does, by messages and by collectives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.parallel.process_groups import make_gloo
from phalanx.parallel.tensor.overlap import ChunkedOverlap, Overlap, falling_chunks, rising_chunks


@given(rows=st.integers(1, 300), count=st.integers(1, 40))
def test_chunks_cover_all_rows_once_and_none_is_empty(rows: int, count: int) -> None:
    for chunks in (falling_chunks(rows, count), rising_chunks(rows, count)):
        assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
        assert all(chunk.stop > chunk.start for chunk in chunks) and len(chunks) == min(rows, count)


def test_what_cannot_be_hidden_is_small() -> None:
    assert [c.stop - c.start for c in falling_chunks(100, 4)] == [40, 30, 20, 10]
    assert [c.stop - c.start for c in rising_chunks(100, 4)] == [10, 20, 30, 40]


def everything(overlap: Overlap, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """What each function of a back end gives; inputs depend on the rank."""
    generator = torch.Generator().manual_seed(overlap.group.index)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    matrices, bias, x = [random(width, 16).t() for width in (24, 40)], random(24), random(rows, 16)
    later = overlap.gather(x)
    gathered, products = overlap.gather_products(x, matrices, [bias, None])
    inputs = [random(rows * overlap.group.size, width) for width in (24, 40)]
    backward = [matrix.t() for matrix in matrices]
    scattered = [overlap.products_scatter(inputs[:1], backward[:1]), overlap.products_scatter(inputs, backward)]
    return [later.wait(), gathered, *products, *(pending.wait() for pending in reversed(scattered))]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize(("size", "rows", "chunks"), [(2, 7, 3), (3, 5, 8), (4, 1, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_chunked_is_plain_in_another_order(
    messages: bool, size: int, rows: int, chunks: int, dtype: torch.dtype, tolerance: float
) -> None:
    def body(groups: ThreadGroups) -> tuple[list[Tensor], list[Tensor]]:
        group = groups.group("tensor")
        chunked = everything(ChunkedOverlap(group, chunks, messages=messages), rows, dtype)
        return chunked, everything(Overlap(group), rows, dtype)

    for chunked, plain in run_ranks(Layout(tensor=size), body, make_gloo if messages else None):
        for got, expected in zip(chunked, plain, strict=True):
            assert got.dtype == expected.dtype == dtype
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
