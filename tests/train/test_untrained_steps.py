"""Steps of which no token is a target: they count, and change nothing."""

from __future__ import annotations

import itertools
import json
import math
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from train_helpers import begin, configured, entries, finish, run_all

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.train.evaluation import Evaluation
from phalanx.train.reports.reporter import describe
from phalanx.train.summary import closing
from phalanx.train.training_run import Run

LONG_PROMPTS: dict[str, Any] = {
    "data.sources.0.prompt_field": "question",
    "train.global_batch": 1,
    "train.micro_batch": 1,
    "telemetry.recompute_sigma": 6.0,
    "optim.bad_step.min_history": 4,
}


def _long_prompts(folder: Path) -> None:
    """Of a document of 44 tokens four are targets."""
    chosen = random.Random(0)
    lines = [{"question": "".join(chosen.choices(string.ascii_letters, k=40)), "text": "yes"} for _ in range(60)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _state(run: Run) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.state_tensors().items()}


@pytest.mark.parametrize("enabled", [True, False])
def test_prompts_longer_than_samples_train_what_there_is(tmp_path: Path, enabled: bool) -> None:
    """Two more in a row than the policy lets be bad, with neither an error nor a number that is none."""
    _long_prompts(tmp_path)
    changes = LONG_PROMPTS | {"optim.bad_step.enabled": enabled, "optim.bad_step.max_in_a_row": 1}
    run = begin(configured(tmp_path, changes))
    states: list[tuple[bool, dict[str, Tensor]]] = []
    original = run.accumulate_gradients

    def noted(batch: Batch) -> Tensor:
        states.append((not batch.weights_BS.any(), _state(run)))
        return original(batch)

    run.accumulate_gradients = noted  # type: ignore[method-assign]
    result = finish(run)
    states.append((False, _state(run)))
    untrained = [number + 1 for number, (is_empty, _) in enumerate(states) if is_empty]
    assert 4 < len(untrained) < 16
    steps = entries(tmp_path / "run")
    assert [entry["step"] for entry in steps if entry.get("untrained")] == untrained
    assert [entry["step"] for entry in steps if "loss" not in entry] == untrained
    assert not any(entry["skipped"] or "not_finite" in entry for entry in steps)
    for (is_empty, before), (_, after) in itertools.pairwise(states):
        equal = all(torch.equal(before[name], after[name]) for name in before)
        assert equal == is_empty
    assert all(bool(p.isfinite().all()) for p in run.trainer.parameters.values())
    assert result.steps == 20
    assert run.progress.untrained == len(untrained)
    assert f"{len(untrained)} of 20 steps had no target" in closing(run, result)
    assert (result.loss is None) == (20 in untrained)


def test_a_run_that_goes_on_counts_all_of_them_and_tells_the_first(tmp_path: Path) -> None:
    _long_prompts(tmp_path)
    told = [run_all(tmp_path, LONG_PROMPTS | {"train.steps": steps}) for steps in (10, 20)]
    count = sum(bool(entry.get("untrained")) for entry in entries(tmp_path / "run"))
    assert f"{count} of 20 steps had no target and changed nothing" in told[1]
    for text in told:
        assert text.count("no token of its batch is a target, so it changes nothing; where prompts are longer") == 1
        assert "  loss no targets  " in text
        assert "nan" not in text


def test_held_out_text_without_targets_has_no_loss(tmp_path: Path) -> None:
    """It is said, and neither NaN nor 0 is written down."""
    _long_prompts(tmp_path)
    original = Run.held_out

    def emptied(self: Run, tokens: int) -> Any:
        text = original(self, tokens)
        for batch in (batches := list(text.batches)):
            batch.weights_BS.zero_()
        return type(text)(batches, text.samples, text.of_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "held_out", emptied)
        told = run_all(tmp_path, LONG_PROMPTS | {"train.steps": 4, "evaluate.every_steps": 2})
    assert [entry["validation_tokens"] for entry in entries(tmp_path / "run", "evaluation")] == [0, 0]
    assert not any("validation_loss" in entry for entry in entries(tmp_path / "run", "evaluation"))
    assert "held-out text: no token that was looked at is a target" in told
    nothing = Evaluation(math.nan, 0, 0)
    assert Evaluation.from_figures(nothing.figures()).tokens == 0
    assert "nan" not in describe(nothing)


def test_evaluating_text_without_targets_is_refused(tmp_path: Path) -> None:
    """One sample of it is looked at, which begins with a prompt."""
    _long_prompts(tmp_path)
    run_all(tmp_path, LONG_PROMPTS | {"train.steps": 2, "evaluate.final_tokens": 16})
    asked = ["evaluate", str(tmp_path / "run"), "--tokens", "16", "--json"]
    found = CliRunner().invoke(group, asked)
    assert isinstance(found.exception, UserError), found.output
    assert "no token of the held-out text is a target" in str(found.exception)
