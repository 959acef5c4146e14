"""Norms of layers: off unless asked for, what their names say, and the same however the model is spread."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import Commands, begin, configured, finish, overrides, run_all

from phalanx.figures.norms import layer_norms
from phalanx.figures.style import described
from phalanx.telemetry.layer_norms import QUANTITIES, append_norms, read_norms

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

STEPS = 4
SETTINGS: dict[str, Any] = {
    "train.steps": STEPS,
    "train.global_batch": 4,
    "train.micro_batch": 1,
    "model.dropout": 0.1,
    "model.vocab_multiple": 64,
    "telemetry.norms_every": 2,
}


def norms_of(run: Path) -> dict[tuple[int, str, str], float]:
    table = read_norms(run).to_pylist()
    return {(row["step"], row["quantity"], row["layer"]): row["value"] for row in table}


def test_they_are_off_by_default(tmp_path: Path) -> None:
    run_all(tmp_path, SETTINGS | {"telemetry.norms_every": 0})
    assert read_norms(tmp_path / "run").num_rows == 0


def test_they_are_what_their_names_say(tmp_path: Path) -> None:
    """Of the last step: what the run itself says of its whole gradient, and its weights before the update."""
    run = begin(configured(tmp_path, SETTINGS | {"optim.lr": 1e-30}))
    before = {name: parameter.detach().clone() for name, parameter in run.trainer.parameters.items()}
    finish(run)
    found = norms_of(tmp_path / "run")
    layers = {layer for _, _, layer in found}
    assert {step for step, *_ in found} == {2, 4} and {kind for _, kind, _ in found} == set(QUANTITIES)
    assert {"embedding", "layers.0"} <= layers
    for layer in sorted({layer for _, kind, layer in found if kind == "weight"}):
        own = [value for name, value in before.items() if name == layer or name.startswith(f"{layer}.")]
        expected = math.sqrt(sum(float(value.double().square().sum()) for value in own))
        assert found[4, "weight", layer] == pytest.approx(expected, rel=1e-5)
    gradients = [value for (step, kind, _), value in found.items() if step == 4 and kind == "gradient"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (said,) = [line["grad_norm"] for line in lines if line["kind"] == "step" and line["step"] == 4]
    assert math.sqrt(sum(value**2 for value in gradients)) == pytest.approx(said, rel=1e-5)
    assert 0.01 < found[4, "activation", "layers.0"] < 100


@pytest.mark.parametrize(
    "spread",
    [
        {"parallel.shard": 2, "parallel.tensor": 2, "parallel.zero": 2},
        {"parallel.shard": 2, "parallel.replicate": 2, "parallel.zero": 3},
        {"parallel.pipeline": 2, "parallel.context": 2, "model.tie_embeddings": False},
    ],
    ids=["sharded and tensor", "replicas and ZeRO-3", "pipeline and context"],
)
def test_four_ranks_say_what_one_process_says(tmp_path: Path, commands: Commands, spread: dict[str, Any]) -> None:
    alone = SETTINGS | {name: value for name, value in spread.items() if name.startswith("model.")}
    run_all(tmp_path, alone, "alone")
    (tmp_path / "tiny.toml").write_text("")
    done = commands.run(tmp_path, "train", "tiny.toml", *overrides(tmp_path, SETTINGS | spread, "spread"))
    assert done.status == 0, done
    found, expected = norms_of(tmp_path / "spread"), norms_of(tmp_path / "alone")
    assert found.keys() == expected.keys() and len(found) > 10
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-5), key


def test_the_figure_shows_them(tmp_path: Path) -> None:
    append_norms(tmp_path, 1, {"gradient": {"layers.0": 1.0, "layers.1": 3.0}})
    append_norms(tmp_path, 2, {"gradient": {"layers.0": 1.0, "layers.1": float("inf")}})
    append_norms(tmp_path, 2, {"gradient": {"layers.0": 2.0, "layers.1": 4.0}})  # made again
    table = read_norms(tmp_path)
    assert table["value"].to_pylist() == [1.0, 3.0, 2.0, 4.0]
    assert "largest 4 in layer layers.1" in described(layer_norms(table, "gradient"))


def test_a_line_that_a_crash_has_torn_is_left_out(tmp_path: Path) -> None:
    append_norms(tmp_path, 1, {"weight": {"embedding": float("nan")}})
    with (tmp_path / "telemetry/norms.jsonl").open("a") as file:
        file.write('{"kind": "norms", "step": 2, "weig')
    (row,) = read_norms(tmp_path).to_pylist()
    assert row["step"] == 1 and math.isnan(row["value"])


def test_hooks_go_when_the_step_is_over(tmp_path: Path) -> None:
    run = begin(configured(tmp_path, SETTINGS))
    finish(run)
    assert all(not block._forward_hooks for block in run.trainer.blocks)
    assert isinstance(run.trainer.blocks[0], torch.nn.Module)
