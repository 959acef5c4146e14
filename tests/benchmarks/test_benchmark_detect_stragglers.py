"""The benchmark of stragglers, on few jobs."""

from __future__ import annotations

import detect_stragglers
import pytest


def test_of_jobs_that_were_not_fitted_to_nobody_innocent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = detect_stragglers.sweep(12, 100_000)
    detect_stragglers.show_sweep(found)
    assert sum(sum(row.values()) for row in found["table"].values()) == 12
    assert all(one["right"] for one in found["names"])
    assert "| what is wrong | jobs |" in capsys.readouterr().out


def test_a_run_of_many_ranks_is_judged_at_once_and_followed() -> None:
    figures = detect_stragglers.cost(32, 6)
    assert figures["named"] == [9] and figures["ranks"] == 32
    assert figures["kept_bytes_per_step"] == 32 * 32
