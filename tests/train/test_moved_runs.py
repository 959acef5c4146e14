"""A run folder that is renamed while its run trains stays one folder, and everybody is told."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from train_helpers import Commands, configured, entries, overrides, run_all, until

from phalanx.core.errors import UserError
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.run_list import list_runs, read_run
from phalanx.telemetry.run_status import run_status
from phalanx.train.moved_folder import FolderGuard
from phalanx.train.reports.callbacks import Callback, StepReport
from phalanx.train.session import run_session
from phalanx.train.weights.trained import open_trained

WAIT_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    for name in (".lock", "config.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    return run


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def guard(folder: Path, said: list[str]) -> Iterator[FolderGuard]:
    found = FolderGuard(folder, said.append)
    yield found
    found.close()


def test_a_folder_that_stays_is_left_alone(guard: FolderGuard, folder: Path, said: list[str]) -> None:
    guard.look()
    assert said == [] and not folder.is_symlink() and not (folder / "moved.json").exists()


def test_a_renamed_folder_is_reached_by_its_old_path_and_that_is_said_once(
    guard: FolderGuard, folder: Path, said: list[str]
) -> None:
    new = folder.rename(folder.parent / "b")
    guard.look()
    guard.look()
    assert folder.is_symlink() and folder.readlink() == Path("b")
    (folder / "ended.json").write_text("{}")
    assert (new / "ended.json").exists()
    assert len(said) == 1 and f"moved to {new}: the run goes on there" in said[0]
    assert json.loads((new / "moved.json").read_text())["from"] == str(folder)
    assert [row.folder for row in list_runs(folder.parent)] == [str(new)]


def test_it_may_be_renamed_again_and_moved_back(guard: FolderGuard, folder: Path, said: list[str]) -> None:
    second = folder.parent.parent / "elsewhere" / "c"
    second.parent.mkdir()
    new = folder.rename(folder.parent / "b")
    guard.look()
    new.rename(second)
    guard.look()
    assert folder.resolve() == second and len(said) == 2
    folder.unlink()
    second.rename(folder)
    guard.look()
    assert not folder.is_symlink() and len(said) == 2


def test_a_folder_above_is_moved(guard: FolderGuard, folder: Path, said: list[str]) -> None:
    above = folder.parent
    new = above.rename(above.with_name("later"))
    guard.look()
    assert above.is_symlink() and (folder / "metrics.jsonl").exists() and folder.resolve() == new / "a"
    assert f"a link in its old place, {above}, lets it" in said[0]


def test_what_was_written_in_the_old_place_meanwhile_comes_along(
    guard: FolderGuard, folder: Path, said: list[str]
) -> None:
    new = folder.rename(folder.parent / "b")
    for name in ("checkpoints/step-00000005/model", "metrics.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("new")
    guard.look()
    assert folder.is_symlink() and (new / "checkpoints/step-00000005/model").read_text() == "new"
    assert (new / "metrics.jsonl").read_text() == "{}" and (new / "strays-1" / "metrics.jsonl").read_text() == "new"
    assert said[0].endswith(f"are in {new / 'strays-1'}")


def test_a_link_that_somebody_else_made_is_left_alone(folder: Path, said: list[str]) -> None:
    link, other = folder.parent / "current", folder.parent / "other"
    link.symlink_to("a")
    other.mkdir()
    guard = FolderGuard(link, said.append)
    link.unlink()
    link.symlink_to("other")
    guard.look()
    guard.close()
    assert link.resolve() == other and len(said) == 1 and "no link to it can be put in its old place" in said[0]


def test_a_run_that_somebody_began_in_the_old_place_is_left_alone(
    guard: FolderGuard, folder: Path, said: list[str]
) -> None:
    new = folder.rename(folder.parent / "b")
    folder.mkdir()
    (folder / ".lock").touch()
    guard.look()
    guard.look()
    assert [path.name for path in folder.iterdir()] == [".lock"] and not folder.is_symlink()
    assert len(said) == 1 and f"another run now, and this one was moved to {new}" in said[0]


def test_a_folder_that_is_gone_is_said_and_seen_in_the_one_that_is_made_anew(
    guard: FolderGuard, folder: Path, said: list[str]
) -> None:
    shutil.rmtree(folder)
    guard.look()
    assert not folder.exists() and len(said) == 1 and "was removed, or moved to another file system" in said[0]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 9, "loss": 1.0}) + "\n")
    guard.look()
    assert len(said) == 1 and "what it wrote before is not here" in read_run(folder).why


@pytest.mark.parametrize(
    ("removed", "says"), [("", "no config.json, no tokenizer now"), ("tokenizer", "has no tokenizer now")]
)
def test_a_run_whose_folder_was_removed_is_not_called_done(tmp_path: Path, removed: str, says: str) -> None:
    class Remover(Callback):
        def on_step(self, report: StepReport) -> None:
            if report.step == 2:
                shutil.rmtree(tmp_path / "run" / removed)

    out = io.StringIO()
    config = configured(tmp_path, {"train.steps": 4})
    with pytest.raises(UserError, match=says):
        run_session(config, Path("tiny.toml"), Console(file=out), callbacks=[Remover()])
    assert "sample from it" not in out.getvalue()
    row = read_run(tmp_path / "run")
    assert row.state != "finished" and says in row.why
    # what is left is enough to put it back
    assert "sample from it" in run_all(tmp_path, {"train.steps": 4})
    assert open_trained(tmp_path / "run", print).step == 4


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"  # of a run that goes on: the last line may be half written
    return metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0


def test_a_real_run_goes_on_in_its_new_place(tmp_path: Path, commands: Commands) -> None:
    (tmp_path / "empty.toml").touch()
    changes = {"train.steps": 100_000, "telemetry.spans": True, "checkpoint.mode": "background", "alerts.watch": True}
    changes |= {"checkpoint.every_steps": 25, "checkpoint.keep_last": 2}
    process = commands.start(tmp_path, ["train", "empty.toml", *overrides(tmp_path, changes)])
    run, new = tmp_path / "run", tmp_path / "renamed"
    try:
        until(lambda: steps(run) >= 20)
        run.rename(new)
        until(lambda: run.is_symlink())
        before = steps(new)
        until(lambda: steps(new) >= before + 50)  # there are checkpoints among them
        row = read_run(new)
        assert row.state == "running" and row.why == f"moved here from {run} while it trains; it goes on here"
        assert run_status(new).state == "running"
        os.kill(process.pid, signal.SIGINT)
        process.join(WAIT_S)
        until(lambda: read_run(new).state == "stopped")
    finally:
        process.kill()
        process.join()
    lines = [entry["step"] for entry in entries(new)]
    assert lines == list(range(1, lines[-1] + 1))
    newest = max((new / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{lines[-1]:08d}"
    until(lambda: not list((new / "telemetry" / "live").glob("*.arrows")))  # its writer has ended
    assert run.is_symlink() and not list(new.glob("strays-*"))
    recorded = Trace.open(new).sql("select distinct step from steps where step > 0 order by step")["step"].to_pylist()
    assert recorded == lines
    logs = "".join(path.read_text() for path in (new / "logs").iterdir() if path.is_file())
    assert f"the run folder was moved to {new}: the run goes on there" in logs
