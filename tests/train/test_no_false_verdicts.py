"""A run in which steps are skipped: no checkpoint is called stale or sick."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_background_runs import Runner

from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import read_latest

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

STEPS = 12
EACH_STEP: dict[str, Any] = {
    "train.steps": STEPS,
    "checkpoint.every_steps": 1,
    "checkpoint.memory_every_steps": 0,
    "checkpoint.wait": True,
}
SKIPPING = {
    "optim.bad_step.sigma": 0.001,
    "optim.bad_step.min_history": 2,
    "optim.bad_step.history": 2,
    "optim.bad_step.max_in_a_row": STEPS,
}


@pytest.fixture(name="runner", scope="module")
def runner_fixture(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"))


def steps_of(path: Path) -> list[dict[str, Any]]:
    entries = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["kind"] == "step"]


def test_steps_that_are_skipped(runner: Runner) -> None:
    """Some checkpoints hold what the one before held, since the bad-step policy skipped the update between them."""
    with runner.kept(runner.run("skipped", EACH_STEP | SKIPPING)) as run:
        runner.end(runner.start(run), run)
        assert 3 < sum(bool(entry["skipped"]) for entry in steps_of(run.path)) < STEPS
        store = LocalStore(run.path / "checkpoints")
        assert store.quarantined() == []
        latest = read_latest(store, pytest.fail)
        assert latest is not None
        assert latest.step == STEPS
        log = run.log.read_text()
        assert "stale" not in log
        assert "sick" not in log
