"""A run held against its prediction: what is said, what is kept, and which part is named."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from train_helpers import configured

from phalanx.train import session
from phalanx.train.predicted_cost import BETWEEN, LOADER, OPTIMIZER, PASSES, WAITING, Expected
from phalanx.train.reports.prediction_check import (
    FILE,
    Laps,
    Measured,
    comparable_parts,
    comparison,
    difference_line,
    expected_line,
    most_off,
)

EXPECTED = Expected(
    source="phalanx plan, cluster this",
    step_s=1.0,
    parts={PASSES: 0.7, WAITING: 0.2, OPTIMIZER: 0.1, LOADER: 0.0},
    memory_bytes=2**30,
    layout="1",
    micro_batch=2,
    details={"cluster": "this"},
)


def _measured(step_s: float, parts: Mapping[str, float], memory_bytes: float = 2**30) -> Measured:
    return Measured(6, 15, step_s, parts, memory_bytes)


def test_a_small_difference_is_one_line() -> None:
    measured = _measured(1.05, {PASSES: 0.75, WAITING: 0.2, OPTIMIZER: 0.1, LOADER: 0.0})
    assert difference_line(EXPECTED, measured) == (
        "measured over steps 6 to 15: step 1.05 s, 5.0 % more than expected; memory 1.00 GiB, 0.0 % more than expected"
    )


def test_the_line_at_the_start_says_where_steps_lie() -> None:
    sure = replace(EXPECTED, interval_s=(0.9, 1.125))
    assert expected_line(sure, 1024, 20).startswith(
        "expected: step 1.00 s (900.0 ms to 1.12 s in 8 of 10 cases), 1,024 tokens/s, "
    )
    assert expected_line(EXPECTED, 1024, 20).startswith("expected: step 1.00 s, 1,024 tokens/s, ")


@pytest.mark.parametrize(
    ("step_s", "parts", "named"),
    [
        (1.3, {PASSES: 0.72, WAITING: 0.2, OPTIMIZER: 0.38, LOADER: 0.0}, "optimizer, 380.0 ms where 100.0 ms was"),
        (
            1.3,
            {PASSES: 0.7, WAITING: 0.2, OPTIMIZER: 0.1, LOADER: 0.3},
            "waiting for the loader, 300.0 ms where 0.0 ms",
        ),
        (1.3, {PASSES: 0.7, WAITING: 0.2, OPTIMIZER: 0.1, BETWEEN: 0.3}, "figures and signals between steps, 300.0 ms"),
        (0.7, {PASSES: 0.65, WAITING: 0.0, OPTIMIZER: 0.1, LOADER: 0.0}, "waiting for other ranks, 0.0 ms where 200.0"),
        (3.0, {PASSES: 2.7, WAITING: 0.2, OPTIMIZER: 0.1}, "forward and backward passes, 2.70 s where 700.0 ms was"),
    ],
)
def test_a_large_difference_names_the_part_that_is_off(step_s: float, parts: dict[str, float], named: str) -> None:
    line = difference_line(EXPECTED, _measured(step_s, parts))
    assert f"\n  most of the difference: {named}" in line


def test_parts_of_a_step_on_a_gpu_are_what_its_queue_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By events, which are looked at when all steps are done: marking makes nothing wait."""
    queue = {"at_s": 0.0, "waits": 0.0}

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at_s = 0.0

        def record(self) -> None:
            self.at_s = queue["at_s"]

        def elapsed_time(self, later: Event) -> float:
            assert queue["waits"], "an event that may not have come yet"
            return 1e3 * (later.at_s - self.at_s)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: queue.update(waits=1.0))
    laps = Laps(torch.device("cuda", 0), lambda: 10**9)
    for factor in (1.0, 2.0, 3.0):
        laps.begin_step()
        for part, seconds in ((LOADER, 0.1), (PASSES, 0.6), (OPTIMIZER, 0.2), (BETWEEN, 0.1)):
            queue["at_s"] += factor * seconds
            laps.end(part)
    assert not queue["waits"]
    step_s, parts = laps.medians()
    assert step_s == pytest.approx(2.0)
    assert parts == pytest.approx({LOADER: 0.2, PASSES: 1.2, OPTIMIZER: 0.4, BETWEEN: 0.2})


def test_a_gpu_cannot_tell_waiting_from_passes() -> None:
    measured = _measured(1.5, {PASSES: 1.4, OPTIMIZER: 0.1, LOADER: 0.0})
    assert comparable_parts(EXPECTED, measured) == {PASSES: pytest.approx(0.9), OPTIMIZER: 0.1, LOADER: 0.0}
    assert most_off(EXPECTED, measured) == PASSES
    assert "1.40 s where 900.0 ms was expected" in difference_line(EXPECTED, measured)


def test_what_is_kept_has_units_in_its_keys() -> None:
    kept = comparison(EXPECTED, _measured(1.3, {PASSES: 1.0, WAITING: 0.2, OPTIMIZER: 0.1}, 2**31), "")
    assert kept["expected"]["parts"]["passes_s"] == 0.7
    assert kept["measured"]["parts"]["passes_s"] == 1.0
    assert kept["step_difference_ratio"] == pytest.approx(0.3)
    assert kept["memory_difference_ratio"] == pytest.approx(1.0)
    assert kept["most_off"] == "passes"
    on_cpu = replace(_measured(1.3, {PASSES: 1.0}), with_libraries=True)
    assert "memory_difference_ratio" not in comparison(EXPECTED, on_cpu, "")
    assert "libraries included" in difference_line(EXPECTED, on_cpu)


def test_laps_take_the_median_and_tell_waiting_apart() -> None:
    now_s, waited_ns = [0.0], [0]
    laps = Laps(torch.device("cpu"), lambda: waited_ns[0], lambda: now_s[0])
    for passes_s in (1.0, 2.0, 30.0):  # a hiccup in the last one
        laps.begin_step()
        for name, seconds in ((LOADER, 0.1), (PASSES, passes_s), (OPTIMIZER, 0.5)):
            now_s[0] += seconds
            waited_ns[0] += 250_000_000 * (name == PASSES)
            laps.end(name)
        now_s[0] += 100.0  # an evaluation, which is of no step
    step_s, parts = laps.medians()
    assert laps.count == 3
    assert step_s == pytest.approx(2.6)
    assert parts == pytest.approx({LOADER: 0.1, PASSES: 1.75, WAITING: 0.25, OPTIMIZER: 0.5})


def _session(folder: Path, expected: Expected | None, changes: Mapping[str, Any]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    session.run_session(configured(folder, changes), Path("tiny.toml"), console, expected=expected)
    return out.getvalue()


def _kept(folder: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / "run" / FILE).read_text())
    return kept


def test_a_run_says_what_was_expected_and_what_came(tmp_path: Path) -> None:
    expected = replace(EXPECTED, step_s=1e-6, parts={PASSES: 1e-6})
    printed = _session(tmp_path, expected, {"train.steps": 20})
    assert re.search(
        r"^expected: step 0\.0 ms, .* 20 steps in .*\(phalanx plan, cluster this\)$", printed, re.MULTILINE
    )
    found = re.search(
        r"^measured over steps 6 to 15: step .* times what was expected.*\n  most of", printed, re.MULTILINE
    )
    assert found is not None
    kept = _kept(tmp_path)
    measured = kept["measured"]
    assert (measured["first"], measured["last"]) == (6, 15)
    assert set(measured["parts"]) == {"loader_s", "passes_s", "waiting_s", "optimizer_s", "between_steps_s"}
    assert 0 < max(measured["parts"].values()) <= measured["step_s"] < 60
    assert measured["parts"]["waiting_s"] == 0
    assert kept["prediction"] == {"cluster": "this"}


def test_a_short_run_is_compared_at_its_end_or_not_at_all(tmp_path: Path) -> None:
    assert "measured over" not in _session(tmp_path, EXPECTED, {"train.steps": 7})
    assert _kept(tmp_path)["measured"] is None
    longer = _session(tmp_path, EXPECTED, {"train.steps": 16, "run.resume": "changed"})  # goes on after step 7
    assert "measured over steps 13 to 16: " in longer
    assert _kept(tmp_path)["measured"]["last"] == 16


def test_a_prediction_of_something_else_says_so(tmp_path: Path) -> None:
    printed = _session(tmp_path, replace(EXPECTED, layout="tp2", micro_batch=64), {"train.steps": 6})
    assert "it is for layout tp2 instead of 1 and micro-batch 64 instead of " in printed
    assert _kept(tmp_path)["misfit"].startswith("layout tp2")


def test_without_a_prediction_nothing_is_said_or_kept(tmp_path: Path) -> None:
    printed = _session(tmp_path, None, {"train.steps": 16})
    assert "expected" not in printed and "measured over" not in printed
    assert not (tmp_path / "run" / FILE).exists()
