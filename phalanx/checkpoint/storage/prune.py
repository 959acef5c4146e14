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
from phalanx.checkpoint.storage.order import Order
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
    judge = _Judge(store, rules, good_step)
    doomed = _doomed(judge, [judge.stocked(name) for name in store.names()])
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


class _Judge:
    """Holds usable what `phalanx.checkpoint.restoring.restore` would use, were all that is newer gone."""

    def __init__(self, store: Store, rules: Rules, good_step: int | None) -> None:
        self.store, self.rules, self._good_step = store, rules, good_step
        self._order = Order(store, lambda _: None)
        self._usable = dict(self._order.names())

    def stocked(self, name: str) -> Stocked:
        """What there is to know of a checkpoint, at first sight."""
        manifest = self._manifest(name, checksums=False)
        if manifest is not None:
            return Stocked(name, manifest.step, True, manifest.size_bytes, tuple(manifest.metrics.items()))
        size_bytes = 0
        if self.rules.budget_bytes:
            with suppress(OSError):
                size_bytes = sum(self.store.size_bytes(name, file) for file in self.store.files(name))
        return Stocked(name, step_of(name), is_sound=False, size_bytes=size_bytes)

    def is_whole(self, one: Stocked) -> bool:
        """Whether all of it is good, by every byte unless it was just written."""
        return one.step == self._good_step or self._manifest(one.name, checksums=True) is not None

    def _manifest(self, name: str, *, checksums: bool) -> Manifest | None:
        """None: it cannot be restored, because it is damaged, of a later version, or of nobody in charge."""
        if name not in self._usable:
            return None
        try:
            return examine(
                Stored(self.store, name),
                checksums=checksums,
                manifest_sha256=self._usable[name],
                spare=lambda *_: None,
                was_published=self._order.was_published,
            )
        except UserError:
            return None


def _doomed(judge: _Judge, found: list[Stocked]) -> list[str]:
    sound = [one for one in found if one.is_sound]
    latest = read_latest(judge.store) if sound else None
    spared = () if latest is None else (latest.name,)
    if not sound or not unkept(found, sound[0].name, judge.rules, spared):
        return []  # without reading every byte of anything
    good = next((one.name for one in sound if judge.is_whole(one)), None)
    return [] if good is None else [one.name for one in unkept(found, good, judge.rules, spared)]
