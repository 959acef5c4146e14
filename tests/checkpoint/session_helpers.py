"""A keeper within the process that does what it is told to, and a session with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from thread_ranks import Exchange, ThreadPeers
from torch import Tensor

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper_contract import (
    Destination,
    Endpoint,
    Held,
    KeeperLostError,
    RefusedError,
    Slot,
    SnapshotProgress,
    Stage,
    Taken,
)
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.keeper_link import KeeperLink, SessionContext
from phalanx.checkpoint.snapshot_schedule import SnapshotSchedule
from phalanx.core.fault_points import NO_POINTS
from phalanx.core.peers import ALONE, Peers

NOWHERE = Destination("/dev/null/nowhere", nonce="n1")


class AskingPeers(ThreadPeers):
    """Threads as ranks, which may also ask for the highest number."""

    def ask_highest(self, value: int) -> Callable[[], int]:
        return lambda: max(self.gather(value))


def asking_ranks(size: int, body: Callable[[AskingPeers], Any]) -> list[Any]:
    """What `body` returned on each rank; raises what the first rank that failed raised."""
    exchange = Exchange(size)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            results[rank] = body(AskingPeers(rank, size, exchange))
        except BaseException as error:
            results[rank] = error
            exchange.barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results


class FakeKeeper:
    """Everything is committed and durable at the next `poll`, unless it is held back.

    Attributes:
        took: the snapshots that were taken, and what lay in the slot.
        holds: stages that no snapshot comes to for now.
    """

    def __init__(self, host: str = "here") -> None:
        self.host = host
        self.took: list[tuple[Taken, bytes]] = []
        self.said: list[tuple[str, Any]] = []
        self.holds: set[Stage] = set()
        self.problems: dict[Stage, str] = {}
        self.is_lost = self.is_refused = self.is_closed = False
        self._waiting: dict[int, list[Stage]] = {}
        self._memory: list[bytearray] = []
        self._peer: Endpoint | None = None
        self._told: list[SnapshotProgress] = []

    @property
    def last_attempt(self) -> int:
        return 3

    def held(self) -> list[Held]:
        return []

    @contextmanager
    def read(self, snapshot: SnapshotId, rank: int) -> Iterator[tuple[Record, ShardPlan, memoryview]]:
        raise LookupError(snapshot)

    def begin(self, attempt: int, set_id: str, shards: int) -> None:
        self._alive()
        self.said.append(("begin", (attempt, shards)))

    def lease(self, plan: ShardPlan, job: JobPlan | None, slots: int, destination: Destination | None) -> None:
        self._alive()
        self.said.append(("lease", (plan.data_bytes, job is not None, slots)))
        self._memory = [bytearray(plan.data_bytes) for _ in range(slots)]

    def resume_from(self, snapshot: SnapshotId) -> None:
        self._alive()
        self.said.append(("resume_from", snapshot[:2]))

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        self.said.append(("replicate_to", peer and peer.host))
        self._peer = peer

    @property
    def endpoint(self) -> Endpoint:
        self._alive()
        return Endpoint(self.host, ("127.0.0.1",), 1)

    @property
    def ready(self) -> bool:
        return bool(self._memory)

    @property
    def busy(self) -> bool:
        self._alive()
        self._go_on()
        under_way = any(stage != "durable" for stages in self._waiting.values() for stage in stages)
        return not self._memory or under_way

    @property
    def persisting(self) -> bool:
        self._alive()
        return any("durable" in stages for stages in self._waiting.values())

    def slot(self) -> Slot:
        self._alive()
        number = len(self.took) % len(self._memory)
        return Slot(number, memoryview(self._memory[number]))

    def taken(self, slot: Slot, taken: Taken) -> None:
        self._alive()
        assert slot.memory.obj is self._memory[slot.number], "the slot is another keeper's"
        self.took.append((taken, bytes(slot.memory)))
        stages: list[Stage] = ["committed", *(["replicated"] if self._peer else []), *(["durable"] * taken.persist)]
        self._waiting[taken.step] = stages

    def poll(self) -> list[SnapshotProgress]:
        self._alive()
        self._go_on()
        told, self._told = self._told, []
        return told

    def wait(self, step: int, stage: Stage, timeout_s: float) -> list[SnapshotProgress]:
        told = self.poll()
        if stage in self._waiting.get(step, []):
            raise TimeoutError
        return told

    def refuse_memory(self, problem: str) -> None:
        self._memory = []
        self._told.append(SnapshotProgress(-1, "committed", problem))

    def finish(self) -> None:
        self.said.append(("finish", None))

    def close(self) -> None:
        self.is_closed = True

    def _go_on(self) -> None:
        for step, stages in list(self._waiting.items()):
            while stages and stages[0] not in self.holds:
                stage = stages.pop(0)
                name = f"step-{step:08d}" if stage == "durable" else ""
                problem = self.problems.get(stage, "")
                self._told.append(SnapshotProgress(step, stage, problem, "" if problem else name, 0.5, 7, "there"))
            if not stages:
                del self._waiting[step]

    def _alive(self) -> None:
        if self.is_lost:
            raise KeeperLostError("it was killed")
        if self.is_refused:
            raise RefusedError("attempt 9 has been seen")


class Loop:
    """A session with fake keepers, and the loop that uses it.

    Attributes:
        keepers: one for each connection, the present one last.
        lines: what was reported.
    """

    def __init__(self, peers: Peers = ALONE, hosts: tuple[str, ...] = (), **settings: Any) -> None:
        self.config = CheckpointConfig(**({"every_steps": 2, "final_timeout_s": 5.0} | settings))
        self.hosts = hosts or ("here",) * peers.size
        self.peers = peers
        self.keepers: list[FakeKeeper] = []
        self.lines: list[str] = []
        self.again = threading.Event()
        self.clock_s = 0.0
        self.tensors = {"model.w": torch.zeros(5), "rng": torch.zeros(3, dtype=torch.uint8)}
        secret = b"secret" if len(set(self.hosts)) > 1 else None
        job = SessionContext(
            self.config, NOWHERE, 4, secret, self.hosts, ("",) * peers.size, peers, None, "1", {},
            self.lines.append, NO_POINTS,
        )  # fmt: skip
        auto = AutoInterval(self.config)
        schedule = SnapshotSchedule(self.config, auto, decides=peers.rank == 0, clock=lambda: self.clock_s)
        self.session = Session(job, KeeperLink(self._connect, self._report), schedule)

    @property
    def keeper(self) -> FakeKeeper:
        return self.keepers[-1]

    @property
    def steps(self) -> list[int]:
        """At which snapshots were taken."""
        return [taken.step for keeper in self.keepers for taken, _ in keeper.took]

    @property
    def persisted(self) -> list[int]:
        return [taken.step for keeper in self.keepers for taken, _ in keeper.took if taken.persist]

    def watch(self, tensors: dict[str, Tensor] | None = None, **options: Any) -> None:
        self.tensors = tensors or self.tensors
        self.session.watch(lambda: self.tensors, None, {"model.w": "trained"}, **options)

    def step(self, step: int, **options: Any) -> None:
        self.session.ask(step)
        self.session.fence()
        self.tensors["model.w"].fill_(step)
        self.session.after_step(step, lambda: {"progress": step}, **options)

    def _connect(self) -> FakeKeeper:
        self.keepers.append(FakeKeeper(self.hosts[self.peers.rank]))
        return self.keepers[-1]

    def _report(self, line: str) -> None:
        self.lines.append(line)
        if "again" in line:
            self.again.set()
