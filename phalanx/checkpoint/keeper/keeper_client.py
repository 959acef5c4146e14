"""A rank's connection to the keeper of its host."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper import keeper_messages
from phalanx.checkpoint.keeper.keeper_messages import KeeperChannel, take_document
from phalanx.checkpoint.keeper_contract import (
    Destination,
    Endpoint,
    Held,
    KeeperLostError,
    Slot,
    SnapshotProgress,
    Stage,
    Taken,
)
from phalanx.ipc.shared_memory import Map

_REMEMBERED = 1000  # stages that have been reached, for whoever waits for one later
_WELCOME_S = 60.0


class KeeperClient:
    """A rank's connection to the keeper that listens at `address`; for one thread at a time.

    Its methods do not wait unless they say so.

    Raises:
        KeeperLostError: from any method, once the keeper is gone. RefusedError: a later attempt has been seen.
    """

    def __init__(self, address: Path, rank: int, world_size: int) -> None:
        self._welcome: keeper_messages.Welcome | None = None
        self._leases = 0
        self._plan: ShardPlan | None = None
        self._maps: dict[int, Map] = {}
        self._free: int | None = None
        self._writing: int | None = None
        self._replicates = False
        self._last: int | None = None
        self._awaited: set[Stage] = set()
        self._persisting: set[int] = set()
        self._unread: list[SnapshotProgress] = []
        self._reached: deque[tuple[int, Stage]] = deque(maxlen=_REMEMBERED)
        self._channel = KeeperChannel(address, self._on_message)
        until_s = time.monotonic() + _WELCOME_S
        try:
            self._channel.send(keeper_messages.Hello(keeper_messages.VERSION, rank, world_size))
            while self._welcome is None:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise KeeperLostError(f"the keeper at {address} has not answered for {_WELCOME_S:.0f} s")
                self._channel.pump(left_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the keeper."""
        assert self._welcome is not None
        return self._welcome.pid

    @property
    def last_attempt(self) -> int:
        """The highest attempt that the keeper had seen before this connection."""
        assert self._welcome is not None
        return self._welcome.attempt

    def held(self) -> list[Held]:
        """Committed copies of shards, own and replicas, of any rank; waits for what is being examined now."""
        _, (document,) = self._channel.ask(lambda number: keeper_messages.Ask(number, "held"))
        return [Held(Record.from_text(text), is_replica) for text, is_replica in json.loads(take_document(document))]

    @contextmanager
    def read(self, snapshot: SnapshotId, rank: int) -> Iterator[tuple[Record, ShardPlan, memoryview]]:
        """A committed copy, to be read within the context and checked against its sums; waits until it is handed over.

        Raises:
            LookupError: it is not there any more.
        """
        answer, descriptors = self._channel.ask(lambda number: keeper_messages.Read(number, *snapshot, rank))
        if answer.problem:
            raise LookupError(answer.problem)
        try:
            record_text, plan_text = json.loads(take_document(descriptors[0]))
            record, plan = Record.from_text(record_text), ShardPlan.from_bytes(plan_text.encode())
            mapped = Map(descriptors[1], record.data_bytes, writable=False)
            try:
                yield record, plan, mapped.memory
            finally:
                mapped.close()
        finally:
            os.close(descriptors[1])
            with suppress(Exception):  # it ends with the connection too
                self._channel.send(keeper_messages.Release(answer.number))

    def begin(self, attempt: int, set_id: str, shards: int) -> None:
        """This connection belongs to `attempt`, and its shards to the set; lower attempts are refused from now on."""
        self._channel.send(keeper_messages.Begin(attempt, set_id, shards))

    def resume_from(self, snapshot: SnapshotId) -> None:
        """Training goes on from `snapshot`, of an earlier attempt; to be called after `begin`, before the first `slot`.

        Later copies of earlier attempts, which were not whole, are void; else they would count as the newest, and the
        only whole snapshot would be written over first. Waits for the answer.
        """
        self._channel.ask(lambda number: keeper_messages.ResumeFrom(number, *snapshot))

    def lease(self, plan: ShardPlan, job: JobPlan | None, slots: int, destination: Destination | None) -> None:
        """Ask for memory; what was leased before is given up. It is allocated in the background (see `ready`).

        Memory of an earlier lease of the same rank and size is taken over, with what is committed in it. If it cannot
        be had, `poll` returns a problem at stage ``committed`` of step -1.

        Args:
            job: rank 0's; its host publishes.
            destination: None where nothing is ever made durable.
        """
        self._unmap()
        self._leases += 1
        self._plan = plan
        settings = None if destination is None else asdict(destination)
        documents = [plan.to_bytes()] if job is None else [plan.to_bytes(), job.to_bytes()]
        self._channel.send(keeper_messages.Lease(self._leases, slots, settings), *documents)

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        """Send every snapshot from the next one on to the keeper at `peer`; talk to those with `secret`, no others.

        What an earlier attempt than `attempt` wanted to send is given up.
        """
        self._replicates = peer is not None
        fields = None if peer is None else list(vars(peer).values())
        self._channel.send(keeper_messages.Replicate(fields, attempt, secret.hex()))

    @property
    def endpoint(self) -> Endpoint:
        """Where other keepers reach this one; it begins to listen when first asked; waits for the answer.

        Raises:
            OSError: it cannot listen.
        """
        answer, descriptors = self._channel.ask(lambda number: keeper_messages.Ask(number, "endpoint"))
        if answer.problem:
            raise OSError(answer.problem)
        host, addresses, *rest = json.loads(take_document(descriptors[0]))
        return Endpoint(host, tuple(addresses), *rest)

    @property
    def ready(self) -> bool:
        """Whether the memory of the lease is there and can be written without page faults."""
        self._channel.pump()
        return bool(self._maps) and all(map_.is_ready for map_ in self._maps.values())

    @property
    def busy(self) -> bool:
        """Whether the next snapshot cannot be taken yet: no memory, no free slot, or the last one is not committed, and
        replicated where that is asked for."""
        has_slot = self.ready and (self._free is not None or self._writing is not None)
        return bool(self._awaited) or not has_slot

    @property
    def persisting(self) -> bool:
        """Whether a snapshot of this rank is on its way to durable storage."""
        self._channel.pump()
        return bool(self._persisting)

    def slot(self) -> Slot:
        """A slot to write the next snapshot into, only while not `busy`; the same again until it is `taken`."""
        if self._writing is None:
            if self._free is None or self._awaited:
                raise RuntimeError("a slot was asked for while the keeper was busy")
            self._channel.send(keeper_messages.Writing(self._leases, self._free))
            self._writing, self._free = self._free, None
        return Slot(self._writing, self._maps[self._writing].memory)

    def taken(self, slot: Slot, taken: Taken) -> None:
        """`slot` holds a snapshot now."""
        if slot.number != self._writing:
            raise RuntimeError(f"slot {slot.number} is not being written")
        flags = taken.stepped, taken.persist, taken.hurry
        copied = keeper_messages.Copied(self._leases, slot.number, taken.step, *flags, taken.unix_ns)
        self._channel.send(copied, json.dumps([taken.state, taken.metrics]).encode())
        self._writing = None
        self._last = taken.step
        self._awaited = {"committed", "replicated"} if self._replicates else {"committed"}
        self._reached = deque((r for r in self._reached if r[0] != taken.step), _REMEMBERED)
        if taken.persist:
            self._persisting.add(taken.step)

    def poll(self) -> list[SnapshotProgress]:
        """What has happened since the last call."""
        self._channel.pump()
        unread, self._unread = self._unread, []
        return unread

    def wait(self, step: int, stage: Stage, timeout_s: float) -> list[SnapshotProgress]:
        """Wait until the snapshot of `step` has come to `stage`, or failed to; all that happened meanwhile.

        Raises:
            TimeoutError: it has not.
        """
        until_s = time.monotonic() + timeout_s
        self._channel.pump()
        while (step, stage) not in self._reached:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"step {step} was not {stage} within {timeout_s:g} s")
            self._channel.pump(left_s)
        return self.poll()

    def finish(self) -> None:
        """The job has ended well for this rank: the keeper ends, once every rank of the host has called this."""
        self._channel.send(keeper_messages.Finish())

    def close(self) -> None:
        """Hang up; the lease ends, what is committed stays until the keeper's time to live is over."""
        self._channel.close()
        self._unmap()

    def _unmap(self) -> None:
        for map_ in self._maps.values():
            map_.close()
        self._maps, self._free, self._writing = {}, None, None

    def _on_message(self, message: Any, descriptors: list[int]) -> None:
        try:
            if isinstance(message, keeper_messages.Welcome):
                self._welcome = message
            elif isinstance(message, keeper_messages.Told):
                self._on_progress(SnapshotProgress(*message.fields))
            elif isinstance(message, keeper_messages.Free) and message.lease == self._leases:
                self._free = None if message.slot < 0 else message.slot
            elif isinstance(message, keeper_messages.Memory) and message.lease == self._leases:
                problem = message.problem
                try:
                    for number, descriptor in zip(message.slots, descriptors, strict=True):
                        self._maps[number] = Map(descriptor, message.size_bytes, writable=True)
                except OSError as error:
                    self._unmap()
                    problem = f"{message.size_bytes} bytes of the keeper's memory cannot be mapped: {error}"
                if problem:
                    self._unread.append(SnapshotProgress(-1, "committed", problem))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_progress(self, progress: SnapshotProgress) -> None:
        self._unread.append(progress)
        self._reached.append((progress.step, progress.stage))
        ended: set[Stage] = {progress.stage}
        if progress.stage == "committed" and progress.problem:
            self._reached.append((progress.step, "replicated"))  # what is not committed is not sent either
            ended.add("replicated")
        if progress.step == self._last:
            self._awaited -= ended
        if progress.stage == "durable":
            self._persisting.discard(progress.step)
