"""Vaults with copies in them, and what stands between two hosts and damages what passes."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Piece, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, Replicated
from phalanx.checkpoint.replicas.replica_service import ReplicaService
from phalanx.checkpoint.snapshot_slots import SnapshotMemory
from phalanx.core.fault_points import NO_POINTS, Points

GUARD_S = 150.0
SIZE_BYTES = 2 * CHUNK_BYTES + 12345
SET_ID = "set"
SECRET = secrets.token_bytes(32)


def make_plan(rank: int = 0, size_bytes: int = SIZE_BYTES) -> ShardPlan:
    piece = Piece("w", "uint8", (size_bytes,), (0,), (size_bytes,), "trained", 0, size_bytes, b"head", b"tail")
    return ShardPlan(rank, 2, (piece,))


def make_record(plan: ShardPlan, content: bytes, step: int = 1, attempt: int = 1, state: str = '{"seed": 1}') -> Record:
    return Record(
        step=step,
        attempt=attempt,
        set_id=SET_ID,
        rank=plan.rank,
        shards=2,
        plan_sha256=plan.sha256,
        data_bytes=plan.data_bytes,
        sums=chunk_sums(content, plan.data_bytes),
        state=state,
        state_sum=state_sum(state),
    )


def put(vault: SnapshotMemory, plan: ShardPlan, step: int = 1, attempt: int = 1) -> bytes:
    """Commit a snapshot of random bytes of the rank's own shard."""
    content = os.urandom(plan.data_bytes)
    vault.lease(plan, 2)
    number = vault.free(plan.rank)
    assert number is not None
    vault.writing(plan.rank, number)
    cell = vault.taken(plan, number, SnapshotId(step, attempt, SET_ID))
    cell.block.memory[: plan.data_bytes] = content
    vault.commit_own(number, make_record(plan, content, step, attempt))
    return content


def read(vault: SnapshotMemory, rank: int, step: int, attempt: int = 1) -> bytes:
    with vault.pin(SnapshotId(step, attempt, SET_ID), rank) as (record, _, descriptor):
        return os.pread(descriptor, record.data_bytes, 0)


def steps(vault: SnapshotMemory) -> list[int]:
    return sorted(held.record.step for held in vault.held() if held.is_replica)


class Host:
    """A vault and its service; what was told of sending comes out of `told`."""

    def __init__(
        self,
        name: str,
        secret: bytes | None = SECRET,
        points: Points = NO_POINTS,
        idle_s: float = 20.0,
        persist_s: float = 0.0,
    ) -> None:
        self.vault = SnapshotMemory()
        self.vault.begin(1)
        self.told: SimpleQueue[Replicated] = SimpleQueue()
        self.reports: SimpleQueue[str] = SimpleQueue()
        self.service = ReplicaService(
            self.vault,
            self.told.put,
            host=name,
            points=points,
            report=self.reports.put,
            idle_s=idle_s,
            persist_s=persist_s,
        )
        if secret is not None:
            self.service.use_secret(secret)

    def send(self, plan: ShardPlan, peer: Endpoint, step: int = 1, attempt: int = 1) -> Replicated:
        self.service.send(plan, SnapshotId(step, attempt, SET_ID), peer)
        return self.told.get(timeout=GUARD_S)


@contextmanager
def hosts(*several: Host) -> Iterator[tuple[Host, ...]]:
    """Close them at the end, and see that their threads are gone."""
    before = _threads()
    try:
        yield several
    finally:
        for host in several:
            host.service.close()
    for thread in _threads() - before:
        thread.join(GUARD_S)
    assert not _threads() - before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("replica")}


Change = Callable[[bytes, int], bytes | None]
"""What becomes of bytes at an offset of the stream to the listener; None: the connection is cut there."""


class Proxy:
    """Stands between a sender and a listener and changes what passes.

    Args:
        forward, backward: for what goes to the listener, and what comes from it.
    """

    def __init__(self, behind: Endpoint, forward: Change | None = None, backward: Change | None = None) -> None:
        self._behind = behind
        self._changes = (forward, backward)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(behind.host, ("127.0.0.1",), self._server.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                front, _ = self._server.accept()
            except OSError:
                return
            back = socket.create_connection((self._behind.addresses[0], self._behind.port))
            self._sockets += [front, back]
            running = [True, True]
            for source, to, change in ((front, back, self._changes[0]), (back, front, self._changes[1])):
                thread = threading.Thread(target=self._pump, args=(source, to, change, running), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, to: socket.socket, change: Change | None, running: list[bool]) -> None:
        offset = 0
        with suppress(OSError):
            while content := source.recv(1 << 16):
                changed = change(content, offset) if change else content
                if changed is None:
                    break
                to.sendall(changed)
                offset += len(content)
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        running.pop()
        if not running:  # as if the process had been killed: what was not read makes the kernel send a reset
            for each in (source, to):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()


@contextmanager
def proxy(behind: Endpoint, forward: Change | None = None, backward: Change | None = None) -> Iterator[Endpoint]:
    between = Proxy(behind, forward, backward)
    try:
        yield between.endpoint
    finally:
        between.close()


def flip_bit_at(place: int, times: int = 1) -> Change:
    """Turn over a bit of the byte at `place`, in the first so many connections."""
    left = [times]

    def change(content: bytes, offset: int) -> bytes:
        if left[0] and offset <= place < offset + len(content):
            left[0] -= 1
            turned = bytearray(content)
            turned[place - offset] ^= 4
            return bytes(turned)
        return content

    return change


def cut_at(place: int) -> Change:
    return lambda content, offset: None if offset + len(content) > place else content
