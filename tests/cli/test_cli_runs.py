"""`phalanx runs` in a terminal, on runs that were trained and on made ones; its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import runs_page
from click.testing import CliRunner, Result
from train_helpers import Commands, overrides

from phalanx.cli.main import group
from phalanx.core.errors import UserError


def run(*arguments: str | Path) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(group, ["runs", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs_page.make_runs(tmp_path)
    return tmp_path / "runs"


def test_the_page_shows_what_its_commands_print() -> None:
    assert runs_page.page_now() == runs_page.PAGE.read_text(), "write it again: python benchmarks/runs_page.py"


def test_a_trained_run_and_one_that_failed(tmp_path: Path, trained: Path, commands: Commands) -> None:
    shutil.copytree(trained / "run", tmp_path / "runs" / "whole")
    (row,) = json.loads(run(tmp_path / "runs", "--json").output)["runs"]
    assert row["state"] == "finished" and row["step"] == row["total_steps"] and row["why"] == ""
    assert row["loss"] > 0 and row["tokens"] > 0 and row["tokens_per_s"] > 0
    assert json.loads((tmp_path / "runs" / "whole" / "ended.json").read_text())["why"] == "all was done"
    bad = {"run.folder": str(tmp_path / "runs" / "bad"), "optim.lr": 1e30, "train.steps": 20}
    assert commands.run(trained, "train", "tiny.toml", *overrides(trained, bad)).status == 2
    row = next(row for row in json.loads(run(tmp_path / "runs", "--json").output)["runs"] if row["name"] == "bad")
    assert row["state"] == "failed" and row["why"].startswith("optim.bad_step.max_in_a_row"), row


def test_table_sorts_and_filters(folder: Path) -> None:
    told = run(folder)
    assert told.exit_code == 0 and told.output.splitlines()[1].startswith("wide ")
    first = run(folder, "--sort", "name").output.splitlines()[1]
    assert first.startswith("base")
    run("tag", folder / "base", "+good", "+hot")
    assert run("tag", folder / "base", "-hot", "+new").output == "tags: good, new\n"
    assert [row["name"] for row in json.loads(run(folder, "--tag", "good", "--json").output)["runs"]] == ["base"]
    assert "has the tag absent" in run("ls", folder, "--tag", "absent").output


def test_markup_in_names_and_notes_is_text(folder: Path) -> None:
    assert (
        run("note", folder / "base", "[red]x[/red] [/", "--name", "[b]").output == "note: [red]x[/red] [/\nname: [b]\n"
    )
    told = run(folder).output
    assert "[b]" in told and "[red]x[/red] [/" in told
    assert "name" not in run("note", folder / "base", "--name", "").output


def test_diff(folder: Path) -> None:
    told = run("diff", folder / "base", folder / "wide").output
    assert "model.hidden" in told and "->" in told and "held-out" not in told.splitlines()[0]
    assert json.loads(run("diff", folder / "base", folder / "wide", "--json").output)["settings"]
    assert "all settings are the same" in run("diff", folder / "base", folder / "base").output


def test_import(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").write_text("step,train_loss\n1,5\n2,4.5\n")
    told = run("import", tmp_path / "theirs.csv", folder / "theirs")
    assert told.output == f"csv: 2 steps of loss: {folder / 'theirs'}\n"
    assert "imported" in run(folder).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "no folder of runs: it is not there"),
        (["diff", "nowhere", "nowhere"], "has no config.json"),
        (["note", "nowhere", "x"], "is not a run"),
        (["tag", "nowhere", "good"], r"write \+good"),
        (["import", "nowhere.csv", "to"], "cannot be read"),
    ],
)
def test_mistakes_are_a_line_with_the_cure(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        run(*arguments)


def test_without_a_folder_it_is_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert run().output == "no run in runs\n"
    assert "Without a subcommand" in run("--help").output
