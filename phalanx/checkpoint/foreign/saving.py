"""A session for a foreign training loop: what it consists of is found out when the first step is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.foreign.state import Table, TrainingState
from phalanx.checkpoint.restoring.restore import Wanted
from phalanx.checkpoint.restoring.source import Restored
from phalanx.checkpoint.session.choosing import open_saver
from phalanx.checkpoint.session.ledger import Event
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers


class Saving:
    """All ranks make and call it alike.

    Args:
        url: of the checkpoints.
        config: when they are due, and which are kept.
        training: what is saved.
        peers: the ranks.
        about: kept in each checkpoint as its config.
        report: is given lines for people.

    Raises:
        UserError: the storage cannot be used, or no keeper can be started.
    """

    def __init__(
        self,
        url: str,
        config: CheckpointConfig,
        training: TrainingState,
        peers: Peers,
        about: Mapping[str, Any],
        report: Callable[[str], None],
    ) -> None:
        self._training, self._peers = training, peers
        layout = f"{peers.size} ranks" if peers.size > 1 else "1"
        self._session = open_saver(url, config, peers=peers, layout=layout, run_config=about, report=report)
        self._is_watched = False
        self._is_fenced = False
        self._table: Table = {}
        self._filled: list[int] = []
        self.only_in_memory = False
        """What was restored lies in the memory of hosts, and perhaps nowhere else."""

    def restore(self, wanted: Wanted) -> Restored | None:
        """See `phalanx.checkpoint.foreign.putting.Restore`."""
        restored = self._session.restore(wanted, strict=False)
        self.only_in_memory = restored is not None and restored.only_in_memory
        return restored

    def fence(self) -> None:
        """Parameters and optimizer state may be changed after this."""
        self._is_fenced = True
        self._session.fence()

    def after_step(self, step: int, *, stepped: Callable[[], bool], metrics: Mapping[str, float], ending: bool) -> None:
        """Step `step` is done; with `ending` its checkpoint is durable when this returns."""
        if self._peers.size == 1 and self._filled != self._training.filled():
            self._is_watched = False  # a parameter was updated for the first time
        if not self._is_watched:
            self._watch()
        self._session.after_step(step, lambda: self._state(step), stepped=stepped, metrics=metrics, ending=ending)
        if not ending:
            self._session.ask(step + 1)

    def changed(self) -> None:
        """Names or shapes of tensors have changed."""
        self._is_watched = False

    def events(self) -> list[Event]:
        """What snapshots have cost that have ended since the last call."""
        return self._session.events()

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds; 0: unknown."""
        return self._session.expected_durable_s

    @property
    def status(self) -> str:
        """See `phalanx.checkpoint.session.session.Session.status`."""
        return self._session.status

    def close(self, *, clean: bool) -> None:
        """Nothing more will be saved; `clean`: training has ended well."""
        self._session.finish(clean=clean)

    def _state(self, step: int) -> dict[str, Any]:
        return self._training.plain(self._training.collect(), step)

    def _present(self) -> dict[str, Tensor]:
        """The tensors of this moment, as the ranks agreed on them.

        Raises:
            UserError: they are others.
        """
        found = self._training.collect()
        if found.table != self._table:
            names = sorted({name for name, _ in set(found.table.items()) ^ set(self._table.items())})
            problem = f"{len(names)} tensors have come, gone or changed their shapes since the first step"
            cure = "call changed() of the Checkpointer on all ranks after such a change"
            raise UserError(problem, cure=cure, field=names[0])
        return found.tensors

    def _watch(self) -> None:
        """Only now has the optimizer all of its state. A loop that does not call `fence` is not copied beside."""
        self._training.reserve(lambda room: self._peers.ask_highest(room)())
        found = self._training.collect()
        self._table, self._filled = found.table, self._training.filled()
        about = (self._present, found.shards, found.roles)
        self._session.watch(*about, overlap=None if self._is_fenced else False)
        self._is_watched = True
