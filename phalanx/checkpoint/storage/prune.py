"""Which checkpoints are kept, and deleting the others."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.verify import examine
from phalanx.checkpoint.storage.folder import Candidate, candidates, clean, delete
from phalanx.core.errors import UserError
from phalanx.core.peers import ALONE, Peers
from phalanx.core.points import NO_POINTS, Points


def prune(
    folder: Path,
    config: CheckpointConfig,
    *,
    good_step: int | None = None,
    points: Points = NO_POINTS,
    peers: Peers = ALONE,
) -> list[Path]:
    """Delete the checkpoints of `folder` that `config` does not keep, oldest first; return the folders deleted.

    Never deleted: the newest whole checkpoint and whatever is newer than it. Damaged ones do not count as kept.

    Args:
        folder: the folder of the run's checkpoints.
        config: `keep_last` and `keep_every` decide.
        good_step: a checkpoint known to be whole because this process has just saved it. Without it, checkpoints are
            read and hashed from the newest on until a whole one is found.
        points: ``checkpoint.deleting`` is reached when one has lost its name and not yet its files.
        peers: rank 0 of them deletes, and nobody waits for it; the others return nothing.
    """
    if peers.rank != 0:
        return []
    clean(folder)
    found = candidates(folder)
    sound = [c for c in found if _whole(c, checksums=False)]
    if not sound or not unkept(found, _steps(sound), sound[0].step, config):
        return []
    good = next((c.step for c in sound if c.step == good_step or _whole(c, checksums=True)), None)
    if good is None:
        return []
    doomed = unkept(found, _steps(sound), good, config)
    for candidate in doomed:
        delete(candidate.path, points)
    return [candidate.path for candidate in doomed]


def unkept(found: list[Candidate], sound: Set[int], good: int, config: CheckpointConfig) -> list[Candidate]:
    """Those of `found` to delete, oldest first; a pure function.

    Args:
        found: all candidates.
        sound: steps of those with nothing wrong at first sight.
        good: step of the newest one known to be whole; it and everything newer is spared.
        config: how many to keep.
    """
    kept = set(sorted((step for step in sound if step <= good), reverse=True)[: config.keep_last])
    if config.keep_every:
        kept |= {step for step in sound if step % config.keep_every == 0}
    return sorted(c for c in found if c.step < good and c.step not in kept)


def _steps(found: list[Candidate]) -> set[int]:
    return {candidate.step for candidate in found}


def _whole(candidate: Candidate, *, checksums: bool) -> bool:
    try:
        examine(candidate.path, checksums=checksums)
    except UserError:
        return False
    return True
