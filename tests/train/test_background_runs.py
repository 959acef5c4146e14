"""Whole runs that take snapshots beside training, whose processes are killed for real.

The campaign of hundreds of kills is ``benchmarks/checkpoint_kills.py``; whether what is called stale or sick really is
so, is in ``tests/checkpoint/test_truth_verdicts.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.kills.campaign import KEEPER, PERSISTER, RANK, compare
from support.kills.run import TinyRun, kill
from train_helpers import PRELOAD

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import KeeperLostError
from phalanx.checkpoint.storage.latest import Latest, read_latest
from phalanx.checkpoint.storage.location import open_store

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

STEPS = 100
SETTINGS: dict[str, Any] = {"train.steps": STEPS, "parallel.host_loader": False}
IN_MEMORY = {"checkpoint.every_steps": 1000}
"""Only the last checkpoint is durable."""
WAITING = {"checkpoint.wait": True, "checkpoint.every_steps": 40}
"""Training waits for each durable checkpoint, so that it does not end before the first."""
UNDISTURBED = {"checkpoint.mode": "blocking", "checkpoint.memory_every_steps": 0, "checkpoint.every_steps": 1000}
"""Without keeper and persister: what they do must not be seen in what is trained."""
GUARD_S = 120.0


@dataclass
class SharedRun(TinyRun):
    """A run that plays a later attempt of another, on the same host."""

    first: str = ""

    @property
    def keeper(self) -> Path:
        return self.folder / f"{self.first or self.name}.keeper"


class Runner:
    """Starts runs in processes forked from one that has imported torch and has no thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._straight: dict[int, TinyRun] = {}

    def run(self, name: str, changes: dict[str, Any] | None = None, first: str = "") -> SharedRun:
        return SharedRun(self._folder, name, SETTINGS | (changes or {}), first)

    def start(self, run: TinyRun) -> Any:
        process = self._context.Process(target=run.become)
        process.start()
        return process

    def straight(self, ranks: int = 1) -> TinyRun:
        """The run that nobody disturbs."""
        if ranks not in self._straight:
            run = self.run(f"straight{ranks}", UNDISTURBED | {"parallel.replicate": ranks})
            with self.kept(run):
                self.end(self.start(run), run)
            self._straight[ranks] = run
        return self._straight[ranks]

    def end(self, process: Any, run: TinyRun) -> None:
        process.join(GUARD_S)
        assert process.exitcode == 0, run.log.read_text()[-4000:]

    @contextmanager
    def kept(self, run: TinyRun) -> Iterator[TinyRun]:
        """Nothing of the run is left afterwards."""
        try:
            yield run
        finally:
            kill(run.processes(""))


@pytest.fixture(name="runner", scope="module")
def runner_fixture(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"))


def until(condition: Callable[[], Any], process: Any, run: TinyRun) -> None:
    """Wait for what nothing tells of."""
    end_s = time.monotonic() + GUARD_S
    while not condition():
        assert process.exitcode is None, f"the run has ended: {run.log.read_text()[-4000:]}"
        assert time.monotonic() < end_s, f"it does not come: {run.log.read_text()[-4000:]}"
        time.sleep(0.005)


def latest_of(run: TinyRun) -> Latest | None:
    found = read_latest(open_store(run.changes.get("checkpoint.folder", run.path / "checkpoints")))
    return found if found is not None and found.name else None


def in_memory(run: TinyRun) -> int:
    """The newest step that the keeper has committed; 0 where there is none."""
    try:
        keeper = KeeperClient(run.keeper, 0, 1)
        held = [held.record.step for held in keeper.held()]
        keeper.close()
    except KeeperLostError:
        return 0
    return max(held, default=0)


def end_killed(process: Any) -> None:
    process.join(GUARD_S)
    assert process.exitcode not in (None, 0)


def test_a_killed_worker_is_bound_to_what_lies_in_memory_and_goes_on_from_there(runner: Runner) -> None:
    straight = runner.straight()
    with runner.kept(runner.run("worker", IN_MEMORY)) as run:
        process = runner.start(run)
        until(lambda: in_memory(run) > 1, process, run)
        os.kill(process.pid, signal.SIGKILL)
        end_killed(process)
        committed = in_memory(run)
        assert 1 < committed <= run.last_step() + 1
        (run.path / "config.json").unlink()
        other = runner.run("worker", IN_MEMORY | {"data.seed": 3})
        end_killed(runner.start(other))
        assert "data.seed: 0 -> 3 (the order of the samples)" in run.log.read_text()
        runner.end(runner.start(run), run)
        assert f"(step {committed} of {STEPS})" in run.log.read_text()
        assert "going on from the memory of this host" in run.log.read_text()
        assert compare(run, straight) == []


def test_training_goes_on_without_its_keeper_and_with_the_next(runner: Runner) -> None:
    straight = runner.straight()
    with runner.kept(runner.run("keeper", WAITING)) as run:
        process = runner.start(run)
        until(lambda: run.last_step() >= 3, process, run)  # long before its end, also where this process has to wait
        assert kill(run.processes(KEEPER)) == 1
        runner.end(process, run)
        log = run.log.read_text()
        assert log.count("the keeper of this host is lost") == 1
        assert log.count("there is a keeper on this host again") == 1
        latest = latest_of(run)
        assert latest is not None
        assert (latest.step, latest.attempt) == (STEPS, 1)
        assert compare(run, straight) == []


def test_a_killed_persister_costs_a_checkpoint_and_nothing_else(runner: Runner) -> None:
    straight = runner.straight()
    with runner.kept(runner.run("persister", WAITING)) as run:
        process = runner.start(run)
        until(lambda: run.processes(PERSISTER), process, run)
        assert kill(run.processes(PERSISTER)) == 1
        runner.end(process, run)
        latest = latest_of(run)
        assert latest is not None
        assert latest.step == STEPS
        assert compare(run, straight) == []


def test_when_all_are_killed_storage_has_it(runner: Runner) -> None:
    straight = runner.straight()
    with runner.kept(runner.run("all", WAITING)) as run:
        process = runner.start(run)
        until(lambda: latest_of(run), process, run)
        kill([*run.processes(KEEPER), *run.processes(PERSISTER)])
        os.killpg(process.pid, signal.SIGKILL)
        end_killed(process)
        latest = latest_of(run)
        assert latest is not None
        examine(run.path / "checkpoints" / latest.name, manifest_sha256=latest.manifest_sha256)
        runner.end(runner.start(run), run)
        assert f"checkpoints/{latest.name} (step {latest.step} of {STEPS})" in run.log.read_text()
        assert compare(run, straight) == []


@pytest.mark.campaign
def test_two_ranks_of_which_one_is_killed(runner: Runner) -> None:
    straight = runner.straight(2)
    with runner.kept(runner.run("two", IN_MEMORY | {"parallel.replicate": 2})) as run:
        process = runner.start(run)
        until(lambda: in_memory(run), process, run)
        assert kill(run.processes(f"{RANK} 1")) == 1
        end_killed(process)
        runner.end(runner.start(run), run)
        assert "going on from the memory of" in run.log.read_text()
        assert compare(run, straight) == []


def test_a_process_that_was_stopped_while_the_next_attempt_began(runner: Runner, tmp_path: Path) -> None:
    straight = runner.straight()
    shared = {"checkpoint.folder": str(tmp_path / "checkpoints")}
    with runner.kept(runner.run("zombie", shared)) as old:
        zombie = runner.start(old)
        until(lambda: old.last_step() >= 10, zombie, old)
        os.killpg(zombie.pid, signal.SIGSTOP)
        run = runner.run("later", shared, first="zombie")
        process = runner.start(run)
        until(lambda: run.last_step() > 30, process, run)
        os.killpg(zombie.pid, signal.SIGCONT)
        end_killed(zombie)
        assert "a later attempt of this run has begun" in old.log.read_text()
        runner.end(process, run)
        assert "going on from" in run.log.read_text()
        latest = latest_of(run)
        assert latest is not None
        assert (latest.step, latest.attempt) == (STEPS, 2)
        assert examine(tmp_path / "checkpoints" / latest.name, manifest_sha256=latest.manifest_sha256).attempt == 2
        mine = run.steps()
        assert 0 < len(mine) < STEPS
        assert mine == straight.steps()[-len(mine) :]
