"""A job of some ranks as its persisters see it: plans, slots with numbers of a version, records, tasks."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from planned_files import slot
from support.chunk_sums import chunk_sums
from support.open_checkpoint import Checkpoint, newest
from thread_ranks import ThreadPeers, succeed
from torch import Tensor

from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import JobPlan, Record, Role, ShardPlan
from phalanx.checkpoint.keeper_contract import Destination, PersistOutcome, PersistTask
from phalanx.checkpoint.persist.persister_process import PersisterProcess
from phalanx.checkpoint.snapshot_plans import make_plans
from phalanx.core.layout import Shard
from phalanx.ipc.shared_memory import write_document

PATIENCE_S = 240.0


def roles(name: str) -> Role:
    return "trained" if name.startswith("w") else "other"


@dataclass
class Job:
    """Ranks that each hold rows of ``w`` and something of their own.

    Args:
        folder: of the checkpoints.
        size: ranks.
        rows: rows of ``w`` per rank, of 1 kB each.
        hurry: the persister does not give way to others, such as other tests.
    """

    folder: Path
    size: int = 1
    rows: int = 12
    attempt: int = 1
    nonce: str = "n1"
    timeout_s: float = PATIENCE_S
    hurry: bool = True

    def __post_init__(self) -> None:
        def body(peers: ThreadPeers) -> tuple[ShardPlan, JobPlan | None]:
            return make_plans(
                self.tensors(peers.rank, 0), self.shards(peers.rank), roles, peers=peers, config={"c": 1}, layout="x"
            )[:2]

        made = succeed(self.size, body)
        self.plans = [plan for plan, _ in made]
        assert made[0][1] is not None
        self.job = made[0][1]

    def tensors(self, rank: int, version: int) -> dict[str, Tensor]:
        rows = torch.arange(rank * self.rows, (rank + 1) * self.rows, dtype=torch.float32)
        own = torch.full((3,), version + rank).to(torch.bfloat16)
        return {"w": rows[:, None].expand(-1, 256) + version * 0.5, f"own.{rank}": own}

    def shards(self, rank: int) -> dict[str, Shard]:
        return {"w": Shard.whole((self.rows * self.size, 256)).rows(rank * self.rows, self.rows, ("shard",))}

    @property
    def destination(self) -> Destination:
        return Destination(str(self.folder), nonce=self.nonce, timeout_s=self.timeout_s)

    def record(self, rank: int, step: int, memory: bytes) -> Record:
        plan, state = self.plans[rank], f'{{"step": {step}}}' if rank == 0 else ""
        return Record(
            step,
            self.attempt,
            self.job.set_id,
            rank,
            len(self.job.shards),
            plan.sha256,
            plan.data_bytes,
            chunk_sums(memory, plan.data_bytes),
            state,
            state_sum(state),
            changed=True,
        )

    @contextmanager
    def task(self, rank: int, step: int, **changes: Any) -> Iterator[PersistTask]:
        """Rank 0's publishes. `changes` are of the record."""
        memory = bytes(slot(self.plans[rank], self.tensors(rank, step)))
        descriptor = write_document(memory)
        record = replace(self.record(rank, step, memory), **changes)
        job = self.job if rank == 0 else None
        try:
            yield PersistTask(self.plans[rank], record, descriptor, self.destination, job, self.hurry)
        finally:
            os.close(descriptor)

    def submit(self, persister: PersisterProcess, step: int, ranks: Iterable[int] = (0,), **changes: Any) -> None:
        for rank in ranks:
            with self.task(rank, step, **changes) as task:
                persister.submit(task)

    def require(self, checkpoint: Checkpoint) -> None:
        """Every bit is that of its step."""
        found = checkpoint.read()
        assert checkpoint.state == {"step": checkpoint.step}
        parts = [self.tensors(rank, checkpoint.step) for rank in range(self.size)]
        assert torch.equal(found.pop("w"), torch.cat([part["w"] for part in parts]))
        for rank, part in enumerate(parts):
            assert torch.equal(found.pop(f"own.{rank}"), part[f"own.{rank}"])
        assert not found

    def latest(self) -> Checkpoint:
        found = newest(self.folder, lambda line: None)
        assert found is not None
        return found


def collect(persisters: Iterable[PersisterProcess], count: int) -> list[PersistOutcome]:
    """The next `count` outcomes of some of them."""
    waiting = list(persisters)
    found: list[PersistOutcome] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        ready = select.select([p for p in waiting if p.fileno() >= 0], [], [], max(0.0, deadline - time.monotonic()))[0]
        assert ready, f"nothing came; so far: {found}"
        for persister in ready:
            found += persister.outcomes()
    assert len(found) == count, found
    return found


@contextmanager
def persister() -> Iterator[PersisterProcess]:
    made = PersisterProcess()
    try:
        yield made
    finally:
        made.close()


def problems(outcomes: Iterable[PersistOutcome]) -> list[str]:
    return [outcome.problem for outcome in outcomes if outcome.problem]


def areas(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
