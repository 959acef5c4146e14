"""Sends the snapshots of one rank to the keeper of a peer host, in a thread of its own.

`receive_chunks` receives elements of a shard, and sums each chunk while it is in the cache.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from xxhash import xxh3_64

from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan
from phalanx.checkpoint.keeper_contract import Endpoint, Replicated
from phalanx.checkpoint.replicas.replica_link import (
    IDLE_S,
    Go,
    LinkError,
    Offer,
    Plan,
    PlanNeeded,
    Refused,
    ReplicaLink,
    Stored,
    call,
)
from phalanx.core.fault_points import NO_POINTS, Points

# Generous, since a slow transfer is still of use; but without an end a peer that takes a byte now and then would hold
# this thread, and the slot that it sends, for ever.
_PATIENCE_S = 60.0
_MIN_BYTES_PER_S = 1 << 20


def deadline_s(length_bytes: int) -> float:
    """`time.monotonic` until which a transfer may take: a minute, and a second for every MiB."""
    return time.monotonic() + _PATIENCE_S + length_bytes / _MIN_BYTES_PER_S


def receive_chunks(link: ReplicaLink, memory: memoryview, record: Record, first: int) -> list[int]:
    """Fill `memory`, which begins at chunk `first` of the shard, and return the chunks that do not match the record.

    All of it is read in any case, so that the conversation can go on.

    Raises:
        LinkError: the other side went away, or is too slow.
    """
    until_s = deadline_s(len(memory))
    wrong = []
    for number, start in enumerate(range(0, len(memory), CHUNK_BYTES), start=first):
        hasher = xxh3_64()
        link.receive_into(memory[start : start + CHUNK_BYTES], until_s, hasher.update)
        if hasher.intdigest() != record.sums[number]:
            wrong.append(number)
    return wrong


def spans(record: Record, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where runs of chunks begin and end, in bytes.

    Raises:
        ValueError: one lies outside of the shard.
    """
    for first, count in runs:
        if not 0 <= first <= first + count <= len(record.sums):
            raise ValueError(f"chunks {first} to {first + count} of {len(record.sums)}")
        yield first * CHUNK_BYTES, min((first + count) * CHUNK_BYTES, record.data_bytes)


def disagreement(record: Record, plan: ShardPlan | None = None) -> str | None:
    """Why a record cannot be one of a shard (of this plan, where it is given), or None; looked at before memory is
    taken."""
    if record.data_bytes < 0 or len(record.sums) != -(-record.data_bytes // CHUNK_BYTES):
        return f"the record has {len(record.sums)} sums for {record.data_bytes} bytes"
    if (record.state or record.state_sum) and state_sum(record.state) != record.state_sum:
        return "the state in the record does not match its sum"
    if plan is None:
        return None
    if plan.sha256 != record.plan_sha256 or plan.rank != record.rank:
        return "the plan is not that of the record"
    if plan.data_bytes != record.data_bytes:
        return f"the record has {record.data_bytes} bytes, its plan {plan.data_bytes}"
    # The plan came over the network: such a piece would be read or written outside of its memory.
    if any(piece.start_bytes < 0 or piece.length_bytes < 0 for piece in plan.pieces):
        return "the plan has a piece outside of its memory"
    return None


def describe(record: Record, chunks: list[int], host: str) -> str:
    """For people: which chunks are wrong."""
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return f"chunk {chunks[0]}{more} of step {record.step}, rank {record.rank} from {host} does not match its sum"


PERSIST_S = 10.0
"""Seconds after the first try in which another may begin."""

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

Pinned = AbstractContextManager[tuple[Record, ShardPlan, int]]


class Way(NamedTuple):
    """Where snapshots of an attempt go (None: nowhere now), and the secret of the keepers."""

    peer: Endpoint | None
    attempt: int
    secret: bytes


class Parcel(NamedTuple):
    """A snapshot to be sent; `pinned` has been entered, and is left once it is there, or will not be."""

    pinned: Pinned
    record: Record
    plan: ShardPlan
    descriptor: int
    peer: Endpoint
    secret: bytes


class _RefusedForGoodError(Exception):
    """The other host has seen a later attempt."""


class Sender:
    """A thread that sends parcels one after the other, over one connection that it keeps.

    Args:
        points: ``replica.begin``, ``replica.half`` and ``replica.sent``.
        persist_s: see `PERSIST_S`.
    """

    def __init__(
        self,
        notify: Callable[[Replicated], None],
        points: Points = NO_POINTS,
        persist_s: float = PERSIST_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._notify = notify
        self._points = points
        self._persist_s = persist_s
        self._idle_s = idle_s
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._turned = threading.Event()
        self._wanted: Way | None = None
        self._lock = threading.Lock()
        self._link: ReplicaLink | None = None
        self._way: Way | None = None
        self._thread = threading.Thread(target=self._run, name="replica-send", daemon=True)
        self._thread.start()

    def submit(self, parcel: Parcel) -> None:
        """Send this after all before it; does not wait."""
        self._parcels.put(parcel)

    def turn(self, way: Way) -> None:
        """From now on all go there, those that wait or are being tried again too; of another attempt: nowhere."""
        with self._lock:
            if self._wanted == way:
                return
            self._wanted = way
            if self._link is not None and self._way != way:
                # Shut down, not closed: the thread may be sending on it, and closes it itself once that has failed.
                self._link.hang_up()
        self._turned.set()

    def close(self) -> None:
        """Break off what is under way, and wait for the thread to be gone; parcels are reported as failed."""
        self._closing.set()
        self._turned.set()
        with self._lock:
            if self._link is not None:
                self._link.hang_up()
        self._parcels.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            try:
                outcome = self._deliver(parcel)
            finally:
                # Before the outcome is reported: a rank that hears of it may need the slot at once.
                parcel.pinned.__exit__(None, None, None)
            self._notify(outcome)
        self._drop()

    def _deliver(self, parcel: Parcel) -> Replicated:
        step, rank, to, length = parcel.record.step, parcel.record.rank, parcel.peer.host, parcel.record.data_bytes
        began_s = time.monotonic()
        try:
            peer = self._persist(parcel)
        except _RefusedForGoodError as error:
            return Replicated(rank, step, to, f"{to} refused step {step} of rank {rank}: {error}", refused=True)
        except Exception as error:  # whatever it is, the rank that waits for this snapshot needs an outcome
            why = str(error) if isinstance(error, LinkError) else repr(error)
            return Replicated(rank, step, to, f"step {step} of rank {rank} was not replicated to {to}: {why}")
        seconds = time.monotonic() - began_s
        return Replicated(rank, step, to, "", False, seconds, length, share_of_rate(length, seconds, peer))

    def _persist(self, parcel: Parcel) -> Endpoint:
        """Try again, with longer and longer pauses, as long as that may help; the peer that has it then."""
        until_s, pause_s = time.monotonic() + self._persist_s, _FIRST_PAUSE_S
        while True:
            peer = self._peer_of(parcel)
            try:
                self._try(parcel, peer)
                return peer
            except LinkError:
                self._drop()
                # The time that was spent on another host does not count.
                if self._peer_of(parcel) != peer:
                    until_s, pause_s = time.monotonic() + self._persist_s, _FIRST_PAUSE_S
                    continue
                if time.monotonic() + pause_s > until_s:
                    raise
            # A turn to another host ends the pause.
            if self._turned.wait(pause_s):
                self._turned.clear()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _peer_of(self, parcel: Parcel) -> Endpoint:
        self._check()
        wanted = self._wanted
        if wanted is None:
            return parcel.peer
        # The latest turn counts, not what the parcel was submitted with: the peer may have been lost since.
        if wanted.attempt != parcel.record.attempt or wanted.secret != parcel.secret:
            raise LinkError("another attempt has begun")
        return wanted.peer or parcel.peer

    def _try(self, parcel: Parcel, peer: Endpoint) -> None:
        record, plan = parcel.record, parcel.plan
        self._points.reach("replica.begin", step=record.step, rank=record.rank)
        link = self._open(parcel, peer)
        link.send(Offer(record.to_text()))
        # The plan is long and the same for all snapshots of a lease, so it is sent only where the peer lacks it.
        answer = link.receive(PlanNeeded, Go, Refused)
        if isinstance(answer, PlanNeeded):
            link.send(Plan(plan.to_bytes().decode()))
            answer = link.receive(Go, Refused)
        _raise_refusal(answer)
        # In two halves, at the border of a chunk, so that faults can be injected while a transfer is half done.
        half = record.data_bytes // 2 // CHUNK_BYTES * CHUNK_BYTES
        until_s = deadline_s(record.data_bytes)
        link.send_file(parcel.descriptor, 0, half, until_s)
        self._points.reach("replica.half", step=record.step, rank=record.rank)
        link.send_file(parcel.descriptor, half, record.data_bytes - half, until_s)
        self._points.reach("replica.sent", step=record.step, rank=record.rank)
        _raise_refusal(link.receive(Stored, Refused))

    def _open(self, parcel: Parcel, peer: Endpoint) -> ReplicaLink:
        self._check()
        way = Way(peer, parcel.record.attempt, parcel.secret)
        if self._link is None or self._way != way or self._link.is_broken():
            self._drop()
            link = call(peer, parcel.secret, self._idle_s)
            with self._lock:
                self._link, self._way = link, way
            # Turned away while the call was being made: `turn` could not hang up a link that was not there yet.
            if self._peer_of(parcel) != peer:
                raise LinkError(f"snapshots do not go to {peer.host} any more")
        return self._link

    def _check(self) -> None:
        if self._closing.is_set():
            raise LinkError("this keeper ends")

    def _drop(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._link = None


def share_of_rate(length_bytes: int, seconds: float, endpoint: Endpoint) -> float | None:
    """How much of the rate of the other host's interface a transfer reached; None where that is not known."""
    if not endpoint.interface_bits_per_s or seconds <= 0:
        return None
    return 8 * length_bytes / seconds / endpoint.interface_bits_per_s


def _raise_refusal(answer: object) -> None:
    if isinstance(answer, Refused):
        if answer.later_attempt:
            # Attempts only go up, so trying again is of no use.
            raise _RefusedForGoodError(answer.why)
        raise LinkError(answer.why)
