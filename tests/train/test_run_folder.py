"""The run folder: its lock, the check of its config, and its errors."""

from __future__ import annotations

import fcntl
import json
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.odd_files import ODD_FILES

from phalanx.core.config import Config, known_keys, load, validate
from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig
from phalanx.train.derived.resume_changes import ASKED, FREE, TABLE, changes_between, classes
from phalanx.train.run_folder import RunFolder, note_hardware, open_for_training


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
    _open(allowed, tmp_path)  # no step was made yet
    assert RunFolder(tmp_path).config().model.layers == 3


def test_every_setting_is_classed_once() -> None:
    """A new one fails here until somebody has thought about what becomes of a run that goes on with another value."""

    keys = list(known_keys(RunConfig))
    sections = {key for key in keys if any(re.match(rf"{re.escape(key)}\.[^0]", other) for other in keys)}
    settings = [key.replace(".0.", ".*.") for key in keys if key not in sections]
    listed = [f"{section}.{name}" for _, section, names in TABLE for name in names.split()]
    assert sorted(listed) == sorted(settings)
    assert len(classes()) == len(listed)


def test_nothing_covers_the_meaning_of_the_weights() -> None:
    """Whatever of the model is not told to be free or of training alone."""
    may = {"model.attention_backend", "model.merged_projections", "model.dropout", "model.attention_dropout"}
    may |= {"model.z_loss", "model.residual", "model.init_std", "model.init_depth_scaled"}
    assert {key for key, kind in classes().items() if key.startswith("model.") and kind in (FREE, ASKED)} == may


def test_what_is_only_written_out_is_no_change() -> None:
    """Derived sizes given by hand, and settings of what is switched off."""
    other = _config(model={"kv_heads": 12, "head_size": 64, "mlp_hidden": 2048, "mlp_multiple": 8, "max_sequence": 256})
    changes = changes_between(_config(), other)
    assert len(changes) == 5 and all(change.is_free and not change.bound for change in changes)


def test_settings_that_do_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    other = _config(
        logging={"every_steps": 3},
        checkpoint={"keep_last": 5},
        evaluate={"every_steps": 7},
        model={"attention_backend": "math"},
        train={"steps": 3, "micro_batch": 4, "threads": 1, "recompute": "full"},
    )
    assert all(change.is_free for change in changes_between(_config(), other))


def _trained(path: Path) -> Path:
    """A run that has made a step."""
    _open(_config(), path)
    (path / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\n{"kind": "step", "step": 1, "loss": 1.0}\n')
    return path


def test_every_change_is_told_with_both_values(tmp_path: Path) -> None:
    other = {
        "model": {"dropout": 0.1},
        "optim": {"lr": 0.5},
        "logging": {"every_steps": 3},
        "run": {"resume": "changed"},
    }
    folder = open_for_training(_config(train={"steps": 3, "global_batch": 8}, **other), _trained(tmp_path))
    folder.release()
    assert folder.changes == (
        "logging.every_steps: 10 -> 3",
        "model.dropout: 0.0 -> 0.1",
        "optim.lr: None -> 0.5",
        "train.global_batch: 32 -> 8",
    )


@pytest.mark.parametrize(("before", "after"), [({"steps": 3}, {"steps": 4}), ({"steps": 3}, {"tokens": 99_999})])
def test_a_run_may_be_made_longer_as_it_is(tmp_path: Path, before: dict[str, int], after: dict[str, int]) -> None:
    _open(_config(train=before), tmp_path)
    folder = open_for_training(_config(train=after), tmp_path)
    folder.release()
    assert "train.steps: 3 -> " in "".join(folder.changes)


def test_a_run_is_made_shorter_only_when_that_is_asked_for(tmp_path: Path) -> None:
    _trained(tmp_path)
    with pytest.raises(UserError, match=r"train.steps: 3 -> 2.*run.resume=changed"):
        open_for_training(_config(train={"steps": 2}), tmp_path)
    open_for_training(_config(train={"steps": 2}, run={"resume": "changed"}), tmp_path).release()


@pytest.mark.parametrize("resume", ["same", "changed"])
@pytest.mark.parametrize(
    ("section", "values", "why"),
    [
        ("data", {"tokenizer": {"kind": "bytes"}}, r"data.tokenizer.kind: 'bpe' -> 'bytes' \(the tokenizer\)"),
        ("data", {"tokenizer": {"vocab_size": 300}}, r"data.tokenizer.vocab_size: 4096 -> 300 \(the tokenizer\)"),
        ("data", {"seed": 1}, r"data.seed: 0 -> 1 \(the order of the samples\)"),
        ("data", {"sequence_length": 16}, r"data.sequence_length: 256 -> 16 \(the order of the samples\)"),
        ("data", {"random_offset": False}, r"data.random_offset: True -> False \(the order of the samples\)"),
        ("data", {"sources": [{"kind": "python-stdlib", "weight": 2.0}]}, r"weight: 0.0 -> 2.0 \(the order"),
        ("model", {"layers": 3}, r"model.layers: 12 -> 3 \(the shapes or the meaning of its weights\)"),
        ("model", {"activation": "gelu"}, r"model.activation: .* -> 'gelu' \(the shapes or"),
        ("model", {"heads": 6}, r"model.heads: 12 -> 6 \(the shapes or the meaning"),  # of equal shapes
        ("model", {"rope_theta": 5e5}, r"model.rope_theta: 10000.0 -> 500000.0 \(the shapes or the meaning"),
        ("model", {"norm_eps": 1e-6}, r"model.norm_eps: 1e-05 -> 1e-06 \(the shapes or the meaning"),
        ("model", {"tie_embeddings": True}, r"model.tie_embeddings: False -> True \(the shapes or the meaning"),
        ("model", {"logit_softcap": 30.0}, r"model.logit_softcap: 0.0 -> 30.0 \(the shapes or the meaning"),
        ("model", {"attention": ["window"], "window": 8}, r"model.window: 0 -> 8 \(the shapes or the meaning"),
        ("model", {"block": "parallel"}, r"model.block: 'serial' -> 'parallel' \(the shapes or the meaning"),
        ("model", {"rope_scaling": {"kind": "yarn"}}, r"model.rope_scaling.kind: 'none' -> 'yarn' \(the shapes or"),
        ("optim", {"bad_step": {"history": 64}}, r"optim.bad_step.history: 128 -> 64 \(the history of its bad steps\)"),
        ("optim", {"name": "lamb"}, r"optim.name: 'adamw' -> 'lamb' \(the state of its optimizer\)"),
    ],
)
def test_what_a_run_is_bound_to_is_never_changed(
    tmp_path: Path, resume: str, section: str, values: dict[str, object], why: str
) -> None:
    other = _config(run={"resume": resume}, **{section: values})
    with pytest.raises(UserError, match=rf"cannot go on with .*{why}.*put that back, or.*train.init_from={tmp_path}"):
        open_for_training(other, _trained(tmp_path))


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


def test_who_only_looks_at_the_lock_keeps_no_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onlooker = (tmp_path / ".lock").open("a")
    fcntl.flock(onlooker, fcntl.LOCK_SH)
    monkeypatch.setattr("phalanx.train.run_folder.time.sleep", lambda _: onlooker.close())
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


def test_a_setting_that_is_none_in_the_config_of_a_run(tmp_path: Path) -> None:
    _open(_config(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"every_steps"', '"evry_steps"', 1))
    with pytest.raises(UserError, match=rf"{path}.*evry_steps: there is no such setting; undo what was edited"):
        open_for_training(_config(), tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_config_that_is_no_file(tmp_path: Path, kind: str) -> None:
    make, words = ODD_FILES[kind]
    make(tmp_path / "config.json")
    with pytest.raises(UserError, match=rf"config.json is damaged .*{words}"):
        RunFolder(tmp_path).config()


def _float_keys() -> list[str]:
    def floats(annotation: object) -> bool:
        return annotation is float or any(floats(inner) for inner in typing.get_args(annotation))

    def of(kind: type[Config], prefix: str) -> Iterator[str]:
        for name, field in kind.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                yield from of(field.annotation, f"{prefix}{name}.")
            elif floats(field.annotation):
                yield prefix + name

    return list(of(RunConfig, ""))


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", [*_float_keys(), "data.sources.0.weight", "optim.groups.0.lr"])
def test_a_number_that_is_not_finite_is_refused(key: str, value: str) -> None:
    given = f"[{value}, 0.9]" if key == "optim.betas" else value
    needed = ["train.steps=3", "data.sources.0.kind=python-stdlib", "optim.groups.0.pattern=x"]
    with pytest.raises(UserError, match=rf"{key}.* = -?{value.strip('-')}: .*finite number; it is: "):
        load(RunConfig, None, [*needed, f"{key}={given}"])


@pytest.mark.parametrize("key", ["train.steps", "train.tokens", "train.seed", "data.seed", "checkpoint.every_steps"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("true", "number, not true"),
        ("99999999999999999999", r"fit into 64 bits"),
        ("9" * 5000, "integer"),
        (f"{1 << 62}", ""),
    ],
)
def test_a_whole_number_is_one_and_fits(key: str, value: str, why: str) -> None:
    given = ["train.steps=3"] if key != "train.tokens" else []
    if not why:
        assert load(RunConfig, None, [*given, f"{key}={value}"])
        return
    with pytest.raises(UserError, match=rf"{key}.* = .*: .*{why}.*; it is: "):
        load(RunConfig, None, [*given, f"{key}={value}"])


@pytest.mark.parametrize("key", ["optim.eps", "optim.came.eps_residual", "model.norm_eps"])
def test_what_guards_a_division_is_not_zero(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} = 0: .*greater than 0; it is: "):
        load(RunConfig, None, ["train.steps=3", f"{key}=0"])
