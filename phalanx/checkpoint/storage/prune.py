"""Deleting the checkpoints that are not kept; which those are is `phalanx.checkpoint.policy.retention`'s decision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.format.evaluation import EVALUATION, Evaluation
from phalanx.checkpoint.format.manifest import Manifest
from phalanx.checkpoint.format.verify import examine
from phalanx.checkpoint.policy.retention import Rules, Stocked, unkept
from phalanx.checkpoint.storage.base import Store, Stored
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.local import LocalStore
from phalanx.checkpoint.storage.names import step_of
from phalanx.core.errors import UserError
from phalanx.core.peers import ALONE, Peers
from phalanx.core.points import NO_POINTS, Points

KEPT_QUARANTINED = 2
"""Of those kept aside as stale or sick, to be looked into by people; they count as kept nowhere."""


def prune(
    place: Path | Store,
    rules: Rules,
    *,
    good_step: int | None = None,
    points: Points = NO_POINTS,
    peers: Peers = ALONE,
) -> list[Stored]:
    """Delete the checkpoints that `rules` do not keep, oldest first; return those deleted.

    Never deleted: the newest whole checkpoint, whatever is newer than it, and the one that the pointer names. Damaged
    ones do not count as kept.

    Args:
        place: the folder of the run's checkpoints, or the store of them.
        rules: `keep_last`, `keep_every`, `keep_best` and `budget_bytes` decide.
        good_step: a checkpoint known to be whole because this process has just saved it. Without it, checkpoints are
            read and hashed from the newest on until a whole one is found.
        points: of a folder: ``checkpoint.deleting`` is reached when one has lost its name and not yet its files.
        peers: rank 0 of them deletes, and nobody waits for it; the others return nothing.

    Raises:
        OSError: storage refuses.
    """
    if peers.rank != 0:
        return []
    store = LocalStore(place, points) if isinstance(place, Path) else place
    store.clean(0)
    for name in store.quarantined()[KEPT_QUARANTINED:]:
        store.delete(name)
    found = [_stocked(Stored(store, name), rules) for name in store.names()]
    doomed = _doomed(store, found, rules, good_step)
    for name in doomed:
        store.delete(name)
    return [Stored(store, name) for name in doomed]


def add_evaluation(
    store: Store, name: str, evaluation: Evaluation, rules: Rules, report: Callable[[str], None]
) -> None:
    """Put what an evaluation found beside the checkpoint `name`, and delete what `rules` keep no longer for it.

    Storage that refuses is reported: the checkpoint is as good without.
    """
    try:
        store.write(name, EVALUATION, [evaluation.to_bytes()])
        if rules.keep_best:
            prune(store, rules, good_step=evaluation.step)
    except OSError as error:
        report(f"the evaluation of step {evaluation.step} is not kept with its checkpoint ({error})")


def _doomed(store: Store, found: list[Stocked], rules: Rules, good_step: int | None) -> list[str]:
    sound = [one for one in found if one.is_sound]
    latest = read_latest(store) if sound else None
    spared = () if latest is None else (latest.name,)
    if not sound or not unkept(found, sound[0].name, rules, spared):
        return []  # without reading every byte of anything
    whole = (one.name for one in sound if one.step == good_step or _manifest(Stored(store, one.name), checksums=True))
    good = next(whole, None)
    return [] if good is None else [one.name for one in unkept(found, good, rules, spared)]


def _stocked(stored: Stored, rules: Rules) -> Stocked:
    manifest = _manifest(stored, checksums=False)
    if manifest is not None:
        return Stocked(stored.name, manifest.step, True, manifest.size_bytes, tuple(manifest.metrics.items()))
    size_bytes = 0
    if rules.budget_bytes:
        with suppress(OSError):
            size_bytes = sum(stored.size_bytes(file) for file in stored.store.files(stored.name))
    return Stocked(stored.name, step_of(stored.name), is_sound=False, size_bytes=size_bytes)


def _manifest(stored: Stored, *, checksums: bool) -> Manifest | None:
    """None: it cannot be restored, because it is damaged or of a later version."""
    try:
        return examine(stored, checksums=checksums, spare=lambda *_: None)
    except UserError:
        return None
