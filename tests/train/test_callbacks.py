"""What a user's callbacks hear, and what their answers and errors do to a run; and training from Python."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import click
import pytest
from spread_targets import CALLED
from train_helpers import Commands, configured, entries, overrides

from phalanx.api.simulation import DEFAULTS, simulate
from phalanx.api.training import load_config, train
from phalanx.cli.simulate_failures import command
from phalanx.core.errors import UserError
from phalanx.ipc.stop_request import exit_status
from phalanx.train.evaluation import Evaluation
from phalanx.train.reports.callbacks import Callback, CallbackError, CheckpointReport, StepReport


class Noted(Callback):
    """Keeps what it is called with; answers or fails at one step."""

    def __init__(self, at: int = 0, answer: Any = None) -> None:
        self.at, self.answer = at, answer
        self.steps: list[StepReport] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.checkpoints: list[CheckpointReport] = []

    def on_step(self, report: StepReport) -> Any:
        self.steps.append(report)
        if report.step != self.at:
            return None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations.append((step, evaluation))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        self.checkpoints.append(report)


def test_callbacks_get_every_step_evaluation_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = Noted()
    changes = {"logging.every_steps": 3, "evaluate.every_steps": 10}
    result = train(configured(tmp_path, changes), callbacks=[noted], quiet=True)
    assert capsys.readouterr().out == ""
    assert [report.step for report in noted.steps] == list(range(1, 21))
    assert [report.step for report in noted.steps if report.is_shown] == [3, 6, 9, 12, 15, 18, 20]
    logged = entries(tmp_path / "run")
    assert [(r.loss, r.lr, r.grad_norm, r.tokens) for r in noted.steps] == [
        (e["loss"], e["lr"], e["grad_norm"], e["tokens"]) for e in logged
    ]
    assert {report.total_steps for report in noted.steps} == {20} and noted.steps[-1].left_s is not None
    assert [step for step, _ in noted.evaluations] == [10, 20]
    assert [(report.step, report.persist) for report in noted.checkpoints] == [(step, True) for step in (5, 10, 15, 20)]
    assert noted.checkpoints[0].name == "step-00000005" and noted.checkpoints[0].figures["checkpoint/persist_bytes"] > 0
    assert (result.steps, result.tokens, result.stopped_by) == (20, 20 * 4 * 16, "")
    assert result.loss == noted.steps[-1].loss and result.folder == tmp_path / "run"
    assert result.evaluation is not None and result.evaluation.loss == noted.evaluations[-1][1].loss
    with pytest.raises(FrozenInstanceError):
        noted.steps[0].loss = 0.0  # type: ignore[misc]


def test_a_callback_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    result = train(configured(tmp_path), callbacks=[Noted(7, "stop"), noted := Noted()], quiet=True)
    assert (result.stopped_by, result.steps, result.evaluation) == ("a callback", 8, None)
    assert noted.checkpoints[-1].name == "step-00000008" and exit_status(result.stopped_by) == 0
    again = train(configured(tmp_path), quiet=True)
    assert (again.steps, again.stopped_by) == (20, "")
    done = train(configured(tmp_path), quiet=True)  # nothing is left to do
    assert done.loss is None and done.evaluation == again.evaluation


@pytest.mark.parametrize(
    ("answer", "why"),
    [(ZeroDivisionError("of mine"), r"ZeroDivisionError: of mine"), ("halt", r"TypeError: returned 'halt'")],
)
def test_an_error_of_a_callback_ends_the_run_with_its_name(tmp_path: Path, answer: Any, why: str) -> None:
    noted = Noted(7, answer)
    told = rf"Noted\.on_step failed at step 7 \({why}.*goes on from its newest"
    with pytest.raises(CallbackError, match=told) as caught:
        train(configured(tmp_path), callbacks=[noted], quiet=True)
    assert isinstance(caught.value.__cause__, type(answer) if isinstance(answer, Exception) else TypeError)
    assert noted.steps[-1].step == 7 and not noted.evaluations  # nothing is called after an error
    assert len(entries(tmp_path / "run")) == 8
    assert train(configured(tmp_path), quiet=True).steps == 20


def test_callbacks_are_called_on_the_first_rank_alone(tmp_path: Path, commands: Commands) -> None:
    config = configured(tmp_path, {"parallel.replicate": 2, "train.steps": 4})
    assert commands.ranks(tmp_path, config, "spread_targets:train_with_callback", str(tmp_path)).status == 0
    assert (tmp_path / CALLED.format(0)).read_text() == "1 2 3"  # and stopped all ranks
    assert not (tmp_path / CALLED.format(1)).exists()


def test_what_train_cannot_do_is_refused_with_its_cure(tmp_path: Path) -> None:
    words = overrides(tmp_path)
    with pytest.raises(UserError, match=r"parallel: the config wants 2 ranks, and train\(\) is one.*torchrun"):
        train(load_config(None, [*words, "parallel.replicate=2"]), quiet=True)
    with pytest.raises(UserError, match=r"run\.folder: .*no file to name its run after; set it"):
        train(load_config(None, [word for word in words if not word.startswith("run.folder")]), quiet=True)
    with pytest.raises(UserError, match="takes no overrides; give them to load_config"):
        train(load_config(None, words), ["train.steps=3"])


def test_a_file_with_overrides_is_trained_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[train]\nsteps = 3\n")
    words = [word for word in overrides(tmp_path) if not word.startswith(("run.folder", "train.steps"))]
    assert train("mine.toml", words, quiet=True).folder == Path("runs/mine")
    assert len(entries(tmp_path / "runs" / "mine")) == 3


def test_settings_of_the_simulation_are_the_options_of_its_command() -> None:
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    others = {"devices", "runs", "seed", "compare", "as_json", "html", "help"}
    assert set(options) - others == set(DEFAULTS)
    with command.make_context("failures", ["--devices", "64"]) as context:
        assert {name: context.params[name] for name in DEFAULTS} == dict(DEFAULTS)
    with pytest.raises(UserError, match=r"sparse: is not a setting of the simulation; give some of .*spares"):
        simulate(64, sparse=1)
