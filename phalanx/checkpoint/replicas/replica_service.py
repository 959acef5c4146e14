"""What a keeper runs for replicas: threads that send its snapshots to a peer, and threads that answer others.

Other keepers send their replicas and fetch what this one holds.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from phalanx.checkpoint.format.shard_plan import Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, NotBegunError, RefusedError, Replicated, Slot, Vault
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
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.ipc.handshake import BACKLOG, Gate, Handshake

_MOST_CALLERS = 1024


class Listener:
    """A gate, behind it a thread for each caller that has proved itself, and behind those a vault.

    Args:
        vault: where replicas go and copies come from.
        server: a listening TCP socket, which this takes over.
        host: name of this host.
        secret: what callers have to have; None while there is none, and then all are refused.
        report: called, from any thread, with a line for people about callers that were refused.
        points: ``replica.received`` and ``replica.committed``.
        idle_s: how long a caller may stand still in the middle of something.
    """

    def __init__(
        self,
        vault: Vault,
        server: socket.socket,
        host: str,
        secret: Callable[[], bytes | None],
        report: Callable[[str], None],
        points: Points = NO_POINTS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._host = host
        self._report = report
        self._idle_s = idle_s
        self._desk = _Desk(vault, points)
        self._lock = threading.Lock()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._closing = False
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
            self._converse(ReplicaLink(connection, caller, self._idle_s), handshake)
        except OSError as error:
            if not self._closing:
                self._report(str(error))
        finally:
            with self._lock:
                self._callers.pop(threading.current_thread())
            connection.close()

    def _converse(self, link: ReplicaLink, handshake: Handshake) -> None:
        link.let_in(handshake, self._host)
        while link.waits_for_message():
            message = link.receive(Offer, List, Want)
            if isinstance(message, Offer):
                self._desk.take(link, message)
            elif isinstance(message, Want):
                self._desk.give(link, message)
            else:
                self._desk.tell(link)


class _Desk:
    """What is done for a caller that has been let in."""

    def __init__(self, vault: Vault, points: Points) -> None:
        self._vault = vault
        self._points = points
        self._plans: dict[str, ShardPlan] = {}
        self._arriving = _Arriving()

    def tell(self, link: ReplicaLink) -> None:
        link.send(Holdings([(held.record.to_text(), held.is_replica) for held in self._vault.held()]))

    def give(self, link: ReplicaLink, want: Want) -> None:
        try:
            with self._vault.pin(SnapshotId(want.step, want.attempt, want.set_id), want.rank) as copy:
                self._give(link, want, *copy)
        except LookupError:
            link.send(Missing(f"step {want.step} of rank {want.rank} is not there any more"))

    def _give(self, link: ReplicaLink, want: Want, record: Record, plan: ShardPlan, descriptor: int) -> None:
        try:
            runs = list(spans(record, want.runs))
        except (ValueError, TypeError) as error:
            link.send(Refused(f"the request makes no sense: {error}"))
            return
        link.send(Given(record.to_text(), plan.to_bytes().decode() if want.plan else ""))
        for start, stop in runs:
            link.send_file(descriptor, start, stop - start, deadline_s(stop - start))

    def take(self, link: ReplicaLink, offer: Offer) -> None:
        try:
            record = Record.from_text(offer.record)
            plan = self._plan(link, record)
            problem = disagreement(record, plan)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"what was offered is no replica: {error}"
        if problem is None and plan.data_bytes > psutil.virtual_memory().total:
            problem = f"{plan.data_bytes} bytes are more than the memory of this host"
        if problem is not None:
            link.send(Refused(problem))
            return
        self._plans[plan.sha256] = plan
        self._receive(link, record, plan)

    def _plan(self, link: ReplicaLink, record: Record) -> ShardPlan:
        known = self._plans.get(record.plan_sha256)
        if known is not None:
            return known
        link.send(PlanNeeded())
        return ShardPlan.from_bytes(link.receive(Plan).text.encode())

    def _receive(self, link: ReplicaLink, record: Record, plan: ShardPlan) -> None:
        try:
            with self._arriving.from_(link, record.rank):
                self._place(link, record, plan)
        except RefusedError as error:
            link.send(Refused(str(error), later_attempt=True))
            return
        except (NotBegunError, _NotTakenError) as error:
            link.send(Refused(str(error)))
            return
        link.send(Stored())

    def _place(self, link: ReplicaLink, record: Record, plan: ShardPlan) -> None:
        slot = self._slot(link, record, plan)
        try:
            link.send(Go())
            wrong = receive_chunks(link, slot.memory[: record.data_bytes], record, 0)
            self._points.reach("replica.received", step=record.step, rank=record.rank)
            if wrong:
                raise _NotTakenError(describe(record, wrong, link.host))
        except BaseException:
            self._vault.abandon(plan, slot)
            raise
        self._vault.commit(plan, slot, record)
        self._points.reach("replica.committed", step=record.step, rank=record.rank)

    def _slot(self, link: ReplicaLink, record: Record, plan: ShardPlan) -> Slot:
        try:
            return self._vault.place(plan, record.snapshot)
        except OSError:
            # Perhaps what a connection that broke without our knowing was bringing; the sender has begun again.
            self._arriving.end_others(link, record.rank)
        try:
            return self._vault.place(plan, record.snapshot)
        except OSError as error:
            raise _NotTakenError(f"no memory for {plan.data_bytes} bytes: {error}") from None


class _NotTakenError(Exception):
    """A replica that is not kept, and why."""


class _Arriving:
    """Which links bring a replica of which rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._links: list[tuple[int, ReplicaLink]] = []

    @contextmanager
    def from_(self, link: ReplicaLink, rank: int) -> Iterator[None]:
        """Within the context, `link` brings one."""
        with self._changed:
            self._links.append((rank, link))
        try:
            yield
        finally:
            with self._changed:
                self._links.remove((rank, link))
                self._changed.notify_all()

    def end_others(self, link: ReplicaLink, rank: int) -> None:
        """Hang up on all others that bring one of `rank`, and wait until what they brought is abandoned."""
        with self._changed:
            others = [entry for entry in self._links if entry[0] == rank and entry[1] is not link]
            for _, other in others:
                other.hang_up()
            self._changed.wait_for(lambda: not any(entry in self._links for entry in others), IDLE_S)


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at `address`; 0: at any free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)


class ReplicaService:
    """Sends and receives replicas for one keeper. Its methods do not wait, but for `close`.

    Args:
        vault: the memory.
        notify: called, from threads of this, with what became of every snapshot that was to be sent.
        network: where to listen; see `phalanx.checkpoint.replicas.replica_routes.network`. By default loopback.
        host: name of this host.
        points: ``replica.begin``, ``half`` and ``sent`` where one is sent, ``received`` and ``committed`` where it
            arrives.
        report: called, from threads of this, with a line for people about a caller that was refused.
        persist_s, idle_s: see `phalanx.checkpoint.replicas.sender.PERSIST_S` and `link.IDLE_S`.
    """

    def __init__(
        self,
        vault: Vault,
        notify: Callable[[Replicated], None],
        *,
        network: Network = LOOPBACK,
        host: str = "",
        points: Points = NO_POINTS,
        report: Callable[[str], None] = lambda line: None,
        persist_s: float = PERSIST_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._vault = vault
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
                    self._vault,
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
        pinned = self._vault.pin(snapshot, rank)
        try:
            record, held_plan, descriptor = pinned.__enter__()
        except LookupError:
            self._notify(Replicated(rank, step, peer.host, f"step {step} of rank {rank} is not there to be replicated"))
            return
        with self._lock:
            sender = self._senders.get(rank) or Sender(self._notify, self._points, *self._patience)
            self._senders[rank] = sender
        sender.submit(Parcel(pinned, record, held_plan, descriptor, peer, self._secret))

    def turn(self, rank: int, peer: Endpoint | None, attempt: int) -> None:
        """Snapshots of `rank` go to `peer` from now on, with the present secret; those under way too.

        What an earlier attempt wanted to send is given up at once: nobody takes it any more, and what comes after it
        would have to wait.
        """
        if self._secret is None:
            return
        with self._lock:
            sender = self._senders.get(rank)
            if sender is None and peer is None:
                return
            sender = sender or Sender(self._notify, self._points, *self._patience)
            self._senders[rank] = sender
        sender.turn(Way(peer, attempt, self._secret))

    def close(self) -> None:
        """Hang up on everybody, tell what was under way to have failed, and wait for all threads to be gone."""
        with self._lock:
            senders, self._senders = list(self._senders.values()), {}
            listener, self._listener = self._listener, None
        for sender in senders:
            sender.close()
        if listener is not None:
            listener.close()
