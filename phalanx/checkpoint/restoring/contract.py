"""What restoring asks of copies on other hosts, and what any place to restore from offers. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import Record, SnapshotId
from phalanx.checkpoint.replicas.contract import Endpoint


class RemoteCopy(Protocol):
    """A committed copy that another host holds."""

    @property
    def record(self) -> Record:
        """Its record."""
        ...

    @property
    def plan(self) -> ShardPlan:
        """Its plan."""
        ...

    def chunks(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The chunks (of `CHUNK_BYTES`) of these numbers, in order, as they come; each holds until the next is taken.

        Raises:
            OSError: the connection is lost.
        """
        ...


class RemoteCopies(Protocol):
    """Reads what the keepers of other hosts hold."""

    def open(self, host: Endpoint, snapshot: SnapshotId, rank: int) -> AbstractContextManager[RemoteCopy]:
        """A copy on `host`; may be called from several threads.

        Raises:
            LookupError: it is not there any more. OSError: the host cannot be reached.
        """
        ...
