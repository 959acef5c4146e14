"""How rows are cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.tensor.chunked import falling_chunks, rising_chunks


@given(rows=st.integers(1, 300), count=st.integers(1, 40))
def test_chunks_cover_all_rows_once_and_none_is_empty(rows: int, count: int) -> None:
    for chunks in (falling_chunks(rows, count), rising_chunks(rows, count)):
        assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
        assert all(chunk.stop > chunk.start for chunk in chunks) and len(chunks) == min(rows, count)


def test_what_cannot_be_hidden_is_small() -> None:
    assert [c.stop - c.start for c in falling_chunks(100, 4)] == [40, 30, 20, 10]
    assert [c.stop - c.start for c in rising_chunks(100, 4)] == [10, 20, 30, 40]
