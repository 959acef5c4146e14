"""Where the checkpoints of a run go, and what its tensors are to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.format.plan import Role
from phalanx.checkpoint.session import choosing
from phalanx.checkpoint.session.choosing import Saver
from phalanx.core.layout import Axis
from phalanx.core.points import NO_POINTS, Points
from phalanx.parallel.peers import GroupCopies
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import destination
from phalanx.train.ranks import Ranks

DATA_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""Ranks along these axes hold the same blocks wherever they do not split them: one reads, all have it (MegaScale 4)."""


def open_saver(
    config: RunConfig, run_folder: Path, ranks: Ranks, report: Callable[[str], None], points: Points = NO_POINTS
) -> Saver:
    """What keeps the state of a run; all ranks together, once their groups are opened.

    Raises:
        UserError: the storage cannot be reached or written.
    """
    copies = None
    if ranks.mesh is not None:
        copies = GroupCopies(ranks.mesh.group(*DATA_AXES), DATA_AXES, ranks.mesh.device)
    return choosing.open_saver(
        destination(config, run_folder),
        config.checkpoint,
        peers=ranks.peers,
        copies=copies,
        layout=config.parallel.layout,
        run_config=config.model_dump(mode="json"),
        report=report,
        points=points,
    )


def role_of(name: str) -> Role:
    """What a tensor of `phalanx.train.run.Run.state_tensors` is to training."""
    if name.startswith("model."):
        return "trained"
    return "optimizer" if name.startswith("optim.") else "other"
