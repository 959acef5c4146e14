"""Reads what a keeper of another host holds, straight into the memory where it is wanted.

Every chunk is checked against the sums of its record as it arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import Buffer

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, Held
from phalanx.checkpoint.replicas.replica_link import (
    IDLE_S,
    Given,
    Holdings,
    LinkError,
    List,
    Missing,
    ReplicaLink,
    TurnedAwayError,
    Want,
    call,
)
from phalanx.checkpoint.replicas.sender import deadline_s, describe, disagreement, receive_chunks, share_of_rate

STREAMS = 2
"""Connections at once for one shard; docs/replicas.md has the figures."""

_TRIES = 4  # where a gate is crowded
_SPLIT_BYTES = 16 << 20  # below that, one connection does

Run = tuple[int, int]  # the first chunk, and how many


class DamagedError(OSError):
    """What another host holds, or sent, does not match its sums; other sources may."""


@dataclass(frozen=True)
class Fetched:
    """A shard that has come, whole and checked.

    Attributes:
        bytes, seconds: what it took.
        interface: of the host that it came from; empty where that is not known.
        share: of the rate of that interface that was reached; None where it is not known.
    """

    record: Record
    plan: ShardPlan
    bytes: int
    seconds: float
    interface: str
    share: float | None


def list_held(endpoint: Endpoint, secret: bytes, idle_s: float = IDLE_S) -> list[Held]:
    """What the keeper at `endpoint` holds.

    Raises:
        LinkError: it cannot be reached, or has another secret.
    """
    with _called(endpoint, secret, idle_s) as link:
        link.send(List())
        held = link.receive(Holdings).held
        return [Held(_record(link, text), bool(is_replica)) for text, is_replica in held]


def fetch(
    endpoint: Endpoint,
    secret: bytes,
    snapshot: SnapshotId,
    rank: int,
    into: Buffer | Callable[[Record, ShardPlan], Buffer],
    *,
    streams: int = STREAMS,
    idle_s: float = IDLE_S,
) -> Fetched:
    """Read a whole shard.

    Args:
        into: memory for its ``plan.data_bytes``, or what gives some once record and plan are known. Undefined after an
            error.
        streams: connections at once.

    Raises:
        LookupError: it is not there any more. DamagedError: a chunk does not match its sum.
        LinkError: the other host cannot be reached, went away, or has another secret.
        ValueError: `into` is too small.
    """
    began_s = time.monotonic()
    with _called(endpoint, secret, idle_s) as link:
        record, plan = _ask(link, snapshot, rank)
        memory = memoryview(into(record, plan) if callable(into) else into)
        if memory.readonly:
            raise ValueError("the memory that a shard is to come into is read-only")
        memory = memory.cast("B")
        if len(memory) < record.data_bytes:
            raise ValueError(f"{len(memory)} bytes of memory for the {record.data_bytes} of rank {rank}")
        # All chunks as runs of about equal length, one for each connection that is worth it.
        chunks = len(record.sums)
        count = max(1, min(streams, record.data_bytes // _SPLIT_BYTES))
        edges = [chunks * i // count for i in range(count + 1)]
        runs = [(low, high - low) for low, high in pairwise(edges) if high > low]

        def fetch_apart(run: Run) -> None:
            with _called(endpoint, secret, idle_s) as another:
                _fetch_run(another, record, run, memory)

        with ThreadPoolExecutor(max(len(runs) - 1, 1), "replica-fetch") as pool:
            others = [pool.submit(fetch_apart, run) for run in runs[1:]]
            for run in runs[:1]:
                _fetch_run(link, record, run, memory)
            for other in others:
                other.result()
    seconds = time.monotonic() - began_s
    share = share_of_rate(record.data_bytes, seconds, endpoint)
    return Fetched(record, plan, record.data_bytes, seconds, endpoint.interface, share)


class RemoteCopy:
    """A committed copy that another host holds, on a connection of its own."""

    def __init__(self, link: ReplicaLink, record: Record, plan: ShardPlan) -> None:
        self._link = link
        self.record = record
        self.plan = plan

    def chunks(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The chunks of these numbers, in order, as they come; each holds until the next is taken.

        They are not checked: the caller sums them while they are in the cache. Between the first and the last,
        nothing else can be asked of this copy.

        Raises:
            LinkError: the connection is lost. LookupError: the copy is not there any more.
        """
        if not numbers:
            return
        runs: list[Run] = []
        for number in numbers:
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        _want(self._link, self.record.snapshot, self.record.rank, runs, plan=False)
        memory = memoryview(bytearray(min(CHUNK_BYTES, self.record.data_bytes)))
        for number in numbers:
            chunk = memory[: _length(self.record, (number, 1))]
            self._link.receive_into(chunk, deadline_s(len(chunk)))
            yield chunk


class PeerCopies:
    """Opens copies that keepers of other hosts hold; `secret`: of the job's keepers."""

    def __init__(self, secret: bytes, idle_s: float = IDLE_S) -> None:
        self._secret = secret
        self._idle_s = idle_s

    @contextmanager
    def open(self, host: Endpoint, snapshot: SnapshotId, rank: int) -> Iterator[RemoteCopy]:
        """A copy on `host`; may be called from several threads.

        Raises:
            LookupError: it is not there any more. LinkError: the host cannot be reached, or has another secret.
        """
        with _called(host, self._secret, self._idle_s) as link:
            yield RemoteCopy(link, *_ask(link, snapshot, rank))


def _fetch_run(link: ReplicaLink, record: Record, run: Run, memory: memoryview) -> None:
    given = _want(link, record.snapshot, record.rank, [run], plan=False)
    if _record(link, given.record) != record:
        raise DamagedError(f"step {record.step}, rank {record.rank} at {link.host} has another record than before")
    start = run[0] * CHUNK_BYTES
    wrong = receive_chunks(link, memory[start : start + _length(record, run)], record, run[0])
    if wrong:
        raise DamagedError(describe(record, wrong, link.host))


def _ask(link: ReplicaLink, snapshot: SnapshotId, rank: int) -> tuple[Record, ShardPlan]:
    given = _want(link, snapshot, rank, [], plan=True)
    record = _record(link, given.record)
    try:
        plan = ShardPlan.from_bytes(given.plan.encode())
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{link.host} has no plan for step {snapshot.step}, rank {rank}: {error}") from None
    problem = disagreement(record, plan)
    if problem is None and (record.snapshot, record.rank) != (snapshot, rank):
        problem = f"it is of step {record.step}, attempt {record.attempt}, rank {record.rank}"
    if problem is not None:
        raise DamagedError(f"step {snapshot.step}, rank {rank} at {link.host}: {problem}")
    return record, plan


def _want(link: ReplicaLink, snapshot: SnapshotId, rank: int, runs: list[Run], *, plan: bool) -> Given:
    link.send(Want(*snapshot, rank, runs, plan))
    answer = link.receive(Given, Missing)
    if isinstance(answer, Missing):
        raise LookupError(f"{link.host}: {answer.why}")
    assert isinstance(answer, Given)
    return answer


def _record(link: ReplicaLink, text: str) -> Record:
    try:
        return Record.from_text(text)
    except (ValueError, TypeError, KeyError) as error:
        raise LinkError(f"{link.host} sent something that is no record: {error}") from None


def _length(record: Record, run: Run) -> int:
    return min((run[0] + run[1]) * CHUNK_BYTES, record.data_bytes) - run[0] * CHUNK_BYTES


@contextmanager
def _called(endpoint: Endpoint, secret: bytes, idle_s: float) -> Iterator[ReplicaLink]:
    for left in reversed(range(_TRIES)):
        try:
            link = call(endpoint, secret, idle_s)
            break
        except TurnedAwayError:
            if not left:
                raise
    try:
        yield link
    finally:
        link.close()
