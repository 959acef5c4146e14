"""What is fixed while a session is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.persist.contract import Destination
from phalanx.core.layout import Layout
from phalanx.core.peers import Copies, Peers
from phalanx.core.points import Points


@dataclass(frozen=True)
class Job:
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
