"""Ranks that hold copies compare digests: a flipped bit is found at the next check and names its rank, and nobody is
blamed in a healthy run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from train_helpers import Commands, Ended, configured, run_all

from phalanx.detect.corruption.copy_judge import judge_run
from phalanx.detect.corruption.digest_file import FILE, UnlikeCopies, append_digests, read_digests, suspect_spans
from phalanx.train.state_digests import USUALLY_EVERY, digests_every

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SETTINGS: dict[str, Any] = {
    "train.steps": 6,
    "train.global_batch": 6,
    "train.micro_batch": 1,
    "model.dropout": 0.1,
    "telemetry.digests_every": 2,
    "checkpoint.every_steps": 0,
}


def trained(
    commands: Commands, folder: Path, changes: dict[str, Any], rank: int, step: int, name: str, run: str = "run"
) -> Ended:
    config = configured(folder, SETTINGS | changes, run)
    return commands.ranks(folder, config, "corruption_targets:train_with_a_flip", rank, step, name)


def test_one_rank_writes_digests_of_every_tensor(tmp_path: Path) -> None:
    run_all(tmp_path, SETTINGS)
    found = read_digests(tmp_path / "run")
    assert list(found) == [2, 4, 6]
    last = found[6]
    assert set(last.of) == {"gradient", "weight", "optimizer"}
    assert list(last.of["weight"]) == list(last.of["gradient"]) and "layers.1.attention.q" in last.of["weight"]
    assert "layers.1.attention.q.exp_avg" in last.of["optimizer"]
    assert found[4].of["weight"]["embedding"] != last.of["weight"]["embedding"]
    verdict = judge_run(tmp_path / "run")
    assert verdict.exit_status == 3 and "replicate" in verdict.abstains[0]


def test_the_same_run_again_has_the_same_digests(tmp_path: Path) -> None:
    run_all(tmp_path, SETTINGS | {"train.deterministic": True}, "one")
    run_all(tmp_path, SETTINGS | {"train.deterministic": True}, "two")
    one, two = read_digests(tmp_path / "one"), read_digests(tmp_path / "two")
    assert [record.of for record in one.values()] == [record.of for record in two.values()]


@pytest.mark.parametrize("name", ["model.layers.0.attention.q", "optim.layers.1.attention.k.exp_avg_sq"])
def test_a_flipped_bit_names_its_rank_and_stops_the_run(commands: Commands, tmp_path: Path, name: str) -> None:
    result = trained(commands, tmp_path, {"parallel.replicate": 3, "checkpoint.every_steps": 4}, 2, 3, name)
    assert result.status == 1
    shown = result.err
    assert "SilentCorruptionError: this rank is silently corrupted: Rank 2" in shown and "rank 2 of 3" in shown
    verdict = judge_run(tmp_path / "run")
    assert verdict.blamed_ranks == (2,) and verdict.exit_status == 1
    (found,) = verdict.detections
    assert found.since.step == 4 and found.figures["last_agreed_step"] == 2 and found.advice == "check"
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.campaign
def test_the_next_start_goes_on_from_before_and_ends_as_a_healthy_run(commands: Commands, tmp_path: Path) -> None:
    changes = {"parallel.replicate": 3, "checkpoint.every_steps": 2, "telemetry.digests_every": 3}
    assert trained(commands, tmp_path, changes, 1, 3, "model.embedding").status == 1
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == ["step-00000002"]
    assert trained(commands, tmp_path, changes, -1, 0, "").status == 0
    assert trained(commands, tmp_path, changes, -1, 0, "", "healthy").status == 0
    mended, healthy = (read_digests(tmp_path / name)[6].of for name in ("run", "healthy"))
    assert mended == healthy


def test_a_checkpoint_from_after_the_last_agreement_is_passed_over(tmp_path: Path) -> None:
    run_all(tmp_path, SETTINGS | {"checkpoint.every_steps": 2})
    folder = tmp_path / "run"
    (start,) = {record.start for record in read_digests(folder).values()}
    append_digests(folder, [UnlikeCopies(5, start, 0.0, "weight", "embedding", {0: "a", 1: "b"}, agreed=2)])
    out = run_all(tmp_path, SETTINGS | {"checkpoint.every_steps": 2, "train.steps": 8})
    assert "step-00000004" not in out and "step-00000006" in out  # the later one is not suspect: the newest is taken
    append_digests(folder, [UnlikeCopies(9, start + 1, 0.0, "weight", "embedding", {0: "a", 1: "b"}, agreed=6)])
    out = run_all(tmp_path, SETTINGS | {"checkpoint.every_steps": 2, "train.steps": 10})
    assert "silent corruption was found at step 9" in out and list(read_digests(folder))[-1] == 10
    states = {record.step: record.start for record in read_digests(folder).values()}
    assert states[8] == states[10] > states[6], "step 8 was made again, from step 6 on"


def test_two_that_differ_are_reported_and_nobody_is_blamed(commands: Commands, tmp_path: Path) -> None:
    result = trained(commands, tmp_path, {"parallel.replicate": 2}, 1, 3, "model.embedding")
    assert result.status == 1
    assert "nobody can say which rank is silently corrupted: Ranks 0 and 1 have different bits" in result.err
    verdict = judge_run(tmp_path / "run")
    assert verdict.detections and not verdict.blamed_ranks and "nobody can say" in verdict.detections[0].why[0]


def test_a_run_that_only_reports_goes_on(commands: Commands, tmp_path: Path) -> None:
    changes = {"parallel.replicate": 3, "telemetry.at_corruption": "report"}
    result = trained(commands, tmp_path, changes, 0, 3, "model.embedding")
    assert result.status == 0
    assert result.out.count("ranks hold, or compute, different bits: Rank 0") == 1
    verdict = judge_run(tmp_path / "run")
    assert verdict.blamed_ranks == (0,) and len(read_digests(tmp_path / "run")) == 3
    (incident,) = map(json.loads, (tmp_path / "run/telemetry/incidents.jsonl").read_text().splitlines())
    assert incident["kind"] == "silent corruption" and incident["step"] == 4 and "Rank 0" in incident["title"]


def test_ranks_that_do_not_compute_alike_go_on(commands: Commands, tmp_path: Path) -> None:
    """As if one had another number of threads: what differs may be rounding, so the run is not ended for it."""
    config = configured(tmp_path, SETTINGS | {"parallel.replicate": 3})
    result = commands.ranks(tmp_path, config, "corruption_targets:flip_where_programs_differ", 2, 3, "model.embedding")
    assert result.status == 0
    assert "Ranks 0, 1 and 2 have different bits" in result.out
    assert not judge_run(tmp_path / "run").blamed_ranks and not suspect_spans(tmp_path / "run")


@pytest.mark.campaign(but=("pipeline",))
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"parallel.replicate": 2, "parallel.shard": 2, "train.precision": "bf16"},
            id="shards",
        ),
        pytest.param(
            {"parallel.replicate": 2, "parallel.tensor": 2, "optim.name": "lamb", "model.vocab_multiple": 64},
            id="tensor",
        ),
        pytest.param({"parallel.pipeline": 2, "parallel.replicate": 2, "optim.state_bits": 8}, id="pipeline"),
    ],
)
def test_healthy_ranks_agree(commands: Commands, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert trained(commands, tmp_path, {"train.global_batch": 4} | changes, -1, 0, "").status == 0
    verdict = judge_run(tmp_path / "run")
    assert verdict.exit_status == 0 and "copies" in verdict.looked_at, verdict
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["digests"] * 3
    assert min(line["compared"] for line in lines) > 10


def test_the_digests_of_weights_do_not_depend_on_the_layout(commands: Commands, tmp_path: Path) -> None:
    """Before any step changes them they are the same numbers everywhere: a rate of nothing keeps them."""
    still = SETTINGS | {"optim.lr": 1e-30, "train.global_batch": 4, "optim.weight_decay": 0.0}
    run_all(tmp_path, still, "alone")
    changes = still | {"parallel.pipeline": 2, "parallel.shard": 2}
    assert trained(commands, tmp_path, changes, -1, 0, "", "spread").status == 0
    alone, spread = (read_digests(tmp_path / name)[6].of["weight"] for name in ("alone", "spread"))
    assert list(alone.items()) == list(spread.items())


def test_by_default_only_ranks_that_hold_copies_pay(tmp_path: Path) -> None:
    def every(**changes: int | None) -> int:
        given = {f"parallel.{axis}": size for axis, size in changes.items()}
        settings = {name: value for name, value in SETTINGS.items() if name != "telemetry.digests_every"}
        return digests_every(configured(tmp_path, settings | given))

    assert [every(), every(shard=2), every(replicate=2), every(tensor=2)] == [0, 0, USUALLY_EVERY, USUALLY_EVERY]
    run_all(tmp_path, SETTINGS | {"telemetry.digests_every": None, "telemetry.spans": False})
    assert not (tmp_path / "run/telemetry").exists()


def test_off_means_nothing_is_written(tmp_path: Path) -> None:
    run_all(tmp_path, SETTINGS | {"telemetry.digests_every": 0})
    assert not (tmp_path / "run" / FILE).exists()
    verdict = judge_run(tmp_path / "run")
    assert verdict.exit_status == 3 and "telemetry.digests_every" in verdict.abstains[0]
