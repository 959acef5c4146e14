"""How a state becomes a checkpoint and comes back: training stands still meanwhile, or a session does it beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.state import TrainingState
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.policy.adapting import AutoInterval
from phalanx.checkpoint.policy.due import Moment, durable_due
from phalanx.checkpoint.restore import Checkpoint, newest
from phalanx.checkpoint.save import save
from phalanx.checkpoint.storage.prune import prune
from phalanx.core.peers import Peers
from phalanx.core.shard import Shard


class Seen(NamedTuple):
    """A state that can be restored, or was in part.

    Attributes:
        step: optimizer steps done.
        state: the JSON of rank 0.
        missing: names asked for on this rank that it does not have.
        unexpected: names that it has and that no rank asked for.
    """

    step: int
    state: Any
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Engine(Protocol):
    """Called by all ranks together, in the same order."""

    def look(self) -> Seen | None:
        """The state that would be restored now, without its tensors; None: there is none."""
        ...

    def fill(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Seen | None:
        """Fill tensors from the state that would be restored now, and say which it was."""
        ...

    def fence(self, step: int) -> None:
        """Parameters and optimizer state may be changed after this; step `step` is under way."""
        ...

    def after_step(self, step: int, *, stepped: bool, metrics: Mapping[str, float], ending: bool) -> None:
        """Step `step` is done; with `ending` its checkpoint is durable when this returns."""
        ...

    def changed(self) -> None:
        """Names or shapes of tensors have changed."""
        ...

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds."""
        ...

    def close(self, *, clean: bool) -> None:
        """Nothing more will be saved; `clean`: training has ended well."""
        ...


@dataclass
class Blocking:
    """Training stands still while a checkpoint is written.

    Args:
        folder: for the checkpoints, on a file system that all ranks share.
        config: when they are due, and which are kept.
        training: what is saved.
        peers: the ranks.
        about: kept in each checkpoint as its config.
        report: is given lines for people.
    """

    folder: Path
    config: CheckpointConfig
    training: TrainingState
    peers: Peers
    about: Mapping[str, Any]
    report: Callable[[str], None]
    _found: Checkpoint | None = None
    _last: Moment | None = None
    _auto: AutoInterval = field(init=False)
    _step_began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._auto = AutoInterval(self.config)
        self._step_began_s = time.monotonic()

    def look(self) -> Seen | None:
        """The newest whole checkpoint of the folder."""
        self._found = newest(self.folder, self.report, verify=self.config.verify, peers=self.peers)
        return None if self._found is None else Seen(self._found.step, self._found.state)

    def fill(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Seen | None:
        """From the checkpoint that `look` found."""
        if self._found is None:
            return None
        different = self._found.load_into(tensors, shards=shards, strict=False, peers=self.peers)
        return Seen(self._found.step, self._found.state, different.missing, different.unexpected)

    def fence(self, step: int) -> None:
        """Nothing is under way."""

    def after_step(self, step: int, *, stepped: bool, metrics: Mapping[str, float], ending: bool) -> None:
        """Save if that is due, or `ending`."""
        now = Moment(step, time.monotonic())
        self._last = self._last or Moment(step - 1, self._step_began_s)
        self._auto.note_step(now.clock_s - self._step_began_s)
        if self._is_due(now, self._last) or ending:
            self._save(step)
            self._last = now
            seconds = time.monotonic() - now.clock_s
            self._auto.note_stall(seconds)
            self._auto.note_durable(seconds)
        self._step_began_s = time.monotonic()

    def changed(self) -> None:
        """Each save looks anew."""

    @property
    def expected_durable_s(self) -> float:
        """As long as one of the last took."""
        return self._auto.expected_durable_s

    def close(self, *, clean: bool) -> None:
        """Nothing is open."""

    def _is_due(self, now: Moment, last: Moment) -> bool:
        """By rank 0's clock, where time counts."""
        due = durable_due(self.config, now, last, self._auto.steps)
        if self.config.every_s > 0 or self.config.auto:
            due = bool(self.peers.broadcast(due))
        return due

    def _save(self, step: int) -> None:
        found = self.training.collect()
        state = self.training.plain(found, step) if self.peers.rank == 0 else None
        meta = Meta(config=self.about)
        save(self.folder, step, found.tensors, state, meta, shards=found.shards, peers=self.peers)
        prune(self.folder, self.config, good_step=step, peers=self.peers)
