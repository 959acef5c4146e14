"""Micro-batches that neighbours compute again: equal bit by bit where all is well; wrong arithmetic shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import Commands, Ended, configured, entries, run_all

from phalanx.detect.corruption.copy_judge import judge_run
from phalanx.train.trainer import LocalTrainer

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SETTINGS: dict[str, Any] = {
    "train.steps": 3,
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "model.dropout": 0.1,
    "model.vocab_multiple": 64,
    "telemetry.replay_every": 1,
    "telemetry.digests_every": 0,
    "checkpoint.every_steps": 0,
}


def trained(
    commands: Commands, folder: Path, changes: dict[str, Any], rank: int, calls: list[int], run: str = "run"
) -> Ended:
    config = configured(folder, SETTINGS | changes, run)
    return commands.ranks(folder, config, "corruption_targets:train_with_wrong_arithmetic", rank, calls)


def test_healthy_ranks_give_the_same_bits_and_training_is_not_changed(commands: Commands, tmp_path: Path) -> None:
    changes = {"parallel.shard": 2, "parallel.tensor": 2, "parallel.zero": 2, "data.document_mask": True}
    assert trained(commands, tmp_path, changes, -1, []).status == 0
    assert trained(commands, tmp_path, changes | {"telemetry.replay_every": 0}, -1, [], "plain").status == 0
    assert not (tmp_path / "run/telemetry/digests.jsonl").exists()
    losses = [[(one["loss"], one["grad_norm"]) for one in entries(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([0], id="once, of its own"),
        pytest.param([1], id="once, of another's"),
        pytest.param([0, 1, 2], id="always"),
    ],
)
def test_a_rank_that_computes_wrongly_is_named(commands: Commands, tmp_path: Path, calls: list[int]) -> None:
    result = trained(commands, tmp_path, {"parallel.replicate": 3}, 2, calls)
    assert result.status == 1
    assert "this rank is silently corrupted: Rank 2" in result.err
    verdict = judge_run(tmp_path / "run")
    assert verdict.blamed_ranks == (2,), verdict
    assert "computes other bits" in verdict.detections[0].sentence and verdict.detections[0].since.step == 1


def test_two_ranks_that_differ_name_nobody(commands: Commands, tmp_path: Path) -> None:
    result = trained(commands, tmp_path, {"parallel.replicate": 2, "train.global_batch": 4}, 1, [0])
    assert result.status == 1
    assert "nobody can say which rank is silently corrupted" in result.err
    assert not judge_run(tmp_path / "run").blamed_ranks


def test_it_says_why_it_cannot(commands: Commands, tmp_path: Path) -> None:
    assert "no micro-batch is computed again: there is no other" in run_all(tmp_path, SETTINGS)
    changes = {"parallel.shard": 2, "parallel.zero": 3, "train.global_batch": 4}
    result = trained(commands, tmp_path, changes, -1, [], "three")
    assert result.status == 0
    assert "no micro-batch is computed again: with ZeRO-3" in result.out


def test_a_step_whose_norm_jumps_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once corrupt: reported, and the right result is used. A jump of the data itself comes again and is not."""
    changes = {
        "train.steps": 30,
        "train.global_batch": 2,
        "telemetry.recompute_sigma": 6.0,
        "telemetry.replay_every": 0,
        "optim.lr": 1e-4,
    }
    run_all(tmp_path, SETTINGS | changes, "healthy")
    calls, original = [0], LocalTrainer.accumulate_gradients

    def spoilt_once(trainer: LocalTrainer, *arguments: Any, **named: Any) -> torch.Tensor:
        loss = original(trainer, *arguments, **named)
        calls[0] += 1
        if calls[0] == 25:
            gradient = next(iter(trainer.parameters.values())).grad
            assert gradient is not None
            gradient.view(-1)[0] = 1e6
        return loss

    monkeypatch.setattr(LocalTrainer, "accumulate_gradients", spoilt_once)
    out = run_all(tmp_path, SETTINGS | changes)
    assert "step 25 was computed twice" in out and calls[0] == 31
    ends = [entries(tmp_path / name)[-1]["loss"] for name in ("run", "healthy")]
    assert ends[0] == ends[1]
    (found,) = judge_run(tmp_path / "run").detections
    assert "step 25" in found.sentence and not found.blamed_ranks
