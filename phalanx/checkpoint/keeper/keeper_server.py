"""The keeper: one loop that serves the ranks of its host; all that takes long is done in threads.

It knows each connected rank by a session, and ends when its `Life` is over.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.checkpoint.format.shard_plan import ALIGN_BYTES, JobPlan, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper import keeper_messages
from phalanx.checkpoint.keeper.keeper_messages import Mailbox, RankConnection
from phalanx.checkpoint.keeper.snapshot_stages import KeeperServices, Snapshot, SnapshotStages
from phalanx.checkpoint.keeper.snapshot_verifier import Examiner
from phalanx.checkpoint.keeper_contract import Destination, Endpoint, RefusedError, SnapshotProgress, Taken
from phalanx.checkpoint.snapshot_slots import Cell, Pin, SnapshotMemory
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.ipc import local_socket
from phalanx.ipc.shared_memory import read_document, write_document

_EMPTY_TTL_S = 120.0  # ranks may take a while to import what they need
_PERSIST_GRACE_S = 3600.0


@dataclass
class Life:
    """Ends when every rank that began has finished, or some time after the last one hung up.

    Attributes:
        ttl_s: how long, counted from when there was last a rank connected.
    """

    ttl_s: float
    _attempt: int = 0
    _began: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _was_connected: bool = False
    _alone_since_s: float = field(default_factory=time.monotonic)

    def begin(self, rank: int, attempt: int) -> None:
        """A rank belongs to an attempt; those of lower ones do not count any more."""
        if attempt > self._attempt:
            self._attempt = attempt
            self._began.clear()
            self._finished.clear()
        self._began.add(rank)
        self._finished.discard(rank)

    def finish(self, rank: int) -> None:
        """The job has ended well for a rank."""
        self._finished.add(rank)

    def stay(self) -> None:
        """Somebody is about to connect: do not end because the ranks before have finished."""
        self._finished.clear()
        self._alone_since_s = time.monotonic()

    def is_over(self, connected: int, *, is_idle: bool, is_persisting: bool, is_empty: bool = False) -> bool:
        """Whether the keeper ends now.

        Args:
            connected: how many ranks are.
            is_idle: whether nothing is on its way through the stages.
            is_persisting, is_empty: see `left_s`.
        """
        # A connection that ended since the last look counts until now.
        if connected or self._was_connected:
            self._alone_since_s = time.monotonic()
        self._was_connected = connected > 0
        if self._began and self._began <= self._finished and is_idle:
            return True
        return not connected and self.left_s(is_persisting=is_persisting, is_empty=is_empty) <= 0

    def left_s(self, *, is_persisting: bool, is_empty: bool = False) -> float:
        """How long it lives if nothing happens, seconds.

        Args:
            is_persisting: what is on its way to durable storage is waited for, an hour more than the time to live.
            is_empty: it holds nothing that anybody could come back for, as after a start that was refused.
        """
        # After a start that was refused nobody comes back, so it does not stay for the whole time to live.
        ttl_s = min(self.ttl_s, _EMPTY_TTL_S) if is_empty else self.ttl_s
        grace_s = _PERSIST_GRACE_S if is_persisting else 0.0
        return self._alone_since_s + ttl_s + grace_s - time.monotonic()


@dataclass
class Leased:
    """Memory that a rank has asked for under this number.

    Attributes:
        is_ready: whether it is allocated.
        offered: the slot that the rank knows to be free.
        open: slots that it may be writing to.
    """

    number: int
    plan: ShardPlan
    job: JobPlan | None
    destination: Destination | None
    is_ready: bool = False
    offered: int | None = None
    open: set[int] = field(default_factory=set)


@dataclass(eq=False)
class RankSession:
    """A connection. `rank` is -1 until its `Hello`, `attempt` 0 until its `Begin`."""

    connection: RankConnection
    rank: int = -1
    world_size: int = 0
    attempt: int = 0
    set_id: str = ""
    shards: int = 0
    lease: Leased | None = None
    peer: Endpoint | None = None
    pins: dict[int, Pin] = field(default_factory=dict)


_TICK_S = 0.02
_MAX_TEXT = 4000  # of a message, in which a packet's other fields have to have room


class ProtocolError(RuntimeError):
    """A rank has sent what makes no sense here."""


class KeeperServer:
    """Serves `listener`, which it takes over.

    Args:
        still_wanted: asked when the keeper is about to end; True: somebody is about to connect.
        points: ``keeper.lease``, ``keeper.taken``, and those of `Examiner`.
    """

    def __init__(
        self,
        listener: socket.socket,
        services: KeeperServices,
        ttl_s: float,
        still_wanted: Callable[[], bool] = lambda: False,
        points: Points = NO_POINTS,
        examiners: int = 1,
    ) -> None:
        self._listener = listener
        self._points = points
        self._still_wanted = still_wanted
        self._selector = selectors.DefaultSelector()
        self._mailbox = Mailbox(self._selector)
        self._memory = SnapshotMemory(self._mailbox.ring)
        self._examiner = Examiner(self._memory, points, examiners, services.give_way)
        self._persister_descriptor = -1
        self._sessions: list[RankSession] = []
        self._life = Life(ttl_s)
        self._stages = SnapshotStages(
            self._memory, self._examiner, services, self._mailbox.post, self._ranks_of, self._report
        )
        self._is_ending = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._handlers: dict[type, Callable[[RankSession, Any, list[int]], None]] = {
            keeper_messages.Hello: self._hello,
            keeper_messages.Begin: self._begin,
            keeper_messages.ResumeFrom: self._resume_from,
            keeper_messages.Lease: self._lease,
            keeper_messages.Replicate: self._replicate,
            keeper_messages.Writing: self._writing,
            keeper_messages.Copied: self._copied,
            keeper_messages.Ask: self._ask,
            keeper_messages.Read: self._read,
            keeper_messages.Release: self._release,
            keeper_messages.Finish: self._finish,
            keeper_messages.Stay: self._stay,
            keeper_messages.End: self._end,
        }

    def run(self) -> None:
        """Serve until the job is over, or the time to live."""
        while True:
            ranks, is_idle = self._ranks(), self._stages.is_idle
            # What it may have to stay for.
            business = {
                "is_persisting": self._stages.is_persisting,
                "is_empty": is_idle and not self._memory.held(),
            }
            is_over = self._life.is_over(len(ranks), is_idle=is_idle, **business)
            if self._is_ending or (is_over and not self._still_wanted()):
                break
            left_s = self._life.left_s(**business)
            # With ranks connected only a message can end it, so it waits without a limit.
            for key, _ in self._selector.select(max(left_s, _TICK_S) if not ranks else None):
                key.data()
            self._watch_persister()
            self._offer_slots()
        for session in list(self._sessions):
            session.connection.close()
        self._stages.close()

    def _ranks(self) -> list[RankSession]:
        return [session for session in self._sessions if session.rank >= 0]

    def _ranks_of(self, attempt: int) -> list[int]:
        return [session.rank for session in self._ranks() if session.attempt == attempt]

    def _report(self, rank: int, attempt: int, progress: SnapshotProgress) -> None:
        fields = list(asdict(progress).values())
        message = keeper_messages.Told([field[:_MAX_TEXT] if isinstance(field, str) else field for field in fields])
        for session in self._ranks():
            if (session.rank, session.attempt) == (rank, attempt):
                session.connection.send(message)

    def _watch_persister(self) -> None:
        """Its descriptor is another one for every process that it starts."""
        # A closed descriptor has left the selector's kernel side already, and its number may be another file's now.
        if self._persister_descriptor >= 0:
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(self._persister_descriptor)
        self._persister_descriptor = self._stages.persister_descriptor
        if self._persister_descriptor >= 0:
            self._selector.register(self._persister_descriptor, selectors.EVENT_READ, self._stages.read_persister)

    def _offer_slots(self) -> None:
        for session in self._sessions:
            lease = session.lease
            if lease is None or not lease.is_ready:
                continue
            free = self._memory.free(session.rank)
            if free != lease.offered:
                lease.offered = free
                if free is not None:
                    # From here on the rank may write to it without asking, so it counts as written to should the rank
                    # be shut out.
                    lease.open.add(free)
                session.connection.send(keeper_messages.Free(lease.number, -1 if free is None else free))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again
            return
        # Snapshots are the model; abstract sockets have no permissions that would keep other users out.
        if not local_socket.same_user(connection):
            connection.close()
            return
        session = RankSession(RankConnection(connection, self._selector, lambda: self._on_readable(session)))
        self._sessions.append(session)

    def _on_readable(self, session: RankSession) -> None:
        descriptors: list[int] = []
        try:
            message, descriptors = session.connection.receive()
            if message is None:
                self._drop(session)
                return
            before_hello = (keeper_messages.Hello, keeper_messages.Stay, keeper_messages.End)
            if session.rank < 0 and not isinstance(message, before_hello):
                raise ProtocolError(f"{type(message).__name__} came before Hello")
            self._handlers[type(message)](session, message, descriptors)
        # The selector said readable, but the packet is not there: nothing has happened.
        except BlockingIOError:
            pass
        except OSError:
            self._drop(session)
        except RefusedError as error:
            self._shut_out(session, keeper_messages.Refused(str(error)[:_MAX_TEXT]))
        except Exception as error:  # what one rank sends must not cost the others their snapshots
            traceback.print_exc()
            self._shut_out(session, keeper_messages.Refused(f"{type(error).__name__}: {error}"[:_MAX_TEXT], False))
        finally:
            # Handlers read documents and keep none. Left open, those of bad messages would use up the keeper's
            # descriptors.
            for descriptor in descriptors:
                os.close(descriptor)

    def _drop(self, session: RankSession, *, is_alive: bool = False) -> None:
        """A rank has gone; what it has not finished to write is nothing."""
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        session.connection.close()
        for pin in session.pins.values():
            self._memory.unpin(pin)
        lease = session.lease
        if lease is not None:
            # A process that was shut out lives on and may still write to its open slots: these are not given away.
            self._memory.end_lease(session.rank, lease.open if is_alive else ())

    def _shut_out(self, session: RankSession, refused: keeper_messages.Refused) -> None:
        session.connection.send(refused)
        self._drop(session, is_alive=True)

    # The messages of ranks

    def _hello(self, session: RankSession, hello: keeper_messages.Hello, _: list[int]) -> None:
        if hello.version != keeper_messages.VERSION:
            raise ProtocolError(f"the rank speaks version {hello.version}, the keeper {keeper_messages.VERSION}")
        session.rank, session.world_size = hello.rank, hello.world_size
        session.connection.send(keeper_messages.Welcome(os.getpid(), keeper_messages.VERSION, self._memory.attempt))

    def _begin(self, session: RankSession, begin: keeper_messages.Begin, _: list[int]) -> None:
        self._memory.begin(begin.attempt)
        session.attempt, session.set_id, session.shards = begin.attempt, begin.set_id, begin.shards
        self._life.begin(session.rank, begin.attempt)
        # Ranks of an earlier attempt must take no more snapshots: the new one may resume from what is held now.
        for other in self._ranks():
            if 0 < other.attempt < begin.attempt:
                self._shut_out(other, keeper_messages.Refused(f"attempt {begin.attempt} has begun"))

    def _resume_from(self, session: RankSession, resume: keeper_messages.ResumeFrom, _: list[int]) -> None:
        self._memory.resume_from(SnapshotId(resume.step, resume.attempt, resume.set_id), session.attempt)
        session.connection.send(keeper_messages.Answer(resume.number))
        if session.lease is not None:
            session.lease.offered = None  # what was offered before is void

    def _lease(self, session: RankSession, asked: keeper_messages.Lease, documents: list[int]) -> None:
        plan, *job = (read_document(descriptor) for descriptor in documents)
        destination = None if asked.destination is None else Destination(**asked.destination)
        lease = Leased(
            asked.lease, ShardPlan.from_bytes(plan), JobPlan.from_bytes(job[0]) if job else None, destination
        )
        if (lease.plan.rank, lease.plan.world_size) != (session.rank, session.world_size):
            of = f"rank {lease.plan.rank} of {lease.plan.world_size}"
            raise ProtocolError(f"the plan is of {of}, not {session.rank} of {session.world_size}")
        # Examining and replicating trust the plan, so its pieces are checked here: in order, aligned, not overlapping.
        end = 0
        for piece in lease.plan.pieces:
            start = piece.start_bytes
            if start % ALIGN_BYTES or start < end or piece.length_bytes < 0:
                where = f"{piece.name} lies at {start}, behind {end}"
                raise ProtocolError(f"{where}: pieces begin at multiples of {ALIGN_BYTES}")
            end = start + piece.length_bytes
        if asked.slots <= 0:
            raise ProtocolError(f"{asked.slots} slots are none")
        for other in self._ranks():
            if other is not session and other.rank == session.rank and other.lease is not None:
                self._shut_out(other, keeper_messages.Refused(f"another process has taken over rank {session.rank}"))
        if session.lease is not None:
            self._memory.end_lease(session.rank)
        session.lease = lease
        self._points.reach("keeper.lease", rank=session.rank)

        # In a thread: tens of gigabytes of fresh pages take seconds, in which other ranks would wait.
        def allocate() -> None:
            try:
                cells, problem = self._memory.lease(lease.plan, asked.slots), ""
            except OSError as error:
                cells, problem = [], error.strerror or str(error)
            self._mailbox.post(lambda: self._allocated(session, lease, cells, problem))

        threading.Thread(target=allocate, name=f"allocate-{session.rank}", daemon=True).start()
        # Now, so that the first checkpoint does not wait for a process to start.
        if destination is not None:
            self._stages.persister.prepare()

    def _allocated(self, session: RankSession, lease: Leased, cells: list[Cell], problem: str) -> None:
        # The rank has gone, or asked anew, while its memory was being allocated.
        if session not in self._sessions or session.lease is not lease:
            if not any(other.rank == session.rank and other.lease for other in self._sessions):
                self._memory.end_lease(session.rank)
            return
        lease.is_ready = not problem
        numbers = [cell.number for cell in cells]
        answer = keeper_messages.Memory(lease.number, lease.plan.data_bytes, numbers, problem[:_MAX_TEXT])
        session.connection.send(answer, [cell.block.descriptor for cell in cells])

    def _replicate(self, session: RankSession, asked: keeper_messages.Replicate, _: list[int]) -> None:
        self._stages.replicas.use_secret(bytes.fromhex(asked.secret))
        session.peer = None if asked.peer is None else Endpoint(asked.peer[0], tuple(asked.peer[1]), *asked.peer[2:])
        self._stages.replicas.turn(session.rank, session.peer, asked.attempt)

    def _writing(self, session: RankSession, writing: keeper_messages.Writing, _: list[int]) -> None:
        lease = self._leased(session, writing.lease)
        self._memory.writing(session.rank, writing.slot)
        lease.offered = None

    def _copied(self, session: RankSession, copied: keeper_messages.Copied, documents: list[int]) -> None:
        lease = self._leased(session, copied.lease)
        if session.attempt == 0:
            raise ProtocolError("a snapshot came before Begin")
        state, metrics = json.loads(read_document(documents[0]))
        taken = Taken(copied.step, state, copied.stepped, copied.persist, copied.hurry, metrics, copied.unix_ns)
        snapshot = SnapshotId(copied.step, session.attempt, session.set_id)
        cell = self._memory.taken(lease.plan, copied.slot, snapshot)
        lease.open.discard(copied.slot)
        lease.offered = None
        self._points.reach("keeper.taken", step=copied.step, rank=session.rank)
        self._stages.begin(
            Snapshot(snapshot, lease.plan, session.shards, taken, lease.job, lease.destination, session.peer), cell
        )

    def _ask(self, session: RankSession, ask: keeper_messages.Ask, _: list[int]) -> None:
        def answer_held() -> None:
            held = [[copy.record.to_text(), copy.is_replica] for copy in self._memory.held()]
            self._answer(session, ask.number, json.dumps(held).encode())

        if ask.what == "held":
            # What is still being examined may be the newest snapshot of all.
            self._stages.when_examined(answer_held)
            return
        try:
            endpoint = self._stages.replicas.start_listening()
        except (OSError, UserError) as error:
            session.connection.send(keeper_messages.Answer(ask.number, str(error)[:_MAX_TEXT]))
            return
        self._answer(session, ask.number, json.dumps(list(vars(endpoint).values())).encode())

    def _answer(self, session: RankSession, number: int, content: bytes, *descriptors: int) -> None:
        document = write_document(content)
        try:
            session.connection.send(keeper_messages.Answer(number), [document, *descriptors])
        finally:
            os.close(document)

    def _read(self, session: RankSession, read: keeper_messages.Read, _: list[int]) -> None:
        try:
            pin = self._memory.acquire(SnapshotId(read.step, read.attempt, read.set_id), read.rank)
        except LookupError as error:
            session.connection.send(keeper_messages.Answer(read.number, str(error)))
            return
        session.pins[read.number] = pin
        content = json.dumps([pin.record.to_text(), pin.plan.to_bytes().decode()]).encode()
        self._answer(session, read.number, content, pin.descriptor)

    def _release(self, session: RankSession, release: keeper_messages.Release, _: list[int]) -> None:
        self._memory.unpin(session.pins.pop(release.number))

    def _finish(self, session: RankSession, _: keeper_messages.Finish, __: list[int]) -> None:
        self._life.finish(session.rank)

    def _stay(self, session: RankSession, _: keeper_messages.Stay, __: list[int]) -> None:
        self._life.stay()
        session.connection.send(keeper_messages.Answer(0))

    def _end(self, _: RankSession, __: keeper_messages.End, ___: list[int]) -> None:
        self._is_ending = True

    def _leased(self, session: RankSession, number: int) -> Leased:
        if session.lease is None or session.lease.number != number or not session.lease.is_ready:
            raise ProtocolError(f"lease {number} is not this rank's")
        return session.lease
