"""`train.precision = "fp8"`: what is refused, which blocks it is in, and runs with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import begin, configured, entries, figures, run_all

from phalanx.api.planning import plan_of
from phalanx.core.errors import UserError
from phalanx.kernels.fp8 import LEAST_CAPABILITY
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.train import device
from phalanx.train.config import TrainConfig

FITS: dict[str, Any] = {
    "train.precision": "fp8",
    "model.layers": 3,
    "model.hidden": 32,
    "model.heads": 2,
    "model.mlp_hidden": 48,
    "data.sequence_length": 16,
    "data.tokenizer.kind": "bytes",
}


@pytest.mark.parametrize(
    ("changes", "named", "cure"),
    [
        ({"model.hidden": 40}, r"model\.hidden .* 40, no multiple of 16", "multiple of 16"),
        ({"model.mlp_hidden": 40}, r"model\.mlp_hidden .* 40", "multiple of 16"),
        ({"model.head_size": 12}, r"model\.heads .* 24", "model.head_size = 16"),
        ({"model.heads": 4, "model.head_size": 4, "model.kv_heads": 1}, r"model\.kv_heads .* 24", "head_size = 16"),
        ({"data.sequence_length": 24}, r"data\.sequence_length .* 24", "multiple of 16"),
        ({"parallel.context": 2}, r"data\.sequence_length .* 8", "multiple of 32"),
        ({"parallel.tensor": 2}, r"parallel\.tensor = 2", "shard, replicate, context"),
        ({"parallel.pipeline": 2, "parallel.schedule": "zbv"}, r"parallel\.schedule = 'zbv'", "1f1b"),
        ({"model.layers": 2}, r"model\.layers = 2", "lower them"),
        ({"train.bf16_layers_at_end": 2}, r"bf16_layers_at_end = 2", "lower them"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str, cure: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        configured(tmp_path, FITS | changes)
    assert cure in error.value.cure
    assert "train.precision = 'bf16'" in error.value.cure
    configured(tmp_path, FITS | changes | {"train.precision": "bf16"})
    configured(tmp_path, FITS)


@pytest.mark.parametrize(("start", "end", "expected"), [(1, 1, [1, 2]), (0, 0, [0, 1, 2, 3]), (0, 3, [0]), (3, 3, [])])
def test_first_and_last_blocks_stay_in_bf16(start: int, end: int, expected: list[int]) -> None:
    train = TrainConfig(steps=1, precision="fp8", bf16_layers_at_start=start, bf16_layers_at_end=end)
    assert list(train.fp8_layers(4)) == expected
    assert not TrainConfig(steps=1, precision="bf16").fp8_layers(4)


def test_a_gpu_without_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"compute capability 8\.0; 8\.9 is needed") as error:
        device._require_fp8((8, 0))
    assert error.value.field == "train.precision"
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        device._require_fp8(capability)


def test_a_setting_without_effect_is_told() -> None:
    assert not TrainConfig(steps=1).ignored()
    told = TrainConfig(steps=1, bf16_layers_at_start=2).ignored()
    assert told == ["train.bf16_layers_at_start = 2 has no effect: train.precision is not fp8"]
    assert not TrainConfig(steps=1, precision="fp8", bf16_layers_at_start=2).ignored()


def test_gradients_hardly_depend_on_the_micro_batch(tmp_path: Path) -> None:
    """Scales of other rows are other powers of two: nothing changes but what is nearly zero beside the largest."""
    changes = FITS | {"train.global_batch": 8, "train.micro_batch": 8, "data.sequence_length": 32}
    run = begin(configured(tmp_path, changes))
    run.folder.release()
    batch = run.loader.batch(0, 8)

    def gradients(size: int) -> dict[str, torch.Tensor]:
        run.trainer.zero_grad()
        run.trainer.accumulate_gradients(batch, micro_batch=size, seed=0, step=0)
        return {name: p.grad.clone() for name, p in run.trainer.parameters.items() if p.grad is not None}

    whole, again = gradients(8), gradients(8)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for size in (1, 2, 4):
        for name, found in gradients(size).items():
            assert (found - whole[name]).norm() <= 0.02 * whole[name].norm(), name


def test_recomputation_gives_the_same_bits(tmp_path: Path) -> None:
    for recompute in ("none", "selective", "full"):
        run_all(tmp_path, FITS | {"train.steps": 4, "train.recompute": recompute}, recompute)
    expected = figures(tmp_path / "none")
    assert figures(tmp_path / "selective") == expected
    assert figures(tmp_path / "full") == expected


def test_a_run_learns_as_in_bf16(tmp_path: Path) -> None:
    """From the same weights: with the first step's loss within the formats' error, and with what is learnt after 40."""
    told = run_all(tmp_path, FITS | {"train.steps": 40})
    assert "fp8 (blocks 1 to 1 of 3, emulated) and bfloat16" in told
    run_all(tmp_path, FITS | {"train.steps": 40, "train.precision": "bf16"}, "bf16")
    mine, theirs = (entries(tmp_path / name) for name in ("run", "bf16"))
    assert mine[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=2e-3)
    assert mine[0]["loss"] != theirs[0]["loss"]
    assert mine[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=2e-2)
    assert mine[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=3e-2)
    assert mine[-1]["loss"] < 0.75 * mine[0]["loss"]


def test_weights_that_are_not_finite_are_seen(tmp_path: Path) -> None:
    """A gradient of NaN must come out of 8 bits as such: the judge of bad steps looks at the norm."""
    run = begin(configured(tmp_path, FITS))
    run.folder.release()
    with torch.no_grad():
        run.trainer.parameters["layers.1.mlp.down"][0, 0] = float("nan")
    run.trainer.weights_changed()
    loss = run.trainer.accumulate_gradients(run.loader.batch(0, 4), micro_batch=2, seed=0, step=0)
    assert not loss.isfinite()
    assert not run.trainer.parameters["layers.0.attention.q"].grad.isfinite().all()


def test_the_planner_says_that_it_takes_bf16(tmp_path: Path) -> None:
    cluster = load_cluster("h100_400g", 1)
    model = {"model.vocab_size": 512, "model.layers": 12, "model.hidden": 768, "model.heads": 12, "model.mlp_hidden": 0}
    changes = FITS | model | {"train.micro_batch": 1, "train.device": "auto"}
    mine, theirs = (plan_of(configured(tmp_path, changes | {"train.precision": p}), cluster) for p in ("fp8", "bf16"))
    assert mine.job == replace(theirs.job, fp8=True)
    assert any("fp8 is predicted as bf16" in remark for remark in mine.remarks)
    assert not any("fp8" in remark for remark in theirs.remarks)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY,
    reason="needs a GPU that multiplies 8-bit floating point (compute capability 8.9)",
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_as_the_emulation_does(tmp_path: Path, compiled: bool) -> None:
    for kind in ("cuda", "cpu"):
        changes = {"train.device": kind, "train.compile": compiled and kind == "cuda", "train.steps": 20}
        run_all(tmp_path, FITS | changes, kind)
    mine, theirs = (entries(tmp_path / kind) for kind in ("cuda", "cpu"))
    assert mine[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=2e-3)
    assert mine[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=2e-2)
    assert mine[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=3e-2)
