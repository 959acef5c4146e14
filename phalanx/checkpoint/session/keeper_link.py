"""The connection of a session to the keeper of its host, and the peer keeper that gets replicas.

The connection is made again in the background when it is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import Destination, Endpoint, KeeperLostError, RefusedError
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.replicas.replica_routes import HostInfo, groups_of_hosts, place_replicas
from phalanx.checkpoint.storage.latest import superseded
from phalanx.core.errors import UserError
from phalanx.core.fault_points import Points
from phalanx.core.layout import Layout
from phalanx.core.peers import Copies, Peers


@dataclass(frozen=True)
class SessionContext:
    """A run as its checkpoints see it.

    Attributes:
        attempt: of the run; whatever has a lower one is a leftover.
        secret: by which the keepers of the job know each other; None: they do not talk to each other.
        racks: what each rank's host fails together with; empty strings: unknown.
        copies: the data-parallel group of this rank, for restoring; None: it reads for itself.
        layout: of the ranks; where it is a text (``pp2·dp2·tp2``), nothing says which hosts are evicted together.
        run_config: the resolved config of the run.
    """

    config: CheckpointConfig
    destination: Destination
    attempt: int
    secret: bytes | None = field(repr=False)
    hosts: tuple[str, ...]
    racks: tuple[str, ...]
    peers: Peers
    copies: Copies | None
    layout: Layout | str
    run_config: Mapping[str, Any]
    report: Callable[[str], None]
    points: Points


T = TypeVar("T")
_PAUSE_S = 2.0  # between two attempts to connect


class KeeperLink:
    """A keeper that may come and go. Methods may be called from any thread.

    Args:
        connect: starts the keeper where there is none, and connects; may take a second.
        report: is given a line for people when the keeper is lost, and when there is one again.
    """

    def __init__(self, connect: Callable[[], KeeperClient], report: Callable[[str], None]) -> None:
        self._connect, self._report = connect, report
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._set_up: Callable[[KeeperClient], None] = lambda keeper: None
        self._reconnecting: threading.Thread | None = None
        self.keeper: KeeperClient | None = connect()
        """The present one, or None."""
        self.losses = 0
        self.is_renewed = False
        """There is another keeper than before; whoever announces it to the other hosts puts this back to False."""

    def ask(self, question: Callable[[KeeperClient], T], otherwise: T) -> T:
        """The keeper's answer, or `otherwise` where it is gone; it is then looked for in the background.

        Raises:
            UserError: a later attempt of the run has begun.
        """
        with self._lock:
            if self.keeper is None:
                return otherwise
            try:
                return question(self.keeper)
            except KeeperLostError as error:
                self._on_lost(self.keeper, error)
                return otherwise
            except RefusedError as error:
                raise superseded(error) from error

    def set_up(self, action: Callable[[KeeperClient], None]) -> None:
        """Do this with the keeper, and with every one that takes its place.

        Raises:
            UserError: as `ask`.
        """
        with self._lock:
            self._set_up = action
            self.ask(action, None)

    def close(self, *, clean: bool) -> None:
        """Hang up; `clean`: the job has ended well, and the keeper is not needed any more."""
        self._closing.set()
        if self._reconnecting is not None:
            self._reconnecting.join()
        with self._lock:
            if clean:
                self.ask(lambda keeper: keeper.finish(), None)
            if self.keeper is not None:
                _hang_up(self.keeper)
            self.keeper = None

    def _on_lost(self, keeper: KeeperClient, error: KeeperLostError) -> None:
        _hang_up(keeper)
        self.keeper = None
        self.losses += 1
        self._report(f"the keeper of this host is lost ({error}): snapshots in its memory are gone, training goes on")
        if not self._closing.is_set():
            self._reconnecting = threading.Thread(target=self._reconnect, name="keeper", daemon=True)
            self._reconnecting.start()

    def _reconnect(self) -> None:
        reported = ""
        while not self._closing.is_set():
            try:
                keeper = self._connect()
                with self._lock:
                    self._set_up(keeper)
                    self.keeper, self.is_renewed = keeper, True
                self._report("there is a keeper on this host again; snapshots are taken as before")
                return
            except RefusedError as error:
                self._report(str(superseded(error)))
                return
            except (KeeperLostError, OSError, UserError) as error:
                if str(error) != reported:
                    self._report(f"no keeper can be started on this host ({error}); it is tried again")
                reported = str(error)
            self._closing.wait(_PAUSE_S)


def _hang_up(keeper: KeeperClient) -> None:
    with suppress(BufferError):  # a copy under way, or a view for the next one, still has the memory
        keeper.close()


class ReplicaPeer:
    """The keeper on another host that gets this rank's replicas; none where the job has no secret."""

    def __init__(self, job: SessionContext, link: KeeperLink) -> None:
        self._job, self._link = job, link
        self._host = _choose_host(job) if job.secret is not None else ""
        self.endpoint: Endpoint | None = None
        """Where it is; None: snapshots of this rank go to no other host."""

    @property
    def is_outdated(self) -> bool:
        """Whether the other hosts do not know yet where the keeper of this one is."""
        return self._job.secret is not None and self._link.is_renewed

    def exchange(self) -> None:
        """Announce to all ranks where the keeper of this host is, and learn of theirs; all together."""
        if self._job.secret is None:
            return
        mine: dict[str, Any] | None = None
        try:
            mine = self._link.ask(lambda keeper: asdict(keeper.endpoint), None)
        except OSError as error:
            host = self._job.hosts[self._job.peers.rank]
            self._job.report(f"replicas: the keeper of host {host} cannot listen for others ({error})")
        if mine is not None:
            self._link.is_renewed = False
        gathered = zip(self._job.hosts, self._job.peers.gather(mine), strict=True)
        found = {host: endpoint for host, endpoint in gathered if endpoint is not None}.get(self._host)
        self.endpoint = None if found is None else Endpoint(**found | {"addresses": tuple(found["addresses"])})
        self._link.ask(self.set_up, None)

    def copies(self) -> PeerCopies | None:
        """What keepers of other hosts hold, for restoring."""
        if self._job.secret is None:
            return None
        self._link.ask(self.set_up, None)  # the secret, without which they do not speak to each other
        return PeerCopies(self._job.secret)

    def set_up(self, keeper: KeeperClient) -> None:
        """Have a keeper send its replicas there."""
        if self._job.secret is not None:
            keeper.replicate_to(self.endpoint, self._job.attempt, self._job.secret)


def _choose_host(job: SessionContext) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(job.hosts):
        ranks.setdefault(host, []).append(rank)
    groups = groups_of_hosts(job.layout, ranks) if isinstance(job.layout, Layout) else {}
    racks = dict(zip(job.hosts, job.racks, strict=True))
    places = place_replicas([HostInfo(host, racks[host] or None, groups.get(host, frozenset())) for host in ranks])
    if job.peers.rank == 0:
        for line in places.warnings:
            job.report(f"replicas: {line}")
    return places.peer_of[job.hosts[job.peers.rank]]
