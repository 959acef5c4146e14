"""Where the checkpoints of a run go, and whether training stands still for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from phalanx.checkpoint.format.plan import Role
from phalanx.checkpoint.restoring.restored import Restored
from phalanx.checkpoint.session.blocking import BlockingSession
from phalanx.checkpoint.session.ledger import Event
from phalanx.checkpoint.session.opening import open_session
from phalanx.checkpoint.session.session import Tensors
from phalanx.checkpoint.snapshot.plans import Roles
from phalanx.core.layout import Axis
from phalanx.core.points import NO_POINTS, Points
from phalanx.core.shard import Shard
from phalanx.parallel.peers import GroupCopies
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import destination
from phalanx.train.ranks import Ranks

DATA_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""Ranks along these axes hold the same blocks wherever they do not split them: one reads, all have it (MegaScale 4)."""


class Saver(Protocol):
    """Takes checkpoints and takes them up again; `phalanx.checkpoint.session.session.Session` says what each does."""

    @property
    def blocks(self) -> bool:
        """Whether training stands still while a checkpoint is written."""
        ...

    @property
    def attempt(self) -> int:
        """How often the run was started, with this time."""
        ...

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, Shard] | None = None,
        *,
        accept: Callable[[Any], None] | None = None,
    ) -> Restored | None:
        """Fill `tensors` from the newest good state."""
        ...

    def watch(self, tensors: Tensors, shards: Mapping[str, Shard] | None, roles: Roles) -> None:
        """Say what checkpoints consist of."""
        ...

    def ask(self, step: int) -> None:
        """The step that will be number `step` begins."""
        ...

    def fence(self) -> None:
        """What checkpoints consist of may be changed after this."""
        ...

    def after_step(
        self,
        step: int,
        state: Callable[[], Any],
        *,
        stepped: Callable[[], bool] | bool = True,
        metrics: Mapping[str, float] | None = None,
        ending: bool = False,
    ) -> None:
        """Step `step` is done: take what is due."""
        ...

    def events(self) -> list[Event]:
        """What has become of snapshots since the last call."""
        ...

    def costs(self) -> dict[str, Any]:
        """What was measured for ``checkpoint.auto``."""
        ...

    def recall(self, costs: dict[str, Any] | None, *, failed: bool) -> None:
        """Take that up in the next attempt."""
        ...

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable, seconds; 0: unknown."""
        ...

    def finish(self, *, clean: bool) -> None:
        """Let go of everything."""
        ...


def open_saver(
    config: RunConfig, run_folder: Path, ranks: Ranks, report: Callable[[str], None], points: Points = NO_POINTS
) -> Saver:
    """What keeps the state of a run; all ranks together, once their groups are opened.

    Raises:
        UserError: the storage cannot be reached or written.
    """
    url, checkpoint = destination(config, run_folder), config.checkpoint
    run_config = config.model_dump(mode="json")
    copies = None
    if ranks.mesh is not None:
        copies = GroupCopies(ranks.mesh.group(*DATA_AXES), DATA_AXES, ranks.mesh.device)
    layout = config.parallel.layout
    if checkpoint.mode == "blocking":
        return BlockingSession(
            Path(url),
            checkpoint,
            peers=ranks.peers,
            copies=copies,
            layout=str(layout),
            run_config=run_config,
            report=report,
            points=points,
        )
    return open_session(
        url,
        checkpoint,
        peers=ranks.peers,
        copies=copies,
        layout=layout,
        run_config=run_config,
        report=report,
        points=points,
    )


def role_of(name: str) -> Role:
    """What a tensor of `phalanx.train.run.Run.state_tensors` is to training."""
    if name.startswith("model."):
        return "trained"
    return "optimizer" if name.startswith("optim.") else "other"
