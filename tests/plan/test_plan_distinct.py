"""Rows that are equal are found, however large their numbers are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.types import distinct


@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 10**6, 10**12])] * 4), max_size=30))
def test_every_row_is_one_of_the_different_ones(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    first, which = distinct(*table.T)
    assert np.array_equal(table[first][which], table)
    assert len(first) == len(set(rows))
