"""The run folder: its lock, the check of its config, and its errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig
from phalanx.train.run_folder import RunFolder, changed_settings, note_hardware, open_for_training


def _config(**sections: dict[str, object]) -> RunConfig:
    return validate(RunConfig, {"train": {"steps": 3}, **sections})


def _open(config: RunConfig, path: Path) -> None:
    """A run that got as far as its first step."""
    folder = open_for_training(config, path)
    folder.record_config(config)
    folder.release()


def test_a_new_folder_holds_config_and_environment(tmp_path: Path) -> None:
    folder = open_for_training(_config(), tmp_path / "a" / "run")
    folder.record_config(_config())
    folder.release()
    assert folder.config() == _config()
    note_hardware(folder, {"device": "x"})
    (start,) = json.loads((folder.path / "environment.json").read_text())
    assert start["packages"]["torch"]
    assert start["hardware"] == {"device": "x"}


def test_the_same_config_may_go_on_and_each_start_is_noted(tmp_path: Path) -> None:
    for _ in range(2):
        _open(_config(), tmp_path)
    assert len(json.loads((tmp_path / "environment.json").read_text())) == 2


def test_another_config_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    _open(_config(), tmp_path)
    other = _config(model={"layers": 3})
    with pytest.raises(UserError, match=r"model.layers: 12 -> 3.*run.folder to a new name, or run.resume=changed"):
        open_for_training(other, tmp_path)
    assert RunFolder(tmp_path).config() == _config()
    allowed = _config(model={"layers": 3}, run={"resume": "changed"})
    _open(allowed, tmp_path)
    assert RunFolder(tmp_path).config().model.layers == 3


def test_settings_that_do_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    other = _config(logging={"every_steps": 3}, checkpoint={"keep_last": 5}, evaluate={"every_steps": 7})
    assert changed_settings(_config(), other) == []


def test_a_run_that_could_not_start_does_not_bind_the_folder(tmp_path: Path) -> None:
    open_for_training(_config(), tmp_path).release()
    open_for_training(_config(model={"layers": 3}), tmp_path).release()
    _open(_config(), tmp_path)
    open_for_training(_config(model={"layers": 3}, run={"resume": "changed"}), tmp_path).release()
    assert RunFolder(tmp_path).config() == _config()


def test_never_refuses_a_used_folder(tmp_path: Path) -> None:
    _open(_config(), tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        open_for_training(_config(run={"resume": "never"}), tmp_path)


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    first = open_for_training(_config(), tmp_path)
    with pytest.raises(UserError, match="another process is training"):
        open_for_training(_config(), tmp_path)
    first.release()
    open_for_training(_config(), tmp_path).release()


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run.folder = .*cannot be written"):
        open_for_training(_config(), tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"choose a run\.folder"):
        open_for_training(_config(), tmp_path / "run")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        RunFolder(tmp_path).config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        RunFolder(tmp_path).config()
