"""Merged files of sums: fewer, with the same answers, also for who reads while they are merged."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from phalanx.telemetry import part_merging
from phalanx.telemetry.part_merging import merge_small_parts
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import Part, parts, sums, write_part
from tests.telemetry.trace_runs import four_ranks, table


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    """One host with a part for each of nine steps."""
    folder = tmp_path / "telemetry"
    for step in range(9):
        rows = table({**row, "host": "h"} for row in four_ranks(9) if row["step"] == step)
        phases, steps = sums(rows)
        for name, part in (("phases", phases), ("steps", steps)):
            write_part(folder, name, "h", part, 0, 100 + step)
    return folder


def answers(telemetry: Path) -> list[object]:
    trace = Trace.open(telemetry)
    return [rounded(found) for found in (trace.rank_averages(), trace.phase_times(), trace.step_breakdown(3, 5))]


def rounded(found: pa.Table) -> list[object]:
    """DuckDB adds in an order of its own, which the last bit shows."""
    rows = found.to_pylist()
    return [{key: float(f"{x:.12g}") if isinstance(x, float) else x for key, x in row.items()} for row in rows]


def test_files_become_one_and_answers_stay(telemetry: Path) -> None:
    before = answers(telemetry)
    assert merge_small_parts(telemetry, "h") == 18
    assert [len(parts(telemetry, name, "h")) for name in ("steps", "phases")] == [1, 1]
    assert answers(telemetry) == before


def test_what_was_merged_is_left_out_and_removed_the_next_time(telemetry: Path) -> None:
    merge_small_parts(telemetry, "h")
    (merged,) = parts(telemetry, "steps", "h")
    assert (merged.number, merged.last_number, merged.first_step, merged.last_step) == (100, 108, 0, 8)
    assert len(list((telemetry / "steps/h").glob("*.parquet"))) == 10  # who began to read them can go on
    assert merge_small_parts(telemetry, "h") == 0
    assert len(list((telemetry / "steps/h").glob("*.parquet"))) == 1


def test_merged_ones_are_merged_with_later_ones(telemetry: Path) -> None:
    before = answers(telemetry)
    merge_small_parts(telemetry, "h")
    (merged,) = parts(telemetry, "steps", "h")
    for name in ("steps", "phases"):
        for step, number in ((9, 120), (10, 130)):
            rows = table({**row, "host": "h", "step": step} for row in four_ranks(1))
            write_part(telemetry, name, "h", dict(zip(("phases", "steps"), sums(rows), strict=True))[name], 0, number)
    assert merge_small_parts(telemetry, "h") == 6
    (one,) = parts(telemetry, "steps", "h")
    assert (one.number, one.last_number, one.last_step) == (100, 130, 10) and one.replaces(merged)
    assert rounded(Trace.open(telemetry).rank_averages(0, 8)) == before[0]


def test_attempts_and_large_files_stay_apart(telemetry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = sums(table({**row, "host": "h", "attempt": 1} for row in four_ranks(2)))
    write_part(telemetry, "steps", "h", steps, 1, 50)
    merge_small_parts(telemetry, "h")
    assert {part.attempt for part in parts(telemetry, "steps", "h")} == {0, 1}
    monkeypatch.setattr(part_merging, "SMALL_BYTES", 10)
    assert merge_small_parts(telemetry, "h", least=1) == 0


def test_a_damaged_part_stays_and_hides_nothing(telemetry: Path) -> None:
    victim = sorted((telemetry / "steps/h").glob("*.parquet"))[4]
    victim.write_bytes(victim.read_bytes()[:200])
    merge_small_parts(telemetry, "h")
    assert len(parts(telemetry, "steps", "h")) == 9


def test_a_number_that_came_twice_with_other_steps_is_not_hidden() -> None:
    merged = Part.of(Path("h/a0-s0-s8-t0-t9-r0-r3-100-108.parquet"))
    later = Part.of(Path("h/a0-s9-s9-t0-t9-r0-r3-105.parquet"))
    within = Part.of(Path("h/a0-s4-s4-t0-t9-r0-r3-104.parquet"))
    assert merged and later and within
    assert not merged.replaces(later) and merged.replaces(within) and not merged.replaces(merged)
