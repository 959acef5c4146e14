"""What a keeper runs for replicas: threads that send its snapshots to a peer, and threads that answer others.

Other keepers send their replicas and fetch what this one holds.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

from phalanx.checkpoint.format.shard_plan import Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, NotBegunError, RefusedError, Replicated
from phalanx.checkpoint.replicas.replica_link import (
    IDLE_S,
    LABEL,
    Given,
    Go,
    Holdings,
    List,
    Missing,
    Offer,
    Plan,
    PlanNeeded,
    Refused,
    ReplicaLink,
    Stored,
    Want,
)
from phalanx.checkpoint.replicas.replica_routes import LOOPBACK, Network
from phalanx.checkpoint.replicas.sender import (
    PERSIST_S,
    Parcel,
    Sender,
    Way,
    deadline_s,
    describe,
    disagreement,
    receive_chunks,
    spans,
)
from phalanx.checkpoint.snapshot_slots import SnapshotMemory
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.ipc.handshake import BACKLOG, Gate, Handshake

_MOST_CALLERS = 1024


class _NotTakenError(Exception):
    """A replica that is not kept, and why."""


class Listener:
    """A gate, and behind it a thread for each caller that has proved itself: it brings replicas or fetches copies.

    Args:
        memory: where replicas go and copies come from.
        server: a listening TCP socket, which this takes over.
        secret: what callers have to have; None while there is none, and then all are refused.
        report: called, from any thread, with a line for people about callers that were refused.
        points: ``replica.received`` and ``replica.committed``.
        idle_s: how long a caller may stand still in the middle of something.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        server: socket.socket,
        host: str,
        secret: Callable[[], bytes | None],
        report: Callable[[str], None],
        points: Points = NO_POINTS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._memory, self._host, self._report = memory, host, report
        self._points, self._idle_s = points, idle_s
        self._lock = threading.Lock()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._closing = False
        self._plans: dict[str, ShardPlan] = {}
        self._arriving: list[tuple[int, ReplicaLink]] = []  # which links bring a replica of which rank
        self._arrived = threading.Condition()
        self._gate = Gate(server, secret, LABEL, self._admit, report, name="replica-gate")

    def close(self) -> None:
        """Hang up on everybody, and wait for the threads to be gone."""
        self._gate.close()
        with self._lock:
            self._closing = True
            for connection in self._callers.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            callers = list(self._callers)
        for thread in callers:
            thread.join()

    def _admit(self, connection: socket.socket, caller: str, handshake: Handshake) -> None:
        work = (connection, caller, handshake)
        thread = threading.Thread(target=self._serve, args=work, name="replica-caller", daemon=True)
        with self._lock:
            is_full = len(self._callers) >= _MOST_CALLERS
            if not is_full:
                self._callers[thread] = connection
        if is_full:
            connection.close()
            self._report(f"{caller} was turned away: {_MOST_CALLERS} others have connections here")
        else:
            thread.start()

    def _serve(self, connection: socket.socket, caller: str, handshake: Handshake) -> None:
        try:
            link = ReplicaLink(connection, caller, self._idle_s)
            link.let_in(handshake, self._host)
            while link.waits_for_message():
                message = link.receive(Offer, List, Want)
                if isinstance(message, Offer):
                    self._take(link, message)
                elif isinstance(message, Want):
                    self._give(link, message)
                else:
                    link.send(Holdings([(held.record.to_text(), held.is_replica) for held in self._memory.held()]))
        except OSError as error:
            if not self._closing:
                self._report(str(error))
        finally:
            with self._lock:
                self._callers.pop(threading.current_thread())
            connection.close()

    def _give(self, link: ReplicaLink, want: Want) -> None:
        try:
            with self._memory.pin(SnapshotId(want.step, want.attempt, want.set_id), want.rank) as copy:
                record, plan, descriptor = copy
                try:
                    runs = list(spans(record, want.runs))
                except (ValueError, TypeError) as error:
                    link.send(Refused(f"the request makes no sense: {error}"))
                    return
                link.send(Given(record.to_text(), plan.to_bytes().decode() if want.plan else ""))
                for start, stop in runs:
                    link.send_file(descriptor, start, stop - start, deadline_s(stop - start))
        except LookupError:
            link.send(Missing(f"step {want.step} of rank {want.rank} is not there any more"))

    def _take(self, link: ReplicaLink, offer: Offer) -> None:
        try:
            record = Record.from_text(offer.record)
            if record.plan_sha256 in self._plans:
                plan = self._plans[record.plan_sha256]
            else:
                link.send(PlanNeeded())
                plan = ShardPlan.from_bytes(link.receive(Plan).text.encode())
            problem = disagreement(record, plan)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"what was offered is no replica: {error}"
        if problem is None and plan.data_bytes > psutil.virtual_memory().total:
            problem = f"{plan.data_bytes} bytes are more than the memory of this host"
        if problem is not None:
            link.send(Refused(problem))
            return
        self._plans[plan.sha256] = plan
        try:
            with self._arrived:
                self._arriving.append((record.rank, link))
            try:
                self._receive(link, record, plan)
            finally:
                with self._arrived:
                    self._arriving.remove((record.rank, link))
                    self._arrived.notify_all()
        except RefusedError as error:
            link.send(Refused(str(error), later_attempt=True))
        except (NotBegunError, _NotTakenError) as error:
            link.send(Refused(str(error)))
        else:
            link.send(Stored())

    def _receive(self, link: ReplicaLink, record: Record, plan: ShardPlan) -> None:
        try:
            slot = self._memory.place(plan, record.snapshot)
        except OSError:
            # The memory may be that of a connection that broke without our knowing; the sender has begun again. Hang up
            # on all others that bring a replica of this rank, and wait until what they brought is abandoned.
            with self._arrived:
                others = [entry for entry in self._arriving if entry[0] == record.rank and entry[1] is not link]
                for _, other in others:
                    other.hang_up()
                self._arrived.wait_for(lambda: not any(entry in self._arriving for entry in others), IDLE_S)
            try:
                slot = self._memory.place(plan, record.snapshot)
            except OSError as error:
                raise _NotTakenError(f"no memory for {plan.data_bytes} bytes: {error}") from None
        try:
            link.send(Go())
            wrong = receive_chunks(link, slot.memory[: record.data_bytes], record, 0)
            self._points.reach("replica.received", step=record.step, rank=record.rank)
            if wrong:
                raise _NotTakenError(describe(record, wrong, link.host))
        except BaseException:
            self._memory.abandon(plan, slot)
            raise
        self._memory.commit(plan, slot, record)
        self._points.reach("replica.committed", step=record.step, rank=record.rank)


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at `address`; 0: at any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


class ReplicaService:
    """Sends and receives replicas for one keeper. Its methods do not wait, but for `close`.

    Args:
        notify: called, from threads of this, with what became of every snapshot that was to be sent.
        network: where to listen; see `phalanx.checkpoint.replicas.replica_routes.network`. By default loopback.
        points: ``replica.begin``, ``half`` and ``sent`` where one is sent, ``received`` and ``committed`` where it
            arrives.
        report: called, from threads of this, with a line for people about a caller that was refused.
        persist_s, idle_s: see `PERSIST_S` of `sender` and `IDLE_S` of `replica_link`.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        notify: Callable[[Replicated], None],
        *,
        network: Network = LOOPBACK,
        host: str = "",
        points: Points = NO_POINTS,
        report: Callable[[str], None] = lambda line: None,
        persist_s: float = PERSIST_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._memory = memory
        self._notify = notify
        self._network = network
        self._host = host or socket.gethostname()
        self._points = points
        self._report = report
        self._patience = persist_s, idle_s
        self._secret: bytes | None = None
        self._listener: Listener | None = None
        self._endpoint: Endpoint | None = None
        self._senders: dict[int, Sender] = {}
        self._lock = threading.Lock()

    def use_secret(self, secret: bytes) -> None:
        """Talk to those that have this secret, and no other, from now on; before, nobody is talked to."""
        self._secret = secret

    def start_listening(self) -> Endpoint:
        """Where other keepers reach this one; it begins to listen at the first call.

        Raises:
            OSError: it cannot listen there.
        """
        with self._lock:
            if self._endpoint is None:
                server = listen(self._network.addresses[0])
                self._endpoint = self._network.endpoint(self._host, server.getsockname()[1])
                self._listener = Listener(
                    self._memory,
                    server,
                    self._host,
                    lambda: self._secret,
                    self._report,
                    self._points,
                    self._patience[1],
                )
            return self._endpoint

    def send(self, plan: ShardPlan, snapshot: SnapshotId, peer: Endpoint) -> None:
        """Send a committed snapshot to the keeper at `peer`, in the background; it is pinned until that has ended."""
        rank, step = plan.rank, snapshot.step
        if self._secret is None:
            self._notify(Replicated(rank, step, peer.host, f"step {step} is not replicated: there is no secret yet"))
            return
        pinned = self._memory.pin(snapshot, rank)
        try:
            record, held_plan, descriptor = pinned.__enter__()
        except LookupError:
            self._notify(Replicated(rank, step, peer.host, f"step {step} of rank {rank} is not there to be replicated"))
            return
        with self._lock:
            sender = self._sender(rank)
        sender.submit(Parcel(pinned, record, held_plan, descriptor, peer, self._secret))

    def turn(self, rank: int, peer: Endpoint | None, attempt: int) -> None:
        """Snapshots of `rank` go to `peer` from now on, with the present secret; those under way too.

        What an earlier attempt wanted to send is given up at once: nobody takes it any more, and what comes after it
        would have to wait.
        """
        if self._secret is None:
            return
        with self._lock:
            if rank not in self._senders and peer is None:
                return
            sender = self._sender(rank)
        sender.turn(Way(peer, attempt, self._secret))

    def _sender(self, rank: int) -> Sender:
        if rank not in self._senders:
            self._senders[rank] = Sender(self._notify, self._points, *self._patience)
        return self._senders[rank]

    def close(self) -> None:
        """Hang up on everybody, report what was under way as failed, and wait for all threads to be gone."""
        with self._lock:
            senders, self._senders = list(self._senders.values()), {}
            listener, self._listener = self._listener, None
        for sender in senders:
            sender.close()
        if listener is not None:
            listener.close()
