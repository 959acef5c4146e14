"""What becomes of a committed snapshot: the keeper's loop with services that tests control, and with the real ones."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from keeper_helpers import a_plan, a_snapshot, some_bytes
from keeper_processes import GUARD_S, a_host, a_rank, snapshots, until, write

from phalanx.checkpoint.format.run_sums import first_fault
from phalanx.checkpoint.format.shard_plan import ShardPlan, SnapshotId
from phalanx.checkpoint.keeper import keeper_server as server_module
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_server import KeeperServer, Life
from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.checkpoint.keeper.snapshot_stages import KeeperServices
from phalanx.checkpoint.keeper_contract import (
    Destination,
    Endpoint,
    KeeperLostError,
    PersistOutcome,
    PersistTask,
    Replicated,
    SnapshotProgress,
)
from phalanx.checkpoint.snapshot_slots import SnapshotMemory

PLANS = [a_plan((("w", "trained", 10_000),), rank, 2) for rank in range(2)]
NOWHERE = Destination("nowhere")
PEER = Endpoint("other", ("127.0.0.1",), 1)


class FakeReplicas:
    """Sends nothing; a test says what became of what was to be sent."""

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[ShardPlan, SnapshotId, Endpoint]] = queue.Queue()
        self.secret = b""
        self.notify: Callable[[Replicated], None] = lambda told: None

    def use_secret(self, secret: bytes) -> None:
        self.secret = secret

    def start_listening(self) -> Endpoint:
        raise OSError(98, "the address is in use")

    def send(self, plan: ShardPlan, snapshot: SnapshotId, peer: Endpoint) -> None:
        self.sent.put((plan, snapshot, peer))

    def turn(self, rank: int, peer: Endpoint | None, attempt: int) -> None:
        pass

    def close(self) -> None:
        pass


class FakePersister:
    """Writes nothing; a test says what became of each task."""

    def __init__(self) -> None:
        self.tasks: queue.Queue[PersistTask] = queue.Queue()
        self.told: queue.SimpleQueue[PersistOutcome] = queue.SimpleQueue()
        self.inside, self.outside = socket.socketpair()
        self.is_closed = False

    def prepare(self) -> None:
        pass

    def submit(self, task: PersistTask) -> None:
        self.tasks.put(task)

    def tell(self, outcome: PersistOutcome) -> None:
        self.told.put(outcome)
        self.outside.send(b"o")

    def fileno(self) -> int:
        return self.inside.fileno()

    def outcomes(self) -> list[PersistOutcome]:
        self.inside.recv(1)
        return [self.told.get()]

    def close(self) -> None:
        self.is_closed = True
        self.inside.close()
        self.outside.close()


@contextmanager
def a_loop() -> Iterator[tuple[Path, FakeReplicas, FakePersister, KeeperServer]]:
    """A keeper in a thread."""
    folder = Path(tempfile.mkdtemp(prefix="keeper"))
    address = folder / "k"
    replicas, persister = FakeReplicas(), FakePersister()
    made: list[FakePersister] = []

    def make(vault: SnapshotMemory, notify: Callable[[Replicated], None]) -> FakeReplicas:
        replicas.notify = notify
        return replicas

    def make_persister() -> FakePersister:
        made.append(persister)
        return persister

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen()
    server = KeeperServer(listener, KeeperServices(make, make_persister), GUARD_S)

    def serve() -> None:
        server.run()
        listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address, replicas, persister, server
    finally:
        end_keeper(address)
        thread.join(GUARD_S)
        shutil.rmtree(folder)
    assert not thread.is_alive() and [each.is_closed for each in made] in ([], [True])


def test_another_user_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_loop() as (address, *_), monkeypatch.context() as patch:
        patch.setattr(server_module.local_socket, "same_user", lambda connection: False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(address))
            stranger.settimeout(GUARD_S)
            assert stranger.recv(1) == b""
        with pytest.raises(KeeperLostError, match="another user"):
            KeeperClient(address, 0, 1)


def test_the_next_snapshot_waits_until_this_one_is_replicated() -> None:
    with a_loop() as (address, replicas, _, __):
        rank = a_rank(address, PLANS[0])
        rank.replicate_to(PEER, 1, b"secret")
        write(rank, PLANS[0], 1)
        plan, snapshot, peer = replicas.sent.get(timeout=GUARD_S)
        assert (plan, snapshot, peer, replicas.secret) == (PLANS[0], a_snapshot(1), PEER, b"secret")
        assert [told.stage for told in rank.wait(1, "committed", GUARD_S)] == ["committed"]
        assert rank.busy
        replicas.notify(Replicated(0, 1, "other", seconds=2.0, bytes=7))
        assert rank.wait(1, "replicated", GUARD_S) == [SnapshotProgress(1, "replicated", "", "", 2.0, 7, "other")]
        until(lambda: not rank.busy)
        write(rank, PLANS[0], 2)
        replicas.sent.get(timeout=GUARD_S)
        replicas.notify(Replicated(0, 2, "other", "other does not answer"))
        assert rank.wait(2, "replicated", GUARD_S)[-1].problem == "other does not answer"
        until(lambda: not rank.busy)  # a peer that is gone does not stop training's snapshots
        with pytest.raises(OSError, match="in use"):
            _ = rank.endpoint
        rank.close()


def test_a_slot_is_free_when_its_shard_is_written_and_every_rank_is_told_of_the_end() -> None:
    with a_loop() as (address, _, persister, server):
        ranks = [a_rank(address, plan, destination=NOWHERE) for plan in PLANS]
        for rank, plan in zip(ranks, PLANS, strict=True):
            write(rank, plan, 1, persist=True)
        tasks = sorted((persister.tasks.get(timeout=GUARD_S) for _ in PLANS), key=lambda task: task.plan.rank)
        for rank, plan in zip(ranks, PLANS, strict=True):
            rank.wait(1, "committed", GUARD_S)
            write(rank, plan, 2)
            rank.wait(2, "committed", GUARD_S)
            assert rank.persisting and rank.busy
        for task, plan in zip(tasks, PLANS, strict=True):
            assert os.pread(task.descriptor, plan.data_bytes, 0) == some_bytes(plan, 1)
            persister.tell(PersistOutcome(plan.rank, 1, published=False, seconds=3.0, bytes=plan.data_bytes))
        for rank in ranks:
            until(lambda rank=rank: not rank.busy)
            assert rank.persisting
        persister.tell(PersistOutcome(0, 1, published=True, name="step-00000001"))
        persister.tell(PersistOutcome(1, 1, published=True, name="step-00000001"))
        for rank, plan in zip(ranks, PLANS, strict=True):
            news = rank.wait(1, "durable", GUARD_S)
            assert [told for told in news if told.stage == "durable"] == [
                SnapshotProgress(1, "durable", "", "step-00000001", 3.0, plan.data_bytes)
            ]
            assert not rank.persisting
            rank.held()
            assert rank.poll() == []  # once
        assert server._stages.is_idle
        for rank in ranks:
            rank.close()


def test_a_failure_is_told_to_the_rank_and_ends_the_persisting() -> None:
    with a_loop() as (address, _, persister, __):
        rank = a_rank(address, PLANS[0], destination=NOWHERE)
        write(rank, PLANS[0], 1, persist=True)
        persister.tasks.get(timeout=GUARD_S)
        persister.tell(PersistOutcome(0, 1, published=False, problem="disk full"))
        persister.tell(PersistOutcome(0, 1, published=True, problem="disk full"))
        assert rank.wait(1, "durable", GUARD_S)[-1].problem == "disk full"
        assert not rank.persisting
        rank.close()


def test_without_a_destination_there_is_a_problem_and_not_silence() -> None:
    with a_loop() as (address, *_):
        rank = a_rank(address, PLANS[0])
        write(rank, PLANS[0], 1, persist=True)
        assert "no durable storage" in rank.wait(1, "durable", GUARD_S)[-1].problem
        rank.close()


def test_the_task_of_a_dead_rank_comes_to_its_end_before_the_next() -> None:
    with a_loop() as (address, _, persister, __):
        rank = a_rank(address, PLANS[0], destination=NOWHERE)
        write(rank, PLANS[0], 1, persist=True)
        persister.tasks.get(timeout=GUARD_S)
        rank.close()
        rank = a_rank(address, PLANS[0], attempt=2, destination=NOWHERE, slots=3)
        write(rank, PLANS[0], 2, attempt=2, persist=True)
        rank.wait(2, "committed", GUARD_S)
        assert persister.tasks.empty()
        persister.tell(PersistOutcome(0, 1, published=False))
        persister.tell(PersistOutcome(0, 1, published=True, problem="superseded"))
        assert persister.tasks.get(timeout=GUARD_S).record.step == 2
        persister.tell(PersistOutcome(0, 2, published=False))
        persister.tell(PersistOutcome(0, 2, published=True, name="step-00000002"))
        durable = [told for told in rank.wait(2, "durable", GUARD_S) if told.stage == "durable"]
        assert [(told.step, told.problem) for told in durable] == [(2, "")]  # nothing of the other attempt's
        rank.close()


def test_a_step_that_is_taken_again_is_told_of_again() -> None:
    """A checkpoint of the same step may be durable already; whoever waits for the second one must hear of it."""
    with a_loop() as (address, _, persister, __):
        ranks = [a_rank(address, plan, destination=NOWHERE) for plan in PLANS]
        for name in ("first", "second"):
            for rank, plan in zip(ranks, PLANS, strict=True):
                write(rank, plan, 1, persist=True)
            tasks = [persister.tasks.get(timeout=GUARD_S) for _ in PLANS]
            for task in tasks:
                persister.tell(PersistOutcome(task.plan.rank, 1, published=False))
            persister.tell(PersistOutcome(0, 1, published=True, name=name))
            for rank in ranks:
                durable = [told for told in rank.wait(1, "durable", GUARD_S) if told.stage == "durable"]
                assert [told.name for told in durable] == [name]
            persister.tell(PersistOutcome(1, 1, published=True, name=name))
        for rank in ranks:
            rank.held()
            assert rank.poll() == []
            rank.close()


def test_it_does_not_end_while_something_is_on_its_way() -> None:
    with a_loop() as (address, _, persister, __):
        rank = a_rank(address, PLANS[0], destination=NOWHERE)
        write(rank, PLANS[0], 1, persist=True)
        persister.tasks.get(timeout=GUARD_S)
        rank.finish()
        assert len(rank.held()) == 1
        persister.tell(PersistOutcome(0, 1, published=False))
        persister.tell(PersistOutcome(0, 1, published=True, name="step-00000001"))
        with pytest.raises(KeeperLostError):
            until(lambda: rank.poll() and False)
        rank.close()


def test_who_does_not_listen_does_not_hold_up_the_others() -> None:
    with a_loop() as (address, *_):
        deaf, rank = a_rank(address, PLANS[0]), a_rank(address, PLANS[1])
        for number in range(3000):
            deaf._channel.send(server_module.keeper_messages.Ask(10_000 + number, "endpoint"))
        write(rank, PLANS[1], 1)
        rank.wait(1, "committed", GUARD_S)
        assert snapshots(deaf) == [(1, 1, 1)]
        deaf.close()
        rank.close()


def test_a_life() -> None:
    life = Life(1e9)
    is_over = lambda connected=1, idle=True: life.is_over(connected, is_idle=idle, is_persisting=not idle)  # noqa: E731
    assert not is_over(0)
    life.begin(0, 1)
    life.begin(1, 1)
    life.finish(0)
    assert not is_over()
    life.begin(0, 2)  # the others of the attempt before do not count any more
    assert not is_over()
    life.finish(0)
    assert not is_over(idle=False)
    assert is_over()
    short = Life(0.0)
    short._alone_since_s = 0.0
    assert not short.is_over(1, is_idle=True, is_persisting=False)
    assert short.left_s(is_persisting=True) > 3000
    short._alone_since_s = 0.0
    short.is_over(0, is_idle=True, is_persisting=False)
    assert short._alone_since_s > 0  # it counts from when the last one was seen
    long = Life(1e9)
    assert long.left_s(is_persisting=False, is_empty=True) < 1000 < long.left_s(is_persisting=False)


def test_a_replica_outlives_the_keeper_it_came_from() -> None:
    with a_host(PHALANX_INTERFACE="lo") as here, a_host(PHALANX_INTERFACE="lo") as there:
        plan = a_plan((("w", "trained", 3_000_000),))
        rank, other = a_rank(here, plan), a_rank(there, a_plan(rank=1, world_size=2))
        for keeper, peer in ((rank, other), (other, rank)):
            keeper.replicate_to(peer.endpoint, 1, bytes(32))
        for step in (1, 2, 3):
            write(rank, plan, step)
            told = rank.wait(step, "replicated", GUARD_S)[-1]
            assert (told.problem, told.to, told.bytes) == ("", other.endpoint.host, plan.data_bytes)
        psutil.Process(rank.pid).kill()
        with pytest.raises(KeeperLostError):
            rank.wait(4, "committed", GUARD_S)
        assert snapshots(other) == [(1, 2, 0), (1, 3, 0)]
        assert all(held.is_replica for held in other.held())
        with other.read(a_snapshot(3), 0) as (record, found, memory):
            assert first_fault(memory, record, found) is None and found == plan
            assert bytes(memory) == some_bytes(plan, 3)
        rank.close()
        other.close()
