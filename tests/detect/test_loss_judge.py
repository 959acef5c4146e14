"""Losses that leave their path are found, with the batch that did it; healthy curves are left alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.loss_curves import SAMPLES, HealthyCurve, Tail, Trouble, with_trouble, write_curve
from train_helpers import run_all

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.data.batch_text import Piece, SampleText
from phalanx.detect.drift.batch_of_step import odd_first
from phalanx.detect.drift.loss_judge import LossPolicy, judge, judge_run

POLICY = LossPolicy()


@pytest.mark.parametrize("tail", ["normal", "skewed", "heavy"])
def test_healthy_curves_are_left_alone(tail: Tail) -> None:
    for seed in range(30):
        steps = (100, 400, 1500)[seed % 3]
        healthy = HealthyCurve(steps, (0.005, 0.02, 0.08)[seed // 3 % 3], tail, min(100, steps // 4), seed % 2 * 0.4)
        verdict = judge(replace(healthy, seed=seed).curve(), POLICY)
        assert not verdict.detections, (healthy, verdict.sentence)
        assert verdict.exit_status == 0


@pytest.mark.parametrize(
    ("trouble", "what"),
    [
        ("bad batch", "loss spike"),
        ("bad update", "loss spike"),
        ("divergence", "divergence"),
        ("slow divergence", "divergence"),
        ("odd gradient", "gradient spike"),
        ("not finite", "not finite"),
    ],
)
@pytest.mark.parametrize("size", [0.6, 2.0])
def test_trouble_is_classed_and_the_batch_named(trouble: Trouble, what: str, size: float) -> None:
    for seed in range(5):
        step = 350 + 60 * seed
        curve = with_trouble(HealthyCurve(seed=seed).curve(), trouble, step, size)
        found = judge(curve, POLICY).detections
        assert [one.what for one in found] == [what], [one.sentence for one in found]
        batch = found[0].figures["batch_step"]
        assert isinstance(batch, int)
        if trouble == "slow divergence":
            assert 0 <= batch - step < 80  # a slow rise is seen when it has risen
            continue
        assert batch == step
        assert found[0].figures["first_sample"] == (step - 1) * SAMPLES
        assert found[0].figures["samples"] == SAMPLES
        assert found[0].who[0].kind == "batch"
        assert (
            f"batch of step {step:,} (samples {(step - 1) * SAMPLES:,} to {step * SAMPLES - 1:,})" in found[0].sentence
        )


def test_a_spike_says_how_long_it_took_to_come_back() -> None:
    curve = HealthyCurve().curve()
    curve.loss[600:640] += 1.0
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.figures["is_over"]) == ("loss spike", 1)
    assert 38 <= int(found.figures["last_step"]) - int(found.figures["step"]) + 1 <= 46
    assert found.then[0].startswith("lower `optim.lr`")  # one batch is over sooner
    curve.loss[605:640] -= 1.0
    (found,) = judge(curve, POLICY).detections
    assert found.then[0].startswith("look at that batch")


def test_the_newest_steps_are_judged_too() -> None:
    curve = with_trouble(HealthyCurve().curve(), "bad batch", 1000, 1.5)
    (found,) = judge(curve, POLICY).detections
    assert found.figures["batch_step"] == 1000


def test_a_loss_that_is_not_finite_for_a_while_is_no_end() -> None:
    curve = HealthyCurve().curve()
    curve.loss[500] = np.inf
    curve.is_skipped[500] = True
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.figures["is_over"], found.advice) == ("not finite", 1, "watch")
    assert any("left out" in why for why in found.why)
    curve.loss[700:] = np.nan
    found, before = judge(curve, POLICY).detections
    assert (found.figures["step"], found.advice) == (701, "program")
    assert before.figures["step"] == 501


def test_updates_that_were_left_out_are_told_with_their_batch() -> None:
    curve = HealthyCurve().curve()
    curve.is_skipped[420] = True
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.figures["batch_step"]) == ("skipped step", 421)


def test_a_norm_that_grows_many_fold_is_told() -> None:
    curve = HealthyCurve(steps=2000).curve()
    curve.grad_norm[800:] *= np.linspace(1, 30, 1200)
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.advice) == ("growing gradient", "watch")


def test_few_steps_and_missing_norms_are_said() -> None:
    verdict = judge(HealthyCurve(steps=20, warm_up=5).curve(), POLICY)
    assert "let it train on" in verdict.abstains[0]
    assert verdict.exit_status == 3
    curve = replace(HealthyCurve().curve(), grad_norm=np.full(1000, np.nan))
    assert judge(curve, POLICY).exit_status == 0
    curve.loss[500] += 2.0
    verdict = judge(curve, POLICY)
    assert verdict.detections[0].what == "loss spike"
    assert any("grad_norm" in one for one in verdict.abstains)


def test_a_file_is_read_as_training_writes_it(tmp_path: Path) -> None:
    curve = with_trouble(HealthyCurve(steps=300, warm_up=20).curve(), "bad batch", 200, 2.0)
    curve.loss[250] = np.nan
    write_curve(curve, tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # torn by a kill
    verdict = judge_run(tmp_path)
    assert [(one.what, one.figures["step"]) for one in verdict.detections] == [("not finite", 251), ("loss spike", 200)]
    assert verdict.detections[1].figures["first_sample"] == 199 * SAMPLES
    shown = CliRunner().invoke(command, ["loss", str(tmp_path)])
    assert shown.exit_code == 1
    assert f"phalanx detect loss {tmp_path} --batch 200" in shown.output


def test_the_text_of_a_batch_is_shown_the_oddest_first(tmp_path: Path) -> None:
    run_all(tmp_path, {"train.steps": 4, "checkpoint.every_steps": 0})
    shown = CliRunner().invoke(command, ["loss", str(tmp_path / "run"), "--batch", "3"])
    assert shown.exit_code == 0, shown.output
    assert "step 3: 4 samples from 8, loss " in shown.output
    assert shown.output.count("compresses to") == 4
    found = json.loads(CliRunner().invoke(command, ["loss", str(tmp_path / "run"), "--batch", "3", "--json"]).output)
    assert sorted(one["number"] for one in found["texts"]) == [8, 9, 10, 11]
    missing = CliRunner().invoke(command, ["loss", str(tmp_path / "run"), "--batch", "99"])
    assert isinstance(missing.exception, UserError)


def test_what_repeats_itself_is_odd() -> None:
    texts = [
        "the quick brown fox jumps over a lazy dog while",
        "seven wizards mix a glass of green ink for him",
        "aa" * 24,
    ]
    samples = [SampleText(n, "corpus", 0, (Piece(0, True, True, 1, text),)) for n, text in enumerate(texts)]
    assert odd_first(samples)[0][0].number == 2
    assert odd_first([]) == []


def test_runs_without_a_loss_say_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        judge_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(UserError, match="no step has a loss"):
        judge_run(tmp_path)


def test_a_spike_in_the_last_step_has_not_come_back() -> None:
    curve = HealthyCurve().curve()
    curve.loss[-1] += 5.0
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.figures["is_over"]) == ("loss spike", 0)
    assert "has not come back yet" in found.sentence


def test_a_loss_that_freezes_is_told_and_a_rounded_one_is_not() -> None:
    frozen = HealthyCurve().curve()
    frozen.loss[600:] = frozen.loss[599]
    frozen.grad_norm[600:] = 0.0
    (found,) = judge(frozen, POLICY).detections
    assert (found.what, found.figures["step"], found.confidence) == ("frozen loss", 600, 0.95)
    zero = HealthyCurve().curve()
    zero.loss[600:] = 0.0
    (found,) = judge(zero, POLICY).detections
    assert (found.what, found.figures["step"]) == ("frozen loss", 601)
    rounded = HealthyCurve().curve()
    rounded.loss[:] = np.round(rounded.loss, 1)
    rounded.loss[700:800] = rounded.loss[700]
    assert not judge(rounded, POLICY).detections


@pytest.mark.filterwarnings("error")
def test_a_loss_near_the_largest_float_says_what_was_usual() -> None:
    curve = HealthyCurve().curve()
    usual = curve.loss[500]
    curve.loss[500] = 1e308
    (found,) = judge(curve, POLICY).detections
    assert found.figures["usual"] == pytest.approx(usual, rel=0.1)
    assert "more than a million" in found.why[0]


def test_a_step_up_without_the_gradient_may_be_other_data() -> None:
    curve = HealthyCurve().curve()
    curve.loss[600:] += 0.8
    (found,) = judge(curve, POLICY).detections
    assert (found.what, found.confidence) == ("divergence", 0.6)
    assert "or other data came" in found.sentence


def test_no_step_is_in_two_spikes() -> None:
    random = np.random.default_rng(7)
    curve = HealthyCurve(steps=600).curve()
    curve.loss[:] = 1 + 0.4 * np.sin(np.arange(600) / 30) + random.normal(0, 0.1, 600)
    found = [one for one in judge(curve, POLICY).detections if one.what == "loss spike"]
    spans = sorted((one.figures["step"], one.figures["last_step"]) for one in found)
    assert spans
    assert all(former[1] < later[0] for former, later in itertools.pairwise(spans))
