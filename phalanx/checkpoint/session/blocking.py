"""Checkpoints for which training stands still: the same calls as of a session, nothing in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from phalanx.checkpoint.all_ranks import at_first
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.due import FREE, Agenda
from phalanx.checkpoint.format.checkpoint_files import Evaluation
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.persist.checkpoint_writer import describe
from phalanx.checkpoint.restoring.restore import Refused, Wanted, restore
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.save import write_checkpoint
from phalanx.checkpoint.session.background_session import Tensors
from phalanx.checkpoint.session.ledger import Event
from phalanx.checkpoint.snapshot_plans import Roles
from phalanx.checkpoint.storage.location import claimed, clean, has_names, open_store
from phalanx.checkpoint.storage.retention import add_evaluation, prune
from phalanx.core.layout import Layout, Shard
from phalanx.core.peers import ALONE, Copies, Peers
from phalanx.core.points import NO_POINTS, Points


class BlockingSession:
    """Writes each checkpoint while training waits; needs no keeper and keeps nothing in memory.

    Args:
        url: of the checkpoints; a folder has to be on a file system that all ranks share.
        config, peers, copies, layout, run_config, report, points: as of
            `phalanx.checkpoint.session.open_session.open_session`.

    Attributes:
        blocks: training stands still while a checkpoint is written.
    """

    blocks = True

    def __init__(
        self,
        url: str,
        config: CheckpointConfig,
        *,
        peers: Peers = ALONE,
        copies: Copies | None = None,
        layout: Layout | str = "1",
        run_config: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = print,
        points: Points = NO_POINTS,
    ) -> None:
        self._config, self._peers, self._copies = config, peers, copies
        self._layout, self._run_config = str(layout), dict(run_config or {})
        self._report, self._points = report, points
        self._store = open_store(url, config.storage_options, points)
        self.attempt: int = at_first(peers, lambda: claimed(url, config.storage_options, 0, report))
        self._agenda = Agenda(config, AutoInterval(config), decides=peers.rank == 0)
        self._answer: Callable[[], int] | None = None
        self._tensors: Tensors = {}
        self._shards: Mapping[str, Shard] = {}
        self._roles: Roles = {}
        self._events: list[Event] = []
        self._asked: int | None = None
        self._saved: int | None = None
        self._newest = (-1, "")
        self._refused = Refused()

    def has_states(self) -> bool:
        """Whether there is anything that `restore` would try, good or not; all ranks together, the same answer."""
        return at_first(self._peers, lambda: has_names(self._store.url, self._config.storage_options))

    def restore(self, wanted: Wanted, shards: Mapping[str, Shard] | None = None, **options: Any) -> Restored | None:
        """Fill tensors from the newest good checkpoint; see `Session.restore`."""
        at_first(self._peers, partial(clean, self._store, self.attempt))
        restored = restore(
            wanted,
            keeper=None,
            store=self._store,
            report=self._report,
            shards=shards,
            peers=self._peers,
            copies=self._copies,
            verify=self._config.verify,
            refused=self._refused,
            **options,
        )
        self._newest = (-1, "") if restored is None else (restored.step, restored.name)
        return restored

    def watch(
        self, tensors: Tensors, shards: Mapping[str, Shard] | None, roles: Roles, *, overlap: bool | None = None
    ) -> None:
        """Say what checkpoints consist of; `overlap` matters in the background only."""
        self._tensors, self._shards, self._roles = tensors, shards or {}, roles

    def ask(self, step: int) -> None:
        """The step that will be number `step` begins."""
        self._asked = step
        self._agenda.begin(step - 1)
        if self._agenda.asks(step):
            self._answer = self._peers.ask_highest(self._agenda.says(step, FREE))

    def fence(self) -> None:
        """Nothing is under way that parameters must not be changed for."""

    def after_step(
        self,
        step: int,
        state: Callable[[], Any],
        *,
        stepped: Callable[[], bool] | bool = True,
        metrics: Mapping[str, float] | None = None,
        ending: bool = False,
    ) -> None:
        """Write a checkpoint if one is due, or this is the last step of the process; see `Session.after_step`."""
        if self._asked != step:
            self.ask(step)  # a loop that does not call it
        answer, self._answer = self._answer, None
        due = answer is not None and self._agenda.decide(step, answer()).persist
        if (due or ending) and self._saved != step:  # an end comes again after the last step, and knows no metrics
            self._agenda.took(step, persist=True)
            self._save(step, state, dict(metrics or {}), stepped=stepped() if callable(stepped) else stepped)
            self._saved = step

    def evaluated(self, evaluation: Evaluation) -> None:
        """As of `Session.evaluated`; the checkpoint, if one was taken, is durable."""
        step, name = self._newest
        if self._peers.rank == 0 and step == evaluation.step:
            add_evaluation(self._store, name, evaluation, self._config, self._report)

    def events(self) -> list[Event]:
        """Checkpoints written since the last call."""
        events, self._events = self._events, []
        return events

    def costs(self) -> dict[str, Any]:
        """As of `Session.costs`."""
        return self._agenda.auto.to_json()

    def recall(self, costs: dict[str, Any] | None, *, failed: bool) -> None:
        """As of `Session.recall`."""
        self._agenda.recall(costs, 1, failed=failed)

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take, seconds; 0: none was seen yet."""
        return self._agenda.auto.expected_durable_s

    @property
    def status(self) -> str:
        """As of `Session.status`; training waits, so that what is asked for is durable."""
        return f"{self._newest[1]} is durable" if self._newest[1] else "nothing is durable yet"

    def finish(self, *, clean: bool) -> None:
        """Nothing is left open."""

    def _save(self, step: int, state: Callable[[], Any], metrics: dict[str, float], *, stepped: bool) -> None:
        began_s = time.perf_counter()
        tensors = self._tensors() if callable(self._tensors) else self._tensors
        name = write_checkpoint(
            self._store,
            step,
            tensors,
            state() if self._peers.rank == 0 else None,
            Meta(self._run_config, self.attempt, metrics=metrics, layout=self._layout),
            roles=self._roles,
            stepped=stepped,
            points=self._points,
            shards=self._shards,
            peers=self._peers,
        )
        self._newest = (step, name)
        at_first(self._peers, partial(self._prune, step))
        seconds = time.perf_counter() - began_s
        written_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._agenda.durable(seconds, 0.0)
        self._events.append(
            Event(step, True, stall_s=seconds, persist_s=seconds, persist_bytes=written_bytes, name=name)
        )

    def _prune(self, step: int) -> None:
        """Delete what is no longer to be kept."""
        try:
            prune(self._store, self._config, good_step=step)
        except OSError as error:  # the checkpoint is there; the next one tries again
            self._report(f"old checkpoints were not deleted: {describe(error)}")
