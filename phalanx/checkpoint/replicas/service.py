"""What a keeper runs for replicas: threads that send its snapshots to a peer, and threads that answer others.

Torch-free.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import SnapshotId
from phalanx.checkpoint.replicas.contract import Endpoint, Replicated, Vault
from phalanx.checkpoint.replicas.interfaces import LOOPBACK, Network
from phalanx.checkpoint.replicas.link import IDLE_S
from phalanx.checkpoint.replicas.listener import Listener, listen
from phalanx.checkpoint.replicas.sender import PERSIST_S, Parcel, Sender, Way
from phalanx.core.points import NO_POINTS, Points


class ReplicaService:
    """Sends and receives replicas for one keeper. Its methods do not wait, but for `close`.

    Args:
        vault: the memory.
        notify: called, from threads of this, with what became of every snapshot that was to be sent.
        network: where to listen; see `phalanx.checkpoint.replicas.interfaces.network`. By default loopback.
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
