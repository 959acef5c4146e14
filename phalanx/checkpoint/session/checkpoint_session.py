"""What the sessions of both modes, background and blocking, do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.checkpoint.all_ranks import at_first
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.restoring.restore import RefusedStates, Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.keeper_link import SessionContext
from phalanx.checkpoint.snapshot_schedule import Decision, SnapshotSchedule
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.location import clean
from phalanx.core.layout import Shard

Tensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]


class CheckpointSession(ABC):
    """The parts of a session that do not depend on the mode."""

    def __init__(self, job: SessionContext, schedule: SnapshotSchedule) -> None:
        self.job = job
        self._schedule = schedule
        self._refused = RefusedStates()
        self._tensors: Tensors = {}
        self._agreement: Callable[[], int] | None = None  # waits for the others' votes
        self._step: int | None = None  # under way

    @property
    def attempt(self) -> int:
        """The number of this attempt of the run."""
        return self.job.attempt

    def costs(self) -> dict[str, Any]:
        """What was measured for ``auto``, as JSON values: to be kept with the state of training, on rank 0."""
        return self._schedule.auto.to_json()

    def recall(self, costs: dict[str, Any] | None, *, failed: bool) -> None:
        """Take up `costs` of the attempt before; `failed`: whether that attempt ended by a failure."""
        self._schedule.recall(costs, len(set(self.job.hosts)), failed=failed)

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds; 0: none was seen yet."""
        return self._schedule.auto.expected_durable_s

    def will_persist(self, step: int) -> bool:
        """At the end of a step, before `after_step`: whether that will make a durable checkpoint if it is not the last
        step; all ranks together, the same answer."""
        return self._decision(step).persist

    def will_take(self, step: int) -> bool:
        """As `will_persist`, of a snapshot that stays in memory too; before a loop that calls neither `ask` nor `fence`
        has come to `after_step`."""
        if self._step != step:
            self.ask(step)
        self.fence()
        return self._decision(step).take

    @abstractmethod
    def ask(self, step: int) -> None:
        """The step that will be number `step`, the first being 1, begins."""

    @abstractmethod
    def fence(self) -> None:
        """Parameters and optimizer state may be changed after this; called by all ranks alike."""

    def _decision(self, step: int) -> Decision:
        if self._agreement is None:
            return Decision(take=False, persist=False, put_off=False)
        agreed = self._agreement()
        self._agreement = lambda: agreed
        return self._schedule.decide(step, agreed)

    def _present_tensors(self) -> Mapping[str, Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _restore(
        self,
        wanted: Wanted,
        shards: Mapping[str, Shard] | None,
        store: Store,
        keeper: KeeperClient | None = None,
        remote: PeerCopies | None = None,
        **options: Any,
    ) -> Restored | None:
        job = self.job
        at_first(job.peers, partial(clean, store, job.attempt))
        return restore(
            wanted,
            keeper=keeper,
            store=store,
            report=job.report,
            shards=shards,
            peers=job.peers,
            copies=job.copies,
            remote=remote,
            verify=job.config.verify,
            refused=self._refused,
            **options,
        )
