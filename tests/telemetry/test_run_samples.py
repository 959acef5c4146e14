from __future__ import annotations

from pathlib import Path

from phalanx.telemetry.run_samples import NAME, keep_sample, keep_why_none, read_samples, read_why_none


def test_samples_come_by_step_and_the_newest_of_a_step_counts(tmp_path: Path) -> None:
    for step, text in ((10, "a"), (20, "b"), (30, "c\nd"), (20, "again")):
        keep_sample(tmp_path, step, "p", text)
    assert [(one.step, one.text) for one in read_samples(tmp_path)] == [(10, "a"), (20, "again"), (30, "c\nd")]


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    keep_sample(tmp_path, 1, "p", "text")
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"step": "x", "prompt": 1, "text": 2}\n[]\nnot json\n{"step": 3, "prom')
    assert [one.step for one in read_samples(tmp_path)] == [1]
    assert read_samples(tmp_path / "nowhere") == []


def test_why_a_start_makes_none_is_known_until_one_does(tmp_path: Path) -> None:
    assert read_why_none(tmp_path) == ""
    keep_why_none(tmp_path, "no rank holds the whole model")
    assert read_why_none(tmp_path) == "no rank holds the whole model" and read_samples(tmp_path) == []
    keep_sample(tmp_path, 1, "p", "text")
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'[]\nnot json\n{"why": "torn')
    assert read_why_none(tmp_path) == "" and len(read_samples(tmp_path)) == 1
