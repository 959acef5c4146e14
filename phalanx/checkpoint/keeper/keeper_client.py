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
from phalanx.checkpoint.keeper.keeper_messages import Channel, take
from phalanx.checkpoint.keeper.shared_memory import Map
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

_REMEMBERED = 1000  # stages that have been reached, for whoever waits for one later
_WELCOME_S = 60.0


def connect(address: Path, rank: int, world_size: int) -> KeeperClient:
    """The keeper that listens at `address`; see `phalanx.checkpoint.keeper_contract.Keeper`.

    Raises:
        KeeperLostError: there is none.
    """
    return KeeperClient(address, rank, world_size)


class KeeperClient:
    """Implements `phalanx.checkpoint.keeper_contract.Keeper`; for one thread at a time."""

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
        self._news: list[SnapshotProgress] = []
        self._reached: deque[tuple[int, Stage]] = deque(maxlen=_REMEMBERED)
        self._channel = Channel(address, self._hear)
        self._greet(address, rank, world_size)

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
        return [Held(Record.from_text(text), is_replica) for text, is_replica in json.loads(take(document))]

    @contextmanager
    def read(self, snapshot: SnapshotId, rank: int) -> Iterator[tuple[Record, ShardPlan, memoryview]]:
        """A committed copy, to be read within the context and checked against its sums.

        Raises:
            LookupError: it is not there any more.
        """
        answer, descriptors = self._channel.ask(lambda number: keeper_messages.Read(number, *snapshot, rank))
        if answer.problem:
            raise LookupError(answer.problem)
        try:
            record_text, plan_text = json.loads(take(descriptors[0]))
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
        """Training goes on from `snapshot`, of an earlier attempt: later copies of those are void."""
        self._channel.ask(lambda number: keeper_messages.ResumeFrom(number, *snapshot))

    def lease(self, plan: ShardPlan, job: JobPlan | None, slots: int, destination: Destination | None) -> None:
        """Ask for memory; what was leased before is given up."""
        self._give_up()
        self._leases += 1
        self._plan = plan
        settings = None if destination is None else asdict(destination)
        documents = [plan.to_bytes()] if job is None else [plan.to_bytes(), job.to_bytes()]
        self._channel.send(keeper_messages.Lease(self._leases, slots, settings), *documents)

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        """Send every snapshot from the next one on to the keeper at `peer`; talk to those with `secret`, no others."""
        self._replicates = peer is not None
        fields = None if peer is None else list(vars(peer).values())
        self._channel.send(keeper_messages.Replicate(fields, attempt, secret.hex()))

    @property
    def endpoint(self) -> Endpoint:
        """Where other keepers reach this one.

        Raises:
            OSError: it cannot listen.
        """
        answer, descriptors = self._channel.ask(lambda number: keeper_messages.Ask(number, "endpoint"))
        if answer.problem:
            raise OSError(answer.problem)
        host, addresses, *rest = json.loads(take(descriptors[0]))
        return Endpoint(host, tuple(addresses), *rest)

    @property
    def ready(self) -> bool:
        """Whether the memory of the lease is there and can be written without page faults."""
        self._channel.pump()
        return bool(self._maps) and all(map_.is_ready for map_ in self._maps.values())

    @property
    def busy(self) -> bool:
        """Whether the next snapshot cannot be taken yet."""
        has_slot = self.ready and (self._free is not None or self._writing is not None)
        return bool(self._awaited) or not has_slot

    @property
    def persisting(self) -> bool:
        """Whether a snapshot of this rank is on its way to durable storage."""
        self._channel.pump()
        return bool(self._persisting)

    def slot(self) -> Slot:
        """A slot to write the next snapshot into; the same again until it is `taken`."""
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
        news, self._news = self._news, []
        return news

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
        """The job has ended well for this rank."""
        self._channel.send(keeper_messages.Finish())

    def close(self) -> None:
        """Hang up; the lease ends, what is committed stays."""
        self._channel.close()
        self._give_up()

    def _greet(self, address: Path, rank: int, world_size: int) -> None:
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

    def _give_up(self) -> None:
        for map_ in self._maps.values():
            map_.close()
        self._maps, self._free, self._writing = {}, None, None

    def _hear(self, message: Any, descriptors: list[int]) -> None:
        try:
            if isinstance(message, keeper_messages.Welcome):
                self._welcome = message
            elif isinstance(message, keeper_messages.Told):
                self._progress(SnapshotProgress(*message.fields))
            elif isinstance(message, keeper_messages.Free) and message.lease == self._leases:
                self._free = None if message.slot < 0 else message.slot
            elif isinstance(message, keeper_messages.Memory) and message.lease == self._leases:
                self._map(message, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, memory: keeper_messages.Memory, descriptors: list[int]) -> None:
        problem = memory.problem
        try:
            for number, descriptor in zip(memory.slots, descriptors, strict=True):
                self._maps[number] = Map(descriptor, memory.size_bytes, writable=True)
        except OSError as error:
            self._give_up()
            problem = f"{memory.size_bytes} bytes of the keeper's memory cannot be mapped: {error}"
        if problem:
            self._news.append(SnapshotProgress(-1, "committed", problem))

    def _progress(self, progress: SnapshotProgress) -> None:
        self._news.append(progress)
        self._reached.append((progress.step, progress.stage))
        is_lost = progress.stage == "committed" and bool(progress.problem)
        if is_lost:
            self._reached.append((progress.step, "replicated"))
        if progress.step == self._last:
            self._awaited -= {"committed", "replicated"} if is_lost else {progress.stage}
        if progress.stage == "durable":
            self._persisting.discard(progress.step)
