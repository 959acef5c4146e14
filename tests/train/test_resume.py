"""A run that is stopped, killed or finds its newest checkpoint torn goes on with the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.open_checkpoint import open_checkpoint
from support.tiny import write_corpus
from train_helpers import (
    Commands,
    begin,
    configured,
    copies,
    ended,
    entries,
    figures,
    finish,
    overrides,
    run_all,
    wait_for_step,
)

from phalanx.core.errors import UserError
from phalanx.core.fault_points import Points
from phalanx.data.batch import Batch
from phalanx.model.logical_parameters import initialise
from phalanx.train import assemble
from phalanx.train.run_folder import RunFolder
from phalanx.train.training_run import Run

Figures = list[tuple[Any, ...]]

WARM_UP = {
    "optim.batch_warmup.start": 1,
    "optim.batch_warmup.increment": 1,
    "optim.batch_warmup.every_steps": 3,
}
BAD_STEPS = {"optim.bad_step.min_history": 4, "optim.bad_step.history": 6, "optim.bad_step.sigma": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "8 bits": {"optim.state_bits": 8, "model.hidden": 64},
    "16 bits": {"optim.state_bits": 16, "model.hidden": 64},
    "lamb": {"optim.name": "lamb"},
    "came": {"optim.name": "came"},
    "muon": {"optim.name": "muon"},
    "dropout": {"model.dropout": 0.2},
    "attention dropout": {"model.attention_dropout": 0.2, "model.attention_backend": "math"},
    "batch warm-up": WARM_UP,
    "recompute": {"train.recompute": "full", "model.dropout": 0.1},
    "bf16": {"train.precision": "bf16"},
    "fp8": {"train.precision": "fp8", "model.layers": 3, "train.recompute": "selective"},
    "parallel": {"model.block": "parallel", "model.window": 4, "model.attention": ["window", "full"]},
    "tied": {"model.tie_embeddings": True, "model.vocab_multiple": 64},
    "evaluations": {"evaluate.every_steps": 3, "evaluate.tokens": 200},
    "bad steps": BAD_STEPS,
}
TOGETHER: dict[str, dict[str, Any]] = {
    "8 bits, attention dropout, evaluations": VARIANTS["8 bits"]
    | VARIANTS["attention dropout"]
    | VARIANTS["evaluations"],
    "lamb, recompute, bf16": VARIANTS["lamb"] | VARIANTS["recompute"] | VARIANTS["bf16"],
    "came, batch warm-up, tied": VARIANTS["came"] | WARM_UP | VARIANTS["tied"],
    "16 bits, parallel, dropout": VARIANTS["16 bits"] | VARIANTS["parallel"] | VARIANTS["dropout"],
    "muon, fp8, bad steps": VARIANTS["muon"] | VARIANTS["fp8"] | BAD_STEPS,
}
"""Each of the variants, with others that do not touch it."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Of twenty steps that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    run_all(folder)
    return figures(folder / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of five steps lies, for whoever does not change it."""
    folder = tmp_path_factory.mktemp("trained")
    run_all(folder, {"train.steps": 5})
    shutil.copytree(folder / "run", folder / "kept")
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies whose newest two checkpoints are of steps 10 and 12."""
    folder = tmp_path_factory.mktemp("stopped")
    run = begin(configured(folder))
    _stop_at(run, 12)
    finish(run)
    shutil.copytree(folder / "run", folder / "kept")
    return folder


def _as_it_was(folder: Path) -> Path:
    """A run is bound to the path of its text: it goes on where it was trained, whatever others did to it there."""
    shutil.rmtree(folder / "run")
    shutil.copytree(folder / "kept", folder / "run")
    write_corpus(folder)
    return folder


@pytest.fixture
def five(trained: Path) -> Path:
    """Where a run of five steps lies."""
    return _as_it_was(trained)


@pytest.fixture
def twelve(stopped: Path) -> Path:
    """Where a run of twelve steps lies, of twenty."""
    return _as_it_was(stopped)


def _stop_at(run: Run, step: int, number: int = signal.SIGTERM) -> None:
    """A signal in the middle of `step` (counted from 1)."""
    original = run.accumulate_gradients

    def asked(batch: Batch) -> torch.Tensor:
        if run.progress.step + 1 == step:
            os.kill(os.getpid(), number)
        return original(batch)

    run.accumulate_gradients = asked  # type: ignore[method-assign]


@pytest.mark.campaign(but=tuple(TOGETHER))
@pytest.mark.parametrize("name", VARIANTS | TOGETHER)
def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, name: str) -> None:
    changes = (VARIANTS | TOGETHER)[name] | {"train.steps": 10, "checkpoint.every_steps": 5}
    run_all(tmp_path, changes, "straight")
    config = configured(tmp_path, changes)
    for stop in (1, 4, 7):
        run = begin(config)
        _stop_at(run, stop)
        outcome = finish(run)
        assert outcome.stopped_by == "SIGTERM"
        assert run.progress.step == stop
    finish(begin(config))
    expected = figures(tmp_path / "straight")
    assert figures(tmp_path / "run") == expected
    assert len(entries(tmp_path / "run")) == 10
    if "bad steps" in name:
        assert 0 < sum(entry["skipped"] for entry in entries(tmp_path / "run")) < 10
    last = [open_checkpoint(list(copies(tmp_path / run))[-1]).read() for run in ("run", "straight")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][key], last[1][key]) for key in last[0])


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(tmp_path: Path) -> None:
    changes = {"evaluate.every_steps": 5, "train.steps": 12}
    run_all(tmp_path, changes, "straight")
    for stop in (5, 10):
        run = begin(configured(tmp_path, changes))
        _stop_at(run, stop)
        finish(run)
        assert [e["step"] for e in entries(tmp_path / "run", "evaluation")] == list(range(5, stop, 5))
    finish(begin(configured(tmp_path, changes)))
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


def test_a_finished_run_does_nothing_twice(five: Path) -> None:
    before = figures(five / "run")
    printed = run_all(five, {"train.steps": 5})
    assert "step 5 of 5" in printed
    assert figures(five / "run") == before


def test_a_longer_run_goes_on_and_says_so(tmp_path: Path) -> None:
    constant = {"optim.schedule.kind": "constant", "optim.schedule.warmup_steps": 0}
    run_all(tmp_path, constant | {"train.steps": 6})
    printed = run_all(tmp_path, constant | {"train.steps": 9})
    assert "going on with other settings than before:\n  train.steps: 6 -> 9" in printed
    assert [entry["step"] for entry in entries(tmp_path / "run")] == list(range(1, 10))
    run_all(tmp_path, constant | {"train.steps": 9}, "straight")
    assert entries(tmp_path / "run")[-1]["loss"] == entries(tmp_path / "straight")[-1]["loss"]
    with pytest.raises(UserError, match=r"train.steps: 9 -> 6.*run.resume=changed"):
        run_all(tmp_path, constant | {"train.steps": 6})


def test_a_changed_micro_batch_is_taken_up(five: Path) -> None:
    """What the error of a run out of memory advises must have its effect."""
    run = begin(configured(five, {"train.steps": 5, "train.micro_batch": 1, "run.resume": "changed"}))
    run.folder.release()
    assert (run.progress.step, run.progress.micro_batch) == (5, 1)


def test_a_changed_model_cannot_be_resumed_and_nothing_is_spoilt(five: Path) -> None:
    with pytest.raises(UserError, match=r"model.layers: 2 -> 3 \(the shapes or the meaning"):
        run_all(five, {"train.steps": 5, "model.layers": 3, "run.resume": "changed"})
    assert "step 5 of 5" in run_all(five, {"train.steps": 5})


@pytest.mark.parametrize("resume", ["same", "changed"])
def test_other_text_is_never_taken_for_the_same(five: Path, resume: str) -> None:
    write_corpus(five, seed=1)
    told = (
        r"data\.sources: the text.*step 5 \(tokens [0-9a-f]{8}… -> [0-9a-f]{8}…; .* -> .* tokens.*train.init_from=.*run"
    )
    with pytest.raises(UserError, match=told):
        run_all(five, {"train.steps": 5, "run.resume": resume})
    write_corpus(five)
    assert "step 5 of 5" in run_all(five, {"train.steps": 5})


def test_a_tokenizer_made_of_other_text_is_refused_and_the_cure_works(tmp_path: Path) -> None:
    """Old weights and other ids would go on as if nothing had happened, from a loss of chance."""
    bpe = {"train.steps": 5, "data.tokenizer.kind": "bpe", "data.tokenizer.vocab_size": 300}
    run_all(tmp_path, bpe)
    write_corpus(tmp_path, documents=200, seed=1)
    with pytest.raises(
        UserError, match=r"\(tokenizer .* -> .*, tokens .* -> .*; .* to keep what its ids mean"
    ) as caught:
        run_all(tmp_path, bpe | {"run.resume": "changed"})
    changes = bpe | {"train.init_from": str(tmp_path / "run"), "data.tokenizer.kind": "file"}
    changes["data.tokenizer.path"] = str(tmp_path / "run" / "tokenizer")
    assert changes["train.init_from"] in str(caught.value)
    assert changes["data.tokenizer.path"] in str(caught.value)
    printed = run_all(tmp_path, changes | {"data.tokenizer.vocab_size": None}, "new")
    assert "starting from the weights of" in printed
    assert "warning" not in printed


def test_a_signal_ends_the_step_with_a_checkpoint(tmp_path: Path, commands: Commands) -> None:
    # So many that whoever ends well has missed the signal: once a run of 4,000 (17 s) did, and why is open.
    (tmp_path / "tiny.toml").write_text("")
    arguments = ["train", "tiny.toml", *overrides(tmp_path, {"train.steps": 40000, "checkpoint.every_steps": 0})]
    run, former = tmp_path / "run", 0
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)):
        process = commands.start(tmp_path, arguments)
        wait_for_step(process, run, former + 7)
        os.kill(process.pid, number)
        result = ended(process, tmp_path)
        assert result.status == status, result
        steps = [entry["step"] for entry in entries(run)]
        assert steps == list(range(1, len(steps) + 1))
        assert former + 7 <= len(steps) < 40000
        assert f"stopped by {number.name} after step {len(steps)} of 40000" in result.out
        assert "the same command goes on from there" in result.out
        assert list(copies(run))[-1].name == f"step-{len(steps):08d}"
        if former:
            assert f"going on from {list(copies(run))[-2]} (step {former} of 40000)" in result.out
        former = len(steps)
    assert len(list(copies(run))) == 3


def _kill_at_random(folder: Path, commands: Commands, changes: dict[str, Any], kills: int, seed: int) -> None:
    """SIGKILL one process after another at seeded moments, until one lives to the end."""
    chosen = random.Random(seed)
    arguments = ["train", "tiny.toml", *overrides(folder, changes)]
    (folder / "tiny.toml").write_text("")
    run = folder / "run"
    killed_at = []
    for number in range(kills):
        process = commands.start(folder, arguments)
        # Progress decides when: some steps beyond the last seen, then up to 30 ms, which may fall into a step, a
        # checkpoint being written, an evaluation, or the start of the process.
        seen = wait_for_step(process, run, 1 + (number * changes["train.steps"]) // (kills + 1))
        process.join(chosen.random() * 0.03)
        process.kill()
        process.join()
        killed_at.append(seen)
        _readable(run)
    result = commands.run(folder, *arguments)
    assert result.status == 0, result
    assert "done: " in result.out
    assert len(set(killed_at)) > kills // 3, "the kills came all at the same moment"


def _readable(run: Path) -> None:
    """Whatever happened, what is there can be read: every checkpoint whole, every line of the metrics."""
    for path in copies(run):
        open_checkpoint(path)
    if (run / "metrics.jsonl").exists():
        whole = (run / "metrics.jsonl").read_bytes().rpartition(b"\n")[0]
        assert all(line.startswith(b"{") and line.endswith(b"}") for line in whole.splitlines())


def _killed_equals_straight(folder: Path, commands: Commands, changes: dict[str, Any], kills: int, seed: int) -> None:
    (folder / "tiny.toml").write_text("")
    straight = commands.run(folder, "train", "tiny.toml", *overrides(folder, changes, "straight"))
    assert straight.status == 0, straight
    _kill_at_random(folder, commands, changes, kills, seed)
    assert figures(folder / "run") == figures(folder / "straight")
    assert [entry["step"] for entry in entries(folder / "run")] == list(range(1, changes["train.steps"] + 1))


KILLED: dict[str, Any] = {
    "train.steps": 30,
    "checkpoint.every_steps": 5,
    "checkpoint.keep_last": 2,
    "evaluate.every_steps": 7,
    "evaluate.tokens": 200,
    "model.dropout": 0.1,
    "optim.name": "muon",
}


def test_killed_three_times_is_uninterrupted_bit_for_bit(tmp_path: Path, commands: Commands) -> None:
    _killed_equals_straight(tmp_path, commands, KILLED, kills=3, seed=1)


@pytest.mark.campaign
@pytest.mark.slow
def test_killed_twenty_times_is_uninterrupted_bit_for_bit(tmp_path: Path, commands: Commands) -> None:
    changes = KILLED | {"train.steps": 200, "optim.name": "adamw", "logging.every_steps": 3}
    _killed_equals_straight(tmp_path, commands, changes, kills=20, seed=2)


class _Death(BaseException):
    """Stands for SIGKILL: no handler of the program's own may stop it."""


def test_death_at_any_point_of_a_checkpoint(tmp_path: Path, straight: Figures) -> None:
    points = [
        "checkpoint.begin",
        "checkpoint.tensors-written",
        "persist.manifest-written",
        "checkpoint.before-rename",
        "checkpoint.after-rename",
        "checkpoint.published",
    ]
    config, hits = configured(tmp_path, {"checkpoint.every_steps": 2}), []

    def die(**_details: Any) -> None:
        hits.append(1)
        if len(hits) % 2 == 0:  # the first checkpoint after each start is whole
            raise _Death

    for point in points:
        with pytest.raises(_Death):
            finish(begin(config, points=Points({point: die})))
    finish(begin(config))
    assert len(hits) == 2 * len(points)
    assert figures(tmp_path / "run") == straight


def _flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 1000)


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [_flip, _truncate, _empty, lambda path: (path / "manifest.json").write_text("{")])
def test_a_damaged_newest_checkpoint_is_passed_over_and_said(
    twelve: Path, straight: Figures, damage: Callable[[Path], object]
) -> None:
    damage(twelve / "run" / "checkpoints" / "step-00000012")
    printed = run_all(twelve)
    assert "checkpoint step-00000012 is damaged" in printed
    assert "step 10 of 20" in printed
    assert figures(twelve / "run") == straight


@pytest.mark.parametrize("how", [_flip, lambda path: (path / "__0_0.distcp").unlink()])
def test_when_all_are_damaged_the_run_does_not_start_anew(twelve: Path, how: Callable[[Path], object]) -> None:
    """It would delete what a person may still mend."""
    for path in copies(twelve / "run"):
        how(path)
    before = list(copies(twelve / "run"))
    with pytest.raises(UserError, match="no good state is left") as refused:
        run_all(twelve)
    for path in before:
        assert f"checkpoint {path.name} is damaged" in refused.value.problem
    assert list(copies(twelve / "run")) == before


BOUND = {
    "model.rope_theta": (5000.0, r"model.rope_theta: 10000.0 -> 5000.0 \(the shapes or"),  # of equal shapes
    "data.seed": (3, r"data.seed: 0 -> 3 \(the order of the samples\)"),
    "optim.bad_step.history": (64, r"optim.bad_step.history: 128 -> 64 \(the history"),
}


@pytest.fixture(scope="module")
def shared(trained: Path) -> dict[str, Any]:
    """Settings with which a run has been trained for 5 steps whose checkpoints are outside its folder."""
    settings = {"checkpoint.folder": str(trained / "shared")}
    run_all(trained, settings | {"train.steps": 5}, "elsewhere")
    return settings


@pytest.mark.parametrize("resume", ["same", "changed"])
@pytest.mark.parametrize("key", BOUND)
def test_what_a_run_is_bound_to_is_kept_with_its_checkpoints(
    trained: Path, shared: dict[str, Any], key: str, resume: str
) -> None:
    """The config of the former run lies in another folder, which need not be here."""
    value, told = BOUND[key]
    with pytest.raises(UserError, match=f"checkpoint.folder = .*{told}.*put that back") as refused:
        run_all(trained, shared | {"run.resume": resume, "optim.lr": 0.5, key: value}, f"{key} {resume}")
    assert "model.heads" not in str(refused.value)


def test_what_a_run_may_change_is_asked_for_wherever_its_folder_is(trained: Path, shared: dict[str, Any]) -> None:
    shared = {"checkpoint.folder": str(shutil.copytree(shared["checkpoint.folder"], trained / "copy"))}
    other = {"optim.lr": 0.5, "logging.every_steps": 3}
    with pytest.raises(UserError, match=r"optim.lr: [^,]* -> 0.5\).*run.resume=changed"):
        run_all(trained, shared | other, "other")
    with pytest.raises(UserError, match="already holds the checkpoints of a run"):
        run_all(trained, shared | {"run.resume": "never"}, "other")
    printed = run_all(trained, shared | other | {"run.resume": "changed"}, "other")
    assert all(printed.count(told) == 1 for told in ("-> 0.5", "train.steps: 5 -> 20", "logging.every_steps: "))
    assert "(step 5 of 20)" in printed


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100), lambda path: path.write_text("")])
def test_without_a_config_the_one_of_the_checkpoint_counts(five: Path, damage: Callable[[Path], object]) -> None:
    damage(five / "run" / "config.json")
    with pytest.raises(UserError, match=r"run.folder = .*data.seed: 0 -> 3"):
        run_all(five, {"data.seed": 3})
    printed = run_all(five)
    assert printed.count("train.steps: 5 -> 20") == 1
    assert ("config.json is damaged" in printed) == (damage is not Path.unlink)
    assert RunFolder(five / "run").config() == configured(five)


def test_what_is_in_both_is_told_once_and_asked_for_once(five: Path) -> None:
    """Also where a start with other settings ended before any checkpoint knew of them."""
    changed = {"optim.lr": 0.5, "train.steps": 10}
    notes: list[str] = []
    run = begin(configured(five, changed | {"run.resume": "changed"}), notes)
    run.saver.finish(clean=False)
    run.folder.release()
    assert sum("-> 0.5" in line for line in [*run.folder.changes, *notes]) == 1
    printed = run_all(five, changed)
    assert "-> 0.5" not in printed and "(step 5 of 10)" in printed


def test_a_run_is_not_made_shorter_than_it_is(five: Path) -> None:
    with pytest.raises(UserError, match=r"train.steps = 3: the run is at step 5 already.*set train.steps=5 or more"):
        run_all(five, {"train.steps": 3, "run.resume": "changed"})
    assert RunFolder(five / "run").config().train.steps == 5


def test_weights_that_are_restored_are_not_drawn_first(
    tmp_path: Path, straight: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(assemble, "initialise", lambda *given: (drawn.append(1), initialise(*given)))
    run = begin(configured(tmp_path))
    _stop_at(run, 4)
    finish(run)
    assert len(drawn) == 1
    finish(begin(configured(tmp_path)))
    assert len(drawn) == 1
    assert figures(tmp_path / "run") == straight


def test_old_checkpoints_go_and_every_nth_stays(tmp_path: Path) -> None:
    run_all(tmp_path, {"checkpoint.every_steps": 3, "checkpoint.keep_last": 2, "checkpoint.keep_every": 6})
    names = [path.name for path in copies(tmp_path / "run")]
    assert names == [f"step-{step:08d}" for step in (6, 12, 18, 20)]
