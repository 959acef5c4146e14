"""Looking at held-out text: how much of it, what is shown, ending it early, and whose figures a checkpoint has."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from support.tiny import write_corpus
from torch import Tensor
from train_helpers import (
    Commands,
    begin,
    configured,
    copies,
    entries,
    figures,
    finish,
    killed_in_evaluation,
    overrides,
    run_all,
)

from phalanx.checkpoint.format import checkpoint_files as kept
from phalanx.checkpoint.format.checkpoint_files import EVALUATION, FolderFiles, examine, read_evaluation
from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.ipc.stop_request import StopRequest
from phalanx.train import session
from phalanx.train.config import EvaluateConfig
from phalanx.train.evaluation import Evaluation, held_out_loss
from phalanx.train.reports.display import EvaluationProgress, LiveDisplay, PlainDisplay
from phalanx.train.reports.reporter import describe
from phalanx.train.training_run import Run

MODES: dict[str, dict[str, Any]] = {
    "blocking": {"checkpoint.mode": "blocking"},
    "waiting": {"checkpoint.mode": "background", "checkpoint.wait": True},
    "background": {"checkpoint.mode": "background"},
}


def _signal_in_evaluation(run: Run, number: int = signal.SIGINT, evaluation: int = 1, batch: int = 3) -> list[int]:
    """A signal while one of a run's evaluations looks at one of its batches; returns how many each has looked at."""
    original: Callable[[Iterable[Batch]], Tensor] = run.trainer.held_out_loss
    looked: list[int] = []

    def watched(batches: Iterable[Batch]) -> Iterator[Batch]:
        for one in batches:
            looked[-1] += 1
            if (len(looked), looked[-1]) == (evaluation, batch):
                os.kill(os.getpid(), number)
            yield one

    def held_out_loss(batches: Iterable[Batch]) -> Tensor:
        looked.append(0)
        return original(watched(batches))

    run.trainer.held_out_loss = held_out_loss  # type: ignore[method-assign]
    return looked


def _metrics(run: Path) -> dict[int, dict[str, float]]:
    """Held-out figures of every checkpoint, by step."""
    found = [examine(path) for path in copies(run)]
    return {manifest.step: manifest.metrics for manifest in found}


@pytest.mark.campaign(but=("blocking", "background"))
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_carries_the_evaluation_of_its_own_step(tmp_path: Path, mode: str) -> None:
    run_all(tmp_path, MODES[mode] | {"evaluate.every_steps": 10, "evaluate.tokens": 100})
    found = _metrics(tmp_path / "run")
    evaluated = {entry["step"]: entry["validation_loss"] for entry in entries(tmp_path / "run", "evaluation")}
    assert {step: metrics.get("validation_loss") for step, metrics in found.items()} == {
        step: evaluated.get(step) for step in found
    }
    assert 20 in found
    if mode != "background":  # that takes some a step later, or leaves them out, where steps are this short
        assert list(found) == [5, 10, 15, 20]
    assert list(evaluated) == [10, 20]  # the last step once, with the tokens of the end


@pytest.mark.campaign(but=("waiting",))
@pytest.mark.parametrize("mode", ["blocking", "waiting"])
def test_the_best_are_found_among_the_evaluated_alone(tmp_path: Path, mode: str) -> None:
    """The loss falls: the best two are the last two that were evaluated, and not their neighbours."""
    changes = {"evaluate.every_steps": 4, "checkpoint.every_steps": 2, "checkpoint.keep_last": 1}
    run_all(tmp_path, MODES[mode] | changes | {"checkpoint.keep_best": 3})
    assert list(_metrics(tmp_path / "run")) == [12, 16, 20]


def test_the_end_looks_at_a_bounded_amount_and_says_of_how_much(tmp_path: Path) -> None:
    assert 0 < EvaluateConfig().final_tokens < 10_000_000
    printed = run_all(tmp_path, {"evaluate.final_tokens": 320})
    (entry,) = entries(tmp_path / "run", "evaluation")
    assert entry["validation_tokens"] <= 320
    assert re.search(r"held-out text: loss .* \(\d+ of \d+ tokens\)\n", printed)
    printed = run_all(tmp_path, run="all")
    assert re.search(r"held-out text: loss .* \(\d+ tokens\)\n", printed)


@pytest.mark.campaign(but=("15",))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_last_evaluation_is_ended_by_a_signal_with_what_it_found(tmp_path: Path, number: signal.Signals) -> None:
    run_all(tmp_path, run="straight")
    run = begin(configured(tmp_path))
    looked = _signal_in_evaluation(run, number)
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=200))
    try:
        outcome = session.train_assembled(run, display)
    finally:
        run.folder.release()
    assert looked == [3]  # the batch in progress is the last
    assert (outcome.stopped_by, outcome.evaluation) == (number.name, None)
    assert "step 20: held-out loss" in out.getvalue()
    assert "tokens, ended early)" in out.getvalue()
    assert f"stopped by {number.name}[/] after step 20 of 20, in the evaluation" in session.closing(run, outcome)
    assert list(_metrics(tmp_path / "run")) == [5, 10, 15, 20]
    assert _metrics(tmp_path / "run")[20] == {}
    assert entries(tmp_path / "run", "evaluation") == []
    assert finish(begin(configured(tmp_path))).stopped_by == ""
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


@pytest.mark.campaign(but=("1",))
@pytest.mark.parametrize("evaluation", [1, 2])
def test_an_evaluation_on_the_way_is_ended_too_and_made_up_for(tmp_path: Path, evaluation: int) -> None:
    changes = {"evaluate.every_steps": 6, "model.dropout": 0.1}
    run_all(tmp_path, changes, "straight")
    run = begin(configured(tmp_path, changes))
    looked = _signal_in_evaluation(run, evaluation=evaluation)
    assert finish(run).stopped_by == "SIGINT"
    assert looked[-1] == 3
    assert run.progress.step == 6 * evaluation
    assert max(_metrics(tmp_path / "run")) == 6 * evaluation
    again = begin(configured(tmp_path, changes))  # and once more while that is made up for
    assert _signal_in_evaluation(again) == []
    assert finish(again).stopped_by == "SIGINT"
    assert again.progress.step == 6 * evaluation
    finish(begin(configured(tmp_path, changes)))
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")


def test_a_finished_run_is_not_evaluated_again_unless_more_is_asked_for(tmp_path: Path) -> None:
    changes = {"evaluate.final_tokens": 320}
    first = run_all(tmp_path, changes).splitlines()
    run = begin(configured(tmp_path, changes))
    looked = _signal_in_evaluation(run)
    outcome = finish(run)
    assert looked == []
    assert outcome.evaluation is not None
    assert f"held-out text: {describe(outcome.evaluation)}" in first
    run = begin(configured(tmp_path))
    looked = _signal_in_evaluation(run, batch=-1)
    assert finish(run).evaluation is not None
    assert len(looked) == 1


@pytest.mark.campaign(but=("0-blocking", "10-background"))
@pytest.mark.parametrize("mode", ["blocking", "background"])
@pytest.mark.parametrize("every_steps", [0, 10])
def test_a_kill_in_an_evaluation_loses_no_step(tmp_path: Path, commands: Commands, mode: str, every_steps: int) -> None:
    """The checkpoint of the step is there, or in memory, before held-out text is looked at."""
    changes = {"checkpoint.every_steps": 10, "evaluate.every_steps": every_steps, "checkpoint.mode": mode}
    run_all(tmp_path, changes, "straight")
    step = every_steps or 20
    killed = commands.call(killed_in_evaluation, overrides(tmp_path, changes), 2)
    assert killed == -signal.SIGKILL
    assert entries(tmp_path / "run", "evaluation") == []
    if step == 20:
        assert max(_metrics(tmp_path / "run")) == 20
    notes: list[str] = []
    again = begin(configured(tmp_path, changes), notes)
    assert again.progress.step == step and any(f"(step {step} of 20)" in note for note in notes)
    made: list[int] = []
    again.updated = lambda updated=again.updated: made.append(1) or updated()  # type: ignore[method-assign, misc]
    assert finish(again).evaluation is not None
    assert len(made) == 20 - step
    again.saver.finish(clean=True)
    assert figures(tmp_path / "run") == figures(tmp_path / "straight")
    found, straight = _metrics(tmp_path / "run"), _metrics(tmp_path / "straight")
    assert {20: straight[20]}.items() <= found.items() <= straight.items()
    assert "validation_loss" in found[20] and (mode == "background" or found == straight)


def test_an_evaluation_beside_a_checkpoint_that_is_torn_is_none(tmp_path: Path) -> None:
    run_all(tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step-00000020" / EVALUATION
    good = path.read_bytes()
    other = b'{"step": 20, "metrics": {"validation_loss": 0}, "sha256": "00"}'
    for harm in (b"", b"{", other, good[:-30]):
        path.write_bytes(harm)
        assert _metrics(tmp_path / "run")[20] == {}
        run = begin(configured(tmp_path))
        looked = _signal_in_evaluation(run, batch=-1)
        assert finish(run).evaluation is not None and len(looked) == 1
        assert path.read_bytes() == good


def test_figures_make_the_round_trip() -> None:
    for evaluation in (Evaluation(3.21, 1234, 4567), Evaluation(2.5, 99, 0)):
        assert Evaluation.from_figures(evaluation.figures()) == evaluation


def test_token_files_without_a_tokenizer_are_evaluated_without_bytes(tmp_path: Path) -> None:
    for name, count in (("train.bin", 4000), ("val.bin", 500)):
        (np.arange(count, dtype=np.uint16) % 50).tofile(tmp_path / name)
    changes: dict[str, Any] = {"data.sources.0.kind": "nanogpt", "data.tokenizer.kind": "none"}
    changes |= {"data.tokenizer.vocab_size": 50, "data.validation_fraction": None}
    changes["data.sources.0.path"] = [str(tmp_path / "train.bin"), str(tmp_path / "val.bin")]
    printed = run_all(tmp_path, changes | {"evaluate.every_steps": 10})
    assert "held-out text: loss" in printed
    assert "bits per byte" not in printed
    assert "validation_bits_per_byte" not in entries(tmp_path / "run", "evaluation")[0]


def test_the_time_left_counts_evaluations(tmp_path: Path) -> None:
    run = begin(configured(tmp_path, {"evaluate.every_steps": 5}))
    reporters: list[Any] = []
    display = PlainDisplay(Console(file=io.StringIO()))
    logger = session.open_loggers(run.config.logging, run.folder.path, 0)
    reporter = session.make_reporter(run, display, logger)
    report = reporter.report

    def watching(reports: Any, *, shown: bool = True) -> None:
        if reports:
            left_s, rate = reporter._evaluations_left_s(reports[-1]), reporter._evaluation_s_per_token
            reporters.append((run.progress.step, left_s, reports[-1], rate))
        report(reports, shown=shown)

    reporter.report = watching  # type: ignore[method-assign]
    session.train(run, reporter)
    logger.close()
    run.folder.release()
    left = {step: (seconds, found) for step, seconds, found, _ in reporters}
    tokens_left = {step: seconds / rate for step, seconds, _, rate in reporters if rate}
    tokens = run.held_out(0).samples * 16
    seconds, first = left[1]  # nothing was measured yet: a third of a token that is trained on
    assert seconds == pytest.approx(4 * tokens / (3 * first.tokens_per_s))
    assert 0 < tokens_left[20] < tokens_left[14]  # how long one takes is measured anew by each evaluation
    assert left[20][0] == pytest.approx(left[19][0], rel=1e-6)  # the same rate, the last one is ahead in both


def test_a_terminal_shows_a_bar_with_what_is_left() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=100))
    display.evaluating(EvaluationProgress(300, 120_000, 500_000, 12.0))
    display._live.refresh()
    display.evaluating(None)
    display.close()
    assert "evaluating" in out.getvalue()
    assert "120k of 500k tokens, left 12.0s" in out.getvalue()


def test_a_log_has_a_line_every_half_a_minute() -> None:
    out, now_s = io.StringIO(), [0.0]
    display = PlainDisplay(Console(file=out, width=100), lambda: now_s[0])
    for second in range(100):
        now_s[0] = float(second)
        display.evaluating(EvaluationProgress(300, second * 1000, 100_000, 100.0 - second))
    display.evaluating(None)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "step 300: evaluating, 30k of 100k tokens, left 1m10s"


class _Meeting:
    """One of two ranks that tell each other numbers, in threads."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, told: list[int]) -> None:
        self.rank, self._barrier, self._told = rank, barrier, told

    def ask_highest(self, value: int) -> Callable[[], int]:
        self._told[self.rank] = value

        def answer() -> int:
            self._barrier.wait()
            highest = max(self._told)
            self._barrier.wait()
            return highest

        return answer


def test_ranks_end_an_evaluation_after_the_same_batch() -> None:
    """Only one of them is told, in the middle of its fourth."""
    barrier, told, seen = threading.Barrier(2, timeout=120), [0, 0], [0, 0]

    def rank(index: int) -> None:
        stop = StopRequest(_Meeting(index, barrier, told))  # type: ignore[arg-type]
        for item in stop.until_asked(range(100)):
            seen[index] = item
            if (index, item) == (1, 3):
                stop.number = signal.SIGINT
        assert stop.is_agreed
        assert stop.name == "SIGINT"

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [4, 4]


def test_evaluate_shows_what_it_found_until_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path, documents=400)
    run_all(tmp_path, {"train.steps": 3, "data.validation_fraction": 0.5})
    original = held_out_loss

    def stopped(model: Any, batches: Iterable[Batch], device: Any) -> Tensor:
        def watched() -> Iterator[Batch]:
            for number, batch in enumerate(batches):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield batch

        return original(model, watched(), device)

    monkeypatch.setattr("phalanx.train.evaluation.held_out_loss", stopped)
    with pytest.raises(SystemExit) as ended:
        group(["evaluate", str(tmp_path / "run"), "--device", "cpu"])
    assert ended.value.code == 130
    told = capsys.readouterr()
    assert "step 3: held-out loss" in told.out
    assert "ended early" in told.out
    assert "stopped by SIGINT" in told.err


def test_what_cannot_be_sampled_in_the_end_is_refused_in_the_beginning(tmp_path: Path) -> None:
    config = configured(tmp_path, {"evaluate.sample_prompt": "word " * 9})
    with pytest.raises(UserError, match=r"evaluate.sample_prompt: it takes 46 tokens.*longest sequence is 16; shorten"):
        begin(config)


@pytest.mark.campaign(but=("blocking",))
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_not_finite_is_an_error_with_a_cure(tmp_path: Path, mode: str) -> None:
    changes = MODES[mode] | {"train.steps": 5, "checkpoint.keep_best": 1}
    run = begin(configured(tmp_path, changes))
    run.trainer.held_out_loss = lambda batches: sum(0 for _ in batches) + torch.tensor(torch.nan)  # type: ignore
    says = r"held-out text is not finite \(nan\): the weights of step 5 are of no use; .*lower optim.lr"
    try:
        with pytest.raises(UserError, match=says):
            finish(run)
    finally:
        run.saver.finish(clean=True)
    assert str(entries(tmp_path / "run", "evaluation")[-1]["validation_loss"]).lower() in ("nan", "none")
    result = CliRunner().invoke(group, ["checkpoint", "ls", str(tmp_path / "run")])
    assert result.exit_code == 0 and "step-00000005" in result.output
    with pytest.raises(UserError, match=says):  # the next start neither looks again nor calls it done
        run_all(tmp_path, changes)


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_figures_that_are_not_finite_are_read_again(loss: float) -> None:
    evaluation = Evaluation(loss, 10, 30)
    again = Evaluation.from_figures(evaluation.figures())
    assert str(again.loss) == str(loss) and again.tokens == 10


def test_a_figure_too_large_is_damage(tmp_path: Path) -> None:
    run_all(tmp_path, {"train.steps": 5})
    (path,) = [one for one in copies(tmp_path / "run") if one.name.endswith("5")]
    tree = {"step": 5, "metrics": {"validation_loss": 10**400}, "state": {}}
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (path / EVALUATION).write_text(json.dumps(tree | {"sha256": digest}))
    notes: list[str] = []
    assert read_evaluation(FolderFiles(path), 5, notes.append) == kept.Evaluation(5)
    assert "is damaged" in notes[0]
