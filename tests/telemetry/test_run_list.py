"""Runs as a table: read from their tails, whatever else lies there; what people keep of them; other people's runs."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_list import (
    ALL_DONE,
    diff_runs,
    keep_note,
    keep_tags,
    list_runs,
    note_end,
    read_run,
    read_tail,
)
from phalanx.telemetry.run_status import run_status

CONFIG: dict[str, Any] = {
    "run": {"folder": "runs/one"},
    "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
    "optim": {"batch_warmup": {"start": 0}},
    "train": {"steps": 10, "tokens": 0, "global_batch": 8},
}


def write_run(path: Path, lines: list[bytes], config: dict[str, Any] | None = CONFIG, age_s: float = 60) -> Path:
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_bytes(b"".join(lines))
    os.utime(path / "metrics.jsonl", (time.time() - age_s,) * 2)
    return path


def steps(last: int, first: int = 1, **values: Any) -> list[bytes]:
    return [
        metrics_line("step", n, {"loss": 5 - n / 10, "tokens": n * 512, "tokens_per_s": 1000.0, **values})
        for n in range(first, last + 1)
    ]


def checkpoint(step: int) -> bytes:
    return metrics_line("checkpoint", step, {"checkpoint/name": f"step-{step:08d}"})


def test_states_figures_and_why(tmp_path: Path) -> None:
    evaluation = metrics_line("evaluation", 10, {"validation_loss": 4.5})
    write_run(tmp_path / "done", [*steps(10), evaluation], age_s=10)
    write_run(tmp_path / "saved", [*steps(4), checkpoint(4)], age_s=20)
    write_run(tmp_path / "group" / "broke", [*steps(3), checkpoint(3), *steps(5, 4)], age_s=30)
    write_run(tmp_path / "unsaved", steps(5), age_s=40)
    write_run(tmp_path / "nan", [*steps(3), metrics_line("step", 4, {"loss": math.nan})], age_s=50)
    write_run(tmp_path / "empty", [], age_s=60)
    refused = write_run(tmp_path / "memory", [], age_s=70)
    (refused / "out_of_memory.json").write_text('{"layout": "2", "micro_batch": 4, "recompute": "none"}')
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("none")
    rows = list_runs(tmp_path)
    assert [(row.name, row.state, row.step, row.why) for row in rows] == [
        ("done", "finished", 10, ""),
        ("saved", "stopped", 4, "ended with a checkpoint of its last step"),
        ("group/broke", "died", 5, "broke off 2 steps after its checkpoint"),
        ("unsaved", "died", 5, "broke off; no checkpoint is named in its last lines"),
        ("nan", "failed", 4, "the loss was nan at step 4"),
        ("empty", "no step yet", None, ""),
        ("memory", "failed", None, "no memory for a micro-batch of 4 on layout 2"),
    ]
    assert (rows[0].total_steps, rows[0].tokens, rows[0].loss, rows[0].validation_loss) == (10, 5120, 4.0, 4.5)
    assert rows[0].tokens_per_s == 1000 and 9 < time.time() - rows[0].written < 600
    assert rows[4].to_json()["loss"] is None and json.dumps([row.to_json() for row in rows], allow_nan=False)
    assert [row.name for row in list_runs(tmp_path / "done")] == ["done"]


def test_sorting_puts_what_is_not_known_last(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps(2))
    write_run(tmp_path / "b", [*steps(6), metrics_line("evaluation", 6, {"validation_loss": 3.0})])
    write_run(tmp_path / "c", [metrics_line("step", 1, {"loss": math.nan})])
    assert [row.name for row in list_runs(tmp_path, sort="loss")] == ["b", "a", "c"]
    assert [row.name for row in list_runs(tmp_path, sort="validation_loss")] == ["b", "a", "c"]
    assert [row.name for row in list_runs(tmp_path, sort="step")] == ["b", "a", "c"]
    assert [row.name for row in list_runs(tmp_path, sort="name")] == ["a", "b", "c"]


def test_a_run_whose_lock_is_held_is_running_and_looking_does_not_take_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps(3))
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert read_run(run).state == "running" and read_run(run).why == ""
    assert read_run(run).state == "died"
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_run_said_of_its_end_counts_until_figures_are_newer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [*steps(4), checkpoint(4)])
    note_end(run, 4, "stopped by SIGTERM")
    assert read_run(run).why == "stopped by SIGTERM"
    os.utime(run / "metrics.jsonl", (time.time() + 5,) * 2)
    assert read_run(run).why == "ended with a checkpoint of its last step"
    whole = write_run(tmp_path / "whole", steps(10))
    note_end(whole, 10, ALL_DONE)
    assert (read_run(whole).state, read_run(whole).why) == ("finished", "")
    note_end(whole, 10, "stopped by SIGINT")  # in the evaluation at the end
    assert (read_run(whole).state, read_run(whole).why) == ("stopped", "stopped by SIGINT")
    (whole / "metrics.jsonl").unlink()
    (whole / ".lock").touch()
    note_end(whole, 10, ALL_DONE)  # its figures were removed
    assert (read_run(whole).state, read_run(whole).step, read_run(whole).why) == ("finished", 10, "")
    (run / "ended.json").write_text("[]")
    assert read_run(run).why == "ended with a checkpoint of its last step"


def test_total_steps_of_a_budget_of_tokens(tmp_path: Path) -> None:
    train = {"steps": 0, "tokens": 64 * 8 * 10 + 1, "global_batch": 8}
    assert read_run(write_run(tmp_path / "a", [], CONFIG | {"train": train})).total_steps == 11
    warmup = {"batch_warmup": {"start": 4, "increment": 4, "every_steps": 2}}
    config = CONFIG | {"train": train, "optim": warmup}
    assert read_run(write_run(tmp_path / "b", [], config)).total_steps == 12  # 2 x 4 + 9.1 x 8 samples
    assert read_run(write_run(tmp_path / "c", [], {"train": 3})).total_steps is None


def test_only_the_tail_is_read_and_an_evaluation_from_further_back(tmp_path: Path) -> None:
    lines = [metrics_line("evaluation", 0, {"validation_loss": 4.25}), *steps(4000, pad="x" * 20)]
    run = write_run(tmp_path / "long", lines)
    size = (run / "metrics.jsonl").stat().st_size
    assert size > 400_000
    tail = read_tail(run / "metrics.jsonl")
    assert tail.step["step"] == 4000 and tail.evaluation["validation_loss"] == 4.25
    write_run(tmp_path / "far", [lines[0], *steps(4000, pad="x" * 400)])
    assert not read_tail(tmp_path / "far" / "metrics.jsonl").evaluation


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "run.json", "out_of_memory.json", "ended.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff", b"[1, 2]\n", b"[" * 60_000, b'{"kind": "step", "step": 1e999}\n', None], ids=repr
)
def test_torn_and_foreign_files_are_said_or_skipped(tmp_path: Path, name: str, content: bytes | None) -> None:
    run = write_run(tmp_path / "r", [*steps(2), b'{"kind": "step", "st'])
    (run / name).unlink(missing_ok=True)
    if content is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(content)
    (row,) = list_runs(tmp_path)
    assert row.state in ("died", "failed", "no step yet", "unknown")
    if name == "config.json" and content != b'{"kind": "step", "step": 1e999}\n':
        assert "config.json" in row.why
    assert json.dumps(row.to_json(), allow_nan=False)


@pytest.mark.parametrize("size", [5_000, 300_000])
def test_figures_that_are_no_text_are_said(tmp_path: Path, size: int) -> None:
    run = write_run(tmp_path / "r", steps(2))
    (run / "metrics.jsonl").write_bytes(random.Random(0).randbytes(size))
    row = read_run(run)
    assert row.why == "metrics.jsonl is damaged: no line of it can be read as figures"
    assert run_status(run).why == row.why and (row.state, row.step) == ("unknown", None)
    (run / "metrics.jsonl").write_bytes(b'{"kind": "st')  # its first line is being written
    assert not read_run(run).why


def test_a_folder_that_may_not_be_looked_into_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "mine", steps(2))
    (tmp_path / "theirs").mkdir()
    stat = Path.stat

    def refuse(path: Path, **given: Any) -> os.stat_result:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **given)

    monkeypatch.setattr(Path, "stat", refuse)
    assert [row.name for row in list_runs(tmp_path)] == ["mine"]
    with pytest.raises(UserError, match="cannot be read"):
        list_runs(tmp_path / "theirs" / "runs")


def test_odd_values_in_lines(tmp_path: Path) -> None:
    odd = {"kind": "step", "step": 10**400, "loss": 10**400, "tokens": True, "tokens_per_s": "fast", "not_finite": 3}
    row = read_run(write_run(tmp_path / "r", [json.dumps(odd).encode() + b"\n"]))
    assert (row.loss, row.tokens, row.tokens_per_s) == (None, None, None)


def test_a_config_may_name_and_tag_a_run_and_what_people_say_later_counts_more(tmp_path: Path) -> None:
    config = CONFIG | {"run": {"folder": "x", "name": "wide", "note": "as planned", "tags": ["width", "old"]}}
    run = write_run(tmp_path / "one", steps(3), config)
    assert [(row.name, row.note, row.tags) for row in list_runs(tmp_path, tag="width")] == [
        ("wide", "as planned", ("width", "old"))
    ]
    assert keep_tags(run, ["good"], ["old"]) == ["width", "good"]
    assert keep_note(run, "") == {"name": "wide", "tags": ["width", "good"]}
    row = read_run(run)
    assert (row.name, row.note, row.tags) == ("wide", "", ("width", "good"))
    assert keep_tags(run, [], ["width", "good"]) == []
    assert read_run(run).tags == ()


def test_notes_names_and_tags(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps(2))
    write_run(tmp_path / "other", steps(2))
    assert keep_note(run, "too high", "base") == {"note": "too high", "name": "base"}
    assert keep_tags(run, ["good", "lr:3e-4", "good"], []) == ["good", "lr:3e-4"]
    assert keep_tags(run, ["new"], ["good", "absent"]) == ["lr:3e-4", "new"]
    (row,) = list_runs(tmp_path, tag="new")
    assert (row.name, row.note, row.tags) == ("base", "too high", ("lr:3e-4", "new"))
    assert keep_note(run, "") == {"name": "base", "tags": ["lr:3e-4", "new"]}
    with pytest.raises(UserError, match="is not a tag"):
        keep_tags(run, ["two words"], [])
    with pytest.raises(UserError, match="is not a run"):
        keep_note(tmp_path, "x")
    (run / "run.json").write_text('{"mine": 1, "tags": ["a"]}')
    assert keep_note(run, "n") == {"mine": 1, "tags": ["a"], "note": "n"}
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match="holds no table"):
        keep_note(run, "x")
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_diff_names_settings_by_dotted_keys(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps(10))
    other = json.loads(json.dumps(CONFIG))
    other["data"]["sources"][0]["path"], other["train"]["new"] = "b.txt", 1
    del other["run"]
    b = write_run(tmp_path / "b", steps(4), other)
    found = diff_runs(a, b)
    assert found["settings"] == [
        {"key": "run.folder", "a": "runs/one", "b": None},
        {"key": "data.sources.0.path", "a": "a.txt", "b": "b.txt"},
        {"key": "train.new", "a": None, "b": 1},
    ]
    assert (found["a"]["step"], found["b"]["step"], found["b"]["state"]) == (10, 4, "died")
    with pytest.raises(UserError, match=r"no config\.json"):
        diff_runs(a, tmp_path)


def test_a_finished_run_whose_settings_are_damaged_has_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps(4))
    (run / "config.json").unlink()
    (run / "config.json").symlink_to("/dev/null")
    note_end(run, 4, ALL_DONE)
    row = read_run(run)
    assert row.state == "finished" and "it is a device" in row.why


def test_two_hundred_runs_take_well_under_a_second(tmp_path: Path) -> None:
    lines = steps(400, pad="x" * 200)
    for number in range(200):
        write_run(tmp_path / f"r{number:03d}", lines)
    begin = time.process_time()
    assert len(list_runs(tmp_path)) == 200
    assert time.process_time() - begin < 1.5  # a tenth of it where nothing else runs


def test_needs_no_torch() -> None:
    code = (
        "import sys, phalanx.telemetry.run_list, phalanx.telemetry.run_imports, phalanx.cli.runs_command;"
        "print({'torch', 'tensorboard', 'pandas', 'pyarrow', 'duckdb'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
