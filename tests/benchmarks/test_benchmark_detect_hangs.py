"""The benchmark of hangs works, and no innocent is named by it."""

from __future__ import annotations

import detect_hangs
import pytest
from support.hang_cases import LAYOUTS

from phalanx.core.layout import Layout


def test_generated_jobs_are_counted_by_who_was_named() -> None:
    rows = detect_hangs.generated(2, LAYOUTS[3:6])
    assert all(row["cases"] == 2 and row["an innocent"] == 0 for row in rows)
    assert sum(row["exact"] for row in rows) >= len(rows)


def test_a_verdict_is_timed() -> None:
    (row,) = detect_hangs.scale([Layout(pipeline=2, replicate=4, tensor=2)])
    assert row["ranks"] == 16 and row["right"]


@pytest.mark.slow
def test_real_processes_that_hang_are_judged() -> None:
    from support.hang_processes import run_cases

    rows = run_cases(quick=True)
    assert [row["right"] for row in rows] == [True, True], rows
