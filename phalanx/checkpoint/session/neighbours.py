"""Which other host's keeper gets the replicas of this one's snapshots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.checkpoint.keeper.contract import Keeper
from phalanx.checkpoint.replicas.contract import Endpoint
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.replicas.placement import HostInfo, groups_of_hosts, place_replicas
from phalanx.checkpoint.session.job import Job
from phalanx.checkpoint.session.link import Link
from phalanx.core.layout import Layout


class Neighbours:
    """The keepers of the other hosts, as far as this rank needs them.

    Args:
        job: says whether there are replicas at all.
        link: to the keeper of this host.
    """

    def __init__(self, job: Job, link: Link) -> None:
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


def _place(job: Job) -> str:
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
