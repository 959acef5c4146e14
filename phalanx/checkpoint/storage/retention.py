"""Retention: which checkpoints are kept, a pure function of those there are and the settings; deleting the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint.format.checkpoint_files import EVALUATION, Evaluation, Files, examine, is_suspect
from phalanx.checkpoint.format.manifest import Manifest
from phalanx.checkpoint.storage.checkpoint_store import Store, step_of
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.peers import ALONE, Peers


class _Rules(Protocol):
    """Which are kept: by a `CheckpointConfig`, which says what each field means, or the `Destination` of a task."""

    @property
    def keep_last(self) -> int: ...
    @property
    def keep_every(self) -> int: ...
    @property
    def keep_best(self) -> int: ...
    @property
    def best_metric(self) -> str: ...
    @property
    def budget_bytes(self) -> int: ...


@dataclass(frozen=True)
class Stocked:
    """A checkpoint that is there; `is_sound`: nothing is wrong with it at first sight."""

    name: str
    step: int
    is_sound: bool = True
    size_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()


def unkept(found: Sequence[Stocked], good: str, rules: _Rules, spared: Collection[str] = ()) -> list[Stocked]:
    """Those of `found` to delete, oldest first.

    Never among them: the one called `good`, whatever is newer, and those called in `spared`. Damaged ones do not count
    as kept. Where the room is not enough, those go first that only `keep_every` and `keep_best` keep, the oldest of
    them first, then the oldest of the others.

    Args:
        found: all, newest first.
        good: name of the newest one known to be whole.
        rules: how many to keep.
        spared: names of others that must stay.
    """
    first = next(index for index, one in enumerate(found) if one.name == good)
    usable = [one for one in found[first:] if one.is_sound]
    recent = _names(usable[: rules.keep_last])
    bound = _names(found[: first + 1]) | set(spared)
    sound = [one for one in found if one.is_sound]
    every = [one for one in sound if rules.keep_every and one.step % rules.keep_every == 0]
    scored = [(dict(one.metrics).get(rules.best_metric, math.nan), -one.step, one.name) for one in sound]
    best = sorted(score for score in scored if math.isfinite(score[0]))[: rules.keep_best]
    kept = bound | recent | _names(every) | {name for _, _, name in best}
    if rules.budget_bytes:
        excess_bytes = sum(one.size_bytes for one in found if one.name in kept) - rules.budget_bytes
        may_go = [one for one in reversed(found) if one.name in kept - bound]
        for one in sorted(may_go, key=lambda one: one.name in recent):  # stable: oldest first in both groups
            if excess_bytes <= 0:
                break
            kept.remove(one.name)
            excess_bytes -= one.size_bytes
    return [one for one in reversed(found) if one.name not in kept]


def _names(some: Iterable[Stocked]) -> set[str]:
    return {one.name for one in some}


KEPT_QUARANTINED = 2
"""Checkpoints that stay aside as stale or sick, for people to look into; no rule counts them as kept."""


def prune(
    place: Path | Store,
    rules: _Rules,
    *,
    good_step: int | None = None,
    points: Points = NO_POINTS,
    peers: Peers = ALONE,
) -> list[Files]:
    """Delete the checkpoints that `rules` do not keep, oldest first; return those deleted.

    Never deleted: the newest whole checkpoint, whatever is newer than it, and the one that the pointer names. Damaged
    ones do not count as kept.

    Args:
        place: the folder of the run's checkpoints, or the store of them.
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
    found = [_stocked(store, name, rules) for name in store.names()]
    sound = [one for one in found if one.is_sound]
    latest = read_latest(store) if sound else None
    spared = () if latest is None else (latest.name,)
    if not sound or not unkept(found, sound[0].name, rules, spared):
        return []  # without reading every byte of anything
    whole = (one.name for one in sound if one.step == good_step or _manifest(store.at(one.name), checksums=True))
    good = next(whole, None)
    doomed = [] if good is None else [one.name for one in unkept(found, good, rules, spared)]
    for name in doomed:
        store.delete(name)
    return [store.at(name) for name in doomed]


def add_evaluation(
    store: Store, name: str, evaluation: Evaluation, rules: _Rules, report: Callable[[str], None]
) -> None:
    """Write an evaluation beside the checkpoint `name`, and delete what `rules` keep no longer for it. Storage that
    refuses is reported, not raised: the checkpoint is as good without."""
    try:
        store.write(name, EVALUATION, [evaluation.to_bytes()])
        if rules.keep_best:
            prune(store, rules, good_step=evaluation.step)
    except OSError as error:
        report(f"the evaluation of step {evaluation.step} is not kept with its checkpoint ({error})")


def _stocked(store: Store, name: str, rules: _Rules) -> Stocked:
    manifest = _manifest(store.at(name), checksums=False)
    if manifest is not None:
        is_sound = not is_suspect(store.at(name))
        return Stocked(name, manifest.step, is_sound, manifest.size_bytes, tuple(manifest.metrics.items()))
    size_bytes = 0
    if rules.budget_bytes:
        with suppress(OSError):
            size_bytes = sum(store.at(name).size_bytes(file) for file in store.files(name))
    return Stocked(name, step_of(name), is_sound=False, size_bytes=size_bytes)


def _manifest(files: Files, *, checksums: bool) -> Manifest | None:
    """None: it cannot be restored, because it is damaged or of a later version."""
    try:
        return examine(files, checksums=checksums, spare=lambda *_: None)
    except UserError:
        return None
