"""Where two runs part: by figures, norms, samples, settings and checkpoints, alone and together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from train_helpers import run_all

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.drift.diverge_judge import DivergePolicy, judge
from phalanx.detect.drift.run_pair import (
    CheckpointDifference,
    RunPair,
    Setting,
    TensorDifference,
    read_pair,
)

EXACT = DivergePolicy()


def _figures(steps: int = 20, **changes: tuple[int, float]) -> dict[int, tuple[dict[str, float], dict[str, float]]]:
    """Equal figures, but that `changes` of B begin at a step: (step, relative difference)."""
    found = {}
    for step in range(1, steps + 1):
        one = {"tokens": 512.0 * step, "lr": 1e-3, "loss": 8 - 0.1 * step, "grad_norm": 1.0, "skipped": 0.0}
        two = {
            name: value * (1 + changes[name][1]) if name in changes and step >= changes[name][0] else value
            for name, value in one.items()
        }
        found[step] = (one, two)
    return found


def _norms(
    steps: int, at: int, quantity: str, layers: list[str]
) -> dict[int, dict[tuple[str, str], tuple[float, float]]]:
    names = ["embedding", "layers.0", "layers.1", "norm"]
    return {
        step: {
            (of, layer): (1.0, 1.0 + (1e-7 if step >= at and of == quantity and layer in layers else 0))
            for of in ("weight", "activation", "gradient")
            for layer in names
        }
        for step in range(1, steps + 1)
    }


def test_equal_runs_are_equal() -> None:
    verdict = judge(RunPair("a", "b", _figures(), norms=_norms(20, 99, "weight", [])), EXACT)
    assert verdict.exit_status == 0
    assert "20 steps that both have, norms of 20, equal to the last bit" in verdict.sentence


def test_a_loss_that_differs_is_bounded_by_what_is_equal() -> None:
    pair = RunPair("a", "b", _figures(loss=(12, 1e-6), grad_norm=(13, 1e-6)), samples_from=0)
    (found,) = judge(pair, EXACT).detections
    assert found.since.step == 12
    assert "the loss differs at step 12, by its forward pass or by the update of step 11" in found.sentence
    assert "equal until step 11" in found.why[0]
    assert any("norms_every=1" in action for action in found.then)
    saved = RunPair("a", "b", pair.figures, checkpoints=(CheckpointDifference(11, 40),))
    assert "in its forward pass: the weights before it are equal" in judge(saved, EXACT).detections[0].sentence


def test_a_gradient_that_differs_first_is_of_the_backward_pass() -> None:
    pair = RunPair("a", "b", _figures(grad_norm=(7, 1e-6), loss=(8, 1e-6)))
    (found,) = judge(pair, EXACT).detections
    assert "gradient's norm differs at step 7, in its backward pass" in found.sentence


@pytest.mark.parametrize(
    ("quantity", "layers", "named"),
    [
        ("activation", ["layers.1", "norm"], "layers.1"),
        ("gradient", ["embedding", "layers.0"], "layers.0"),
        ("weight", ["layers.0"], "layers.0"),
    ],
)
def test_norms_name_the_layer_in_the_order_of_the_step(quantity: str, layers: list[str], named: str) -> None:
    pair = RunPair("a", "b", _figures(loss=(9, 1e-5), grad_norm=(9, 1e-5)), norms=_norms(20, 9, quantity, layers))
    (found,) = judge(pair, EXACT).detections
    if quantity == "gradient":  # the loss comes before it
        assert "the loss differs at step 9" in found.sentence
        assert any(f"first {named}" in why for why in found.why)
    else:
        assert found.who[0].name == f"{named} ({quantity})"
        assert f"the {quantity}s of {named} differ at step 9" in found.sentence


def test_other_samples_come_before_arithmetic() -> None:
    pair = RunPair("a", "b", _figures(loss=(5, 1e-2), grad_norm=(5, 1e-2)), samples_from=5)
    (found,) = judge(pair, EXACT).detections
    assert found.sentence.startswith("the runs part at step 5: they read other samples since step 5")
    assert found.who[0].kind == "batch"


def test_digests_name_the_tensor() -> None:
    unlike = {
        step: {"gradient": (), "weight": ("layers.0.mlp.up",) if step >= 6 else (), "optimizer": ()}
        for step in range(2, 12, 2)
    }
    pair = RunPair("a", "b", _figures(loss=(7, 1e-6)), digests=unlike)
    (found,) = judge(pair, EXACT).detections
    assert (found.since.step, found.who[0].name) == (6, "layers.0.mlp.up")
    assert "equal until step 4" in found.why[0]


def test_a_tolerance_lets_rounding_pass_and_says_how_far_runs_agree() -> None:
    figures = _figures(loss=(3, 2e-6), grad_norm=(3, 4e-6))
    settings = (Setting("parallel.tensor", 1, 2),)
    (found,) = judge(RunPair("a", "b", figures, settings=settings), EXACT).detections
    assert any("parallel.tensor 1 and 2 (layout)" in why for why in found.why)
    assert any("--tolerance" in action for action in found.then)
    assert found.advice == "none"
    verdict = judge(RunPair("a", "b", figures, settings=settings), DivergePolicy(tolerance=1e-5))
    assert verdict.exit_status == 0
    assert "largest relative difference of the loss 2e-06" in verdict.sentence
    row = verdict.tables["agreement"][0]
    assert (row["until_1e-06"], row["until_1e-05"]) == (2, 20)


def test_numbers_that_are_not_finite_are_compared() -> None:
    both = ({"loss": math.nan}, {"loss": math.nan})
    rest = {"tokens": 1.0, "lr": 1.0, "grad_norm": 1.0, "skipped": 0.0}
    figures = {1: (both[0] | rest, both[1] | rest), 2: (both[0] | rest, {"loss": 2.0} | rest)}
    (found,) = judge(RunPair("a", "b", figures), DivergePolicy(tolerance=0.5)).detections
    assert found.since.step == 2


def test_checkpoints_alone_name_the_tensor() -> None:
    other = TensorDifference("layers.1.attention.q", 1, 4096, 0.5, 0.25)
    pair = RunPair("a", "b", {}, checkpoints=(CheckpointDifference(10, 40), CheckpointDifference(20, 39, (other,))))
    (found,) = judge(pair, EXACT).detections
    assert found.sentence == (
        "the runs part at step 20: the checkpoint of step 20 differs in layers.1.attention.q, by a step after 10"
    )
    assert (found.who[0].kind, found.who[0].name) == ("tensor", "layers.1.attention.q")
    tolerant = judge(pair, DivergePolicy(tolerance=0.3))
    assert tolerant.exit_status == 0


def test_checkpoints_are_compared_up_to_the_first_that_differs(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    asked = []

    def compare(step: int) -> CheckpointDifference:
        asked.append(step)
        return CheckpointDifference(step, 1, (TensorDifference("x", 1, 1, 1.0, 1.0),) if step >= 20 else ())

    read_pair(tmp_path, tmp_path, [30, 20, 10], compare)
    assert asked == [10, 20]
    with pytest.raises(UserError, match="no figures of steps"):
        read_pair(tmp_path, tmp_path)


def test_settings_are_of_kinds() -> None:
    kinds = {
        "parallel.tensor": "layout",
        "data.sequence_length": "data",
        "data.folder": "no number",
        "run.folder": "no number",
        "train.seed": "seed",
        "train.steps": "schedule",
        "optim.lr": "optimizer",
        "model.layers": "model",
        "kernels.attention": "other",
    }
    assert {key: Setting(key, 1, 2).kind for key in kinds} == kinds


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of twelve steps: two that are the same, one with another seed of its data, one with another rate."""
    folder = tmp_path_factory.mktemp("diverge")
    usual = {"train.steps": 12, "checkpoint.every_steps": 4, "telemetry.norms_every": 1, "telemetry.digests_every": 3}
    changes: Mapping[str, dict[str, Any]] = {
        "one": {},
        "two": {},
        "order": {"data.seed": 5},
        "rate": {"optim.schedule.warmup_steps": 3},
    }
    for name, change in changes.items():
        run_all(folder, usual | change, run=name)
    return folder


def _diverge(folder: Path, a: str, b: str) -> dict[str, Any]:
    shown = CliRunner().invoke(command, ["diverge", str(folder / a), str(folder / b), "--json"])
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    found = json.loads(shown.stdout)
    assert isinstance(found, dict)
    return found | {"status": shown.exit_code}


def test_real_runs_are_equal_or_part_where_they_must(trained: Path) -> None:
    same = _diverge(trained, "one", "two")
    assert same["status"] == 0
    assert "12 steps that both have, norms of 12, digests of " in same["sentence"]
    assert "3 checkpoints, equal to the last bit" in same["sentence"]
    order = _diverge(trained, "one", "order")
    assert order["status"] == 1
    assert order["detections"][0]["figures"] == order["detections"][0]["figures"] | {"step": 1, "moment": "samples"}
    rate = _diverge(trained, "one", "rate")
    assert "the learning rate differs at step 1" in rate["sentence"]
    assert rate["tables"]["tensors"][0]["step"] == 4


def test_a_digest_names_the_tensor_of_a_real_run(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "telemetry").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (copy / name).write_bytes((trained / "one" / name).read_bytes())
    digests = Path("telemetry") / "digests.jsonl"
    lines = [json.loads(line) for line in (trained / "one" / digests).read_text().splitlines()]
    for line in lines:  # as if a bit of one weight had flipped between two checks
        if line["step"] >= 6:
            line["of"]["weight"]["layers.1.attention.q"] = "0" * 32
    (copy / digests).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _diverge(trained, "one", str(copy))
    assert found["detections"][0]["who"][0]["name"] == "layers.1.attention.q"
    assert found["detections"][0]["since"]["step"] == 6


def test_an_update_that_went_wrong_is_bracketed(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "telemetry").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "telemetry/norms.jsonl"):
        text = (trained / "one" / name).read_text()
        if name.endswith("norms.jsonl"):  # as if a weight of a layer were hit after step 6
            lines = [json.loads(line) for line in text.splitlines()]
            for line in lines[6:]:
                line["weight"]["layers.0"] *= 1.001
            text = "".join(json.dumps(line) + "\n" for line in lines)
        (copy / name).write_text(text)
    found = _diverge(trained, "one", str(copy))
    assert found["detections"][0]["who"][0]["name"] == "layers.0 (weight)"
    assert "differ at step 7, by an update from step 6 on" in found["sentence"]
