"""What the keeper has others do for it: sending and receiving replicas. Torch-free."""

from __future__ import annotations

from typing import Protocol

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import SnapshotId
from phalanx.checkpoint.replicas.contract import Endpoint


class Replicas(Protocol):
    """As `phalanx.checkpoint.replicas.service.ReplicaService` does it; `Replicated` is told of what became of each."""

    def use_token(self, token: str) -> None:
        """Talk to those that have this token, and no other."""
        ...

    def start_listening(self) -> Endpoint:
        """Where other keepers reach this one; OSError: it cannot listen."""
        ...

    def send(self, plan: ShardPlan, snapshot: SnapshotId, peer: Endpoint) -> None:
        """Send a committed snapshot, in the background; what became of it is told."""
        ...

    def close(self) -> None:
        """Hang up on everybody."""
        ...
