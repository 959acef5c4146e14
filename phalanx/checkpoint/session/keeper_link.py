"""What a session knows of keepers: its job, the connection to the keeper of its host, and the peer that gets replicas.

The connection is made again in the background when it is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper_contract import Destination, Endpoint, Keeper, KeeperLostError, RefusedError
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
        config: when, where, and which are kept.
        destination: durable storage.
        attempt: of the run; whatever has a lower one is a leftover.
        secret: what its keepers know each other by; None: they do not talk to each other.
        hosts: the host of each rank.
        racks: what each rank's host fails together with; empty strings: unknown.
        peers: all ranks.
        copies: the data-parallel group of this rank, for restoring; None: it reads for itself.
        layout: of the ranks; a text such as ``pp2·dp2·tp2`` where it is none of ours: which hosts are evicted together
            is then not known.
        run_config: the resolved config of the run.
        report: is given lines for people.
        points: where faults are injected.
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

    @property
    def host(self) -> str:
        """That of this rank."""
        return self.hosts[self.peers.rank]

    @property
    def replicated(self) -> bool:
        """Whether snapshots are copied to other hosts."""
        return self.secret is not None


T = TypeVar("T")
_PAUSE_S = 2.0  # between two attempts to connect


class KeeperLink:
    """A keeper that may come and go. Methods may be called from any thread.

    Args:
        connect: starts the keeper where there is none, and connects; may take a second.
        report: is given a line for people when the keeper is lost, and when there is one again.
    """

    def __init__(self, connect: Callable[[], Keeper], report: Callable[[str], None]) -> None:
        self._connect, self._report = connect, report
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._arrange: Callable[[Keeper], None] = lambda keeper: None
        self._again: threading.Thread | None = None
        self._keeper: Keeper | None = connect()
        self.losses = 0
        self.is_renewed = False
        """There is another keeper than before; whoever tells the other hosts puts it back to False."""

    @property
    def keeper(self) -> Keeper | None:
        """The present one, or None."""
        return self._keeper

    def ask(self, question: Callable[[Keeper], T], otherwise: T) -> T:
        """The keeper's answer, or `otherwise` where it is gone; it is then looked for in the background.

        Raises:
            UserError: a later attempt of the run has begun.
        """
        with self._lock:
            if self._keeper is None:
                return otherwise
            try:
                return question(self._keeper)
            except KeeperLostError as error:
                self._lose(error)
                return otherwise
            except RefusedError as error:
                raise superseded(error) from error

    def arrange(self, arrangement: Callable[[Keeper], None]) -> None:
        """Do this with the keeper, and with every one that takes its place.

        Raises:
            UserError: as `ask`.
        """
        with self._lock:
            self._arrange = arrangement
            self.ask(arrangement, None)

    def close(self, *, clean: bool) -> None:
        """Hang up.

        Args:
            clean: the job has ended well; the keeper is not needed any more.
        """
        self._closing.set()
        if self._again is not None:
            self._again.join()
        with self._lock:
            if clean:
                self.ask(lambda keeper: keeper.finish(), None)
            if self._keeper is not None:
                _hang_up(self._keeper)
            self._keeper = None

    def _lose(self, error: KeeperLostError) -> None:
        assert self._keeper is not None
        _hang_up(self._keeper)
        self._keeper = None
        self.losses += 1
        self._report(f"the keeper of this host is lost ({error}): snapshots in its memory are gone, training goes on")
        if not self._closing.is_set():
            self._again = threading.Thread(target=self._reconnect, name="keeper", daemon=True)
            self._again.start()

    def _reconnect(self) -> None:
        told = ""
        while not self._closing.is_set():
            try:
                keeper = self._connect()
                with self._lock:
                    self._arrange(keeper)
                    self._keeper, self.is_renewed = keeper, True
                self._report("there is a keeper on this host again; snapshots are taken as before")
                return
            except RefusedError as error:
                self._report(str(superseded(error)))
                return
            except (KeeperLostError, OSError, UserError) as error:
                if str(error) != told:
                    self._report(f"no keeper can be started on this host ({error}); it is tried again")
                told = str(error)
            self._closing.wait(_PAUSE_S)


def _hang_up(keeper: Keeper) -> None:
    with suppress(BufferError):  # a copy under way, or a view for the next one, still has the memory
        keeper.close()


class Neighbours:
    """The keepers of the other hosts, as far as this rank needs them.

    Args:
        job: says whether there are replicas at all.
        link: to the keeper of this host.
    """

    def __init__(self, job: SessionContext, link: KeeperLink) -> None:
        self._job, self._link = job, link
        self._peer: Endpoint | None = None
        self._peer_host = _place(job) if job.replicated else ""

    @property
    def replicates(self) -> bool:
        """Whether snapshots of this rank go to another host."""
        return self._peer is not None

    @property
    def changed(self) -> bool:
        """Whether the others do not know yet where the keeper of this host is."""
        return self._job.replicated and self._link.is_renewed

    def exchange(self) -> None:
        """Tell all ranks where the keeper of this host is, and hear of theirs; all together."""
        if not self._job.replicated:
            return
        mine = self._mine()
        if mine is not None:
            self._link.is_renewed = False
        told = self._job.peers.gather(mine)
        endpoints = {host: _endpoint(one) for host, one in zip(self._job.hosts, told, strict=True) if one is not None}
        self._peer = endpoints.get(self._peer_host)
        self._link.ask(self.tell, None)

    def copies(self) -> PeerCopies | None:
        """What keepers of other hosts hold, for restoring."""
        if self._job.secret is None:
            return None
        self._link.ask(self.tell, None)  # the secret, without which they do not speak to each other
        return PeerCopies(self._job.secret)

    def _mine(self) -> dict[str, Any] | None:
        try:
            return self._link.ask(lambda keeper: asdict(keeper.endpoint), None)
        except OSError as error:
            self._job.report(f"replicas: the keeper of host {self._job.host} cannot listen for others ({error})")
            return None

    def tell(self, keeper: Keeper) -> None:
        """Tell a keeper where its replicas go."""
        if self._job.secret is not None:
            keeper.replicate_to(self._peer, self._job.attempt, self._job.secret)


def _place(job: SessionContext) -> str:
    """The host that gets the replicas of this one's snapshots."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(job.hosts):
        ranks.setdefault(host, []).append(rank)
    groups = groups_of_hosts(job.layout, ranks) if isinstance(job.layout, Layout) else {}
    racks = dict(zip(job.hosts, job.racks, strict=True))
    infos = [HostInfo(host, racks[host] or None, groups.get(host, frozenset())) for host in ranks]
    places = place_replicas(infos)
    if job.peers.rank == 0:
        for line in places.warnings:
            job.report(f"replicas: {line}")
    return places.peer_of[job.host]


def _endpoint(tree: dict[str, Any]) -> Endpoint:
    return Endpoint(**tree | {"addresses": tuple(tree["addresses"])})
