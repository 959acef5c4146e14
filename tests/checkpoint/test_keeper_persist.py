"""From the copy in a slot to the published checkpoint: real keepers with real persisters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from keeper_processes import GUARD_S, a_host, a_rank, until
from persist_helpers import Job
from planned_files import slot as slot_bytes
from support.open_checkpoint import newest

from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import ensure_keeper
from phalanx.checkpoint.keeper_contract import SnapshotProgress, Taken


@contextmanager
def ranks_of(job: Job, address: Path) -> Iterator[list[KeeperClient]]:
    ranks = [
        a_rank(address, plan, job.attempt, job.job.set_id, 2, job.job if plan.rank == 0 else None, job.destination)
        for plan in job.plans
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def take(job: Job, ranks: list[KeeperClient], step: int, version: int | None = None, spoil: float = 0.0) -> None:
    for number, rank in enumerate(ranks):
        until(lambda rank=rank: not rank.busy and not rank.persisting)
        tensors = job.tensors(number, step if version is None else version)
        tensors["w"] = tensors["w"] + spoil * torch.eye(*tensors["w"].shape)
        slot = rank.slot()
        slot.memory[:] = slot_bytes(job.plans[number], tensors)
        state = f'{{"step": {step}}}' if number == 0 else ""
        rank.taken(slot, Taken(step, state, persist=True, hurry=True))


def ends(ranks: list[KeeperClient], step: int) -> list[SnapshotProgress]:
    return [[told for told in rank.wait(step, "durable", GUARD_S) if told.stage == "durable"][-1] for rank in ranks]


def test_what_is_committed_becomes_durable(tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints", size=2)
    with a_host(ensure_keeper) as address, ranks_of(job, address) as ranks:
        for step in (1, 2):
            take(job, ranks, step)
            told = ends(ranks, step)
            assert [(end.problem, bool(end.name)) for end in told] == [("", True)] * 2
            checkpoint = job.latest()
            assert checkpoint.step == step
            job.require(checkpoint)
        pid = ranks[0].pid
        for rank in ranks:
            rank.finish()
        children = psutil.Process(pid).children()
        assert psutil.wait_procs([psutil.Process(pid), *children], GUARD_S)[1] == []


def test_what_is_stale_or_sick_is_told_and_does_not_become_the_latest(tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints", size=2)
    with a_host() as address, ranks_of(job, address) as ranks:
        take(job, ranks, 1)
        assert [end.problem for end in ends(ranks, 1)] == ["", ""]
        take(job, ranks, 2, version=1)
        assert all("stale" in end.problem for end in ends(ranks, 2))
        take(job, ranks, 3, spoil=float("nan"))
        assert all("sick" in end.problem and " w" in end.problem for end in ends(ranks, 3))
        found = newest(job.folder, lambda line: None)
        assert found is not None and found.step == 1


def test_a_persister_that_is_killed_is_told_of_and_costs_no_memory(tmp_path: Path) -> None:
    job = Job(tmp_path / "checkpoints")
    with a_host(PHALANX_FAULTS="persist.before-publish") as address, ranks_of(job, address) as ranks:
        take(job, ranks, 1)
        assert ranks[0].wait(1, "committed", GUARD_S)
        assert ends(ranks, 1)[0].problem
        assert psutil.pid_exists(ranks[0].pid)
        assert len(ranks[0].held()) == 1
