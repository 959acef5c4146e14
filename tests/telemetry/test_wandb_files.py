"""Offline runs of Weights & Biases, as wandb itself wrote them, as run folders."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.loggers import read_json_lines
from phalanx.telemetry.run_imports import import_run
from phalanx.telemetry.run_list import diff_runs, read_run
from phalanx.telemetry.wandb_files import NotWandbError, flat_numbers, read_wandb

FILES = Path(__file__).parent / "wandb_runs"
BIG, SMALL = FILES / "run-0.31.wandb", FILES / "run-0.18.wandb"


def figures(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl") if line["kind"] == kind}


@pytest.mark.parametrize(("path", "rows"), [(BIG, 36), (SMALL, 6)])
def test_all_of_a_file_is_read_whatever_version_wrote_it(path: Path, rows: int) -> None:
    run = read_wandb(path)
    assert (run.name, run.project, run.tags) == ("wide-512", "pretraining", ["width", "lr:3e-4"])
    assert run.notes == "does no better\nfor its size"
    assert run.config["lr"] == 3e-4 and run.config["model"] == {"hidden": 512, "layers": 8}
    assert (run.exit_code, run.damaged, len(run.history)) == (0, 0, rows)
    assert [row["_step"] for row in run.history] == list(range(rows))
    assert run.history[0]["train/loss"] == 4.9 and run.history[0]["phase"] == "warm"
    assert run.summary["best"] == 4.5
    assert path.stat().st_size < 50_000


def test_a_run_folder_of_it_is_a_run_in_tables_and_differences(tmp_path: Path) -> None:
    chosen, steps, names = import_run([BIG], tmp_path / "one")
    assert (chosen, steps) == ("wandb", 30) and {"loss", "tokens", "lr", "validation_loss"} <= set(names)
    by_step = figures(tmp_path / "one", "step")
    assert [*by_step] == list(range(10, 310, 10))
    assert (by_step[100]["loss"], by_step[100]["tokens"]) == (4.0, 51_200)
    assert by_step[10]["time_s"] == 0 < by_step[300]["time_s"] < 10
    evaluations = figures(tmp_path / "one", "evaluation")
    assert evaluations[150]["validation_loss"] == 4.9 and evaluations[300]["not_finite"] == {"validation_loss": "nan"}
    row = read_run(tmp_path / "one")
    assert (row.name, row.note, row.tags) == ("wide-512", "does no better for its size", ("width", "lr:3e-4"))
    assert (row.state, row.step, row.loss) == ("imported", 300, 2.0)
    assert row.why == "wandb: run-0.31.wandb, of project pretraining"
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["best"] == 4.5
    import_run([SMALL], tmp_path / "other")
    (changed,) = diff_runs(tmp_path / "one", tmp_path / "other")["settings"]
    assert changed["key"] == "text"


def test_a_second_file_of_the_same_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run-a.wandb", "run-b.wandb"):
        (tmp_path / "run" / name).write_bytes(BIG.read_bytes())
    said: list[str] = []
    assert import_run([tmp_path / "run"], tmp_path / "out", say=said.append)[1] == 30
    (line,) = said
    assert line.endswith("; 30 steps are in several: the last file counts") and "2 files are of run " in line


def test_folders_as_wandb_leaves_them_with_a_link_to_the_newest_run(tmp_path: Path) -> None:
    folder = tmp_path / "wandb" / "offline-run-20261125_193047-r8qs7zk0"
    folder.mkdir(parents=True)
    (folder / "run-r8qs7zk0.wandb").write_bytes(BIG.read_bytes())
    (tmp_path / "wandb" / "latest-run").symlink_to(folder.name)
    assert import_run([tmp_path / "wandb"], tmp_path / "one")[1] == 30
    (tmp_path / "wandb" / "run-other.wandb").write_bytes(SMALL.read_bytes())
    with pytest.raises(UserError, match="are 2 runs"):
        import_run([tmp_path / "wandb"], tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_of_a_run_that_was_killed_all_whole_records_are_there(tmp_path: Path) -> None:
    whole = read_wandb(BIG)
    content, torn = BIG.read_bytes(), tmp_path / "run-torn.wandb"
    for size in (7, 20, 5_000, 33_000, 40_000, len(content) - 1):
        torn.write_bytes(content[:size])
        run = read_wandb(torn)
        assert run.damaged == 0 and run.exit_code is None
        assert run.history == whole.history[: len(run.history)]
    assert len(run.history) == 36
    import_run([torn], tmp_path / "one")
    assert read_run(tmp_path / "one").why.endswith(", broke off")


def test_damage_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    content, path = bytearray(BIG.read_bytes()), tmp_path / "run-x.wandb"
    content[34_500] ^= 0xFF  # in the second block
    path.write_bytes(content)
    run = read_wandb(path)
    assert run.damaged == 1 and run.name == "wide-512"
    chosen = random.Random(0)
    for _ in range(200):
        for _ in range(5):
            content[chosen.randrange(7, len(content))] = chosen.randrange(256)
        path.write_bytes(content)
        assert read_wandb(path).damaged  # and nothing is raised


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"{}\n")
    with pytest.raises(NotWandbError):
        read_wandb(path)
    with pytest.raises(UserError, match="does not begin as a file of W&B"):
        import_run([path], tmp_path / "one")
    with pytest.raises(UserError, match="cannot be read"):
        import_run([tmp_path / "absent.wandb"], tmp_path / "one")
    path.write_bytes(BIG.read_bytes()[:7])
    with pytest.raises(UserError, match="no figures"):
        import_run([path], tmp_path / "one")


def test_numbers_in_tables_and_strange_ones() -> None:
    histogram = {"_type": "histogram", "values": 3}
    row = {"a": {"b": 1, "c": {"d": math.inf}}, "e": True, "f": "text", "g": histogram, "h": 2.5}
    assert list(flat_numbers(row)) == [("a.b", 1), ("a.c.d", math.inf), ("h", 2.5)]
