"""Deleting the checkpoints that a destination does not keep, after a good one. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.format import manifest as manifests
from phalanx.checkpoint.format.manifest import MANIFEST
from phalanx.checkpoint.persist.contract import Destination
from phalanx.checkpoint.storage.base import Store
from phalanx.checkpoint.storage.names import step_of
from phalanx.core.errors import UserError


@dataclass(frozen=True)
class _Found:
    """A checkpoint older than the good one; `figure` is infinite where it has none."""

    name: str
    step: int
    size_bytes: int
    figure: float


def prune(store: Store, destination: Destination, good: str) -> list[str]:
    """Delete what `destination` does not keep of the checkpoints older than `good`, which has just been published.

    Never deleted: `good`, and what has its step or a larger one.

    Returns:
        The names deleted, oldest first.

    Raises:
        OSError: storage refuses.
    """
    found = [_look(store, name, destination) for name in store.names() if step_of(name) < step_of(good)]
    good_bytes = sum(store.size_bytes(good, file) for file in store.files(good)) if destination.budget_bytes else 0
    doomed = unkept(found, destination, good_bytes)
    for one in doomed:
        store.delete(one.name)
    return [one.name for one in doomed]


def unkept(found: list[_Found], destination: Destination, good_bytes: int) -> list[_Found]:
    """Those of `found` to delete, oldest first; beside them there is the good one, which counts as one of the last."""
    newest = sorted(found, key=lambda one: one.step, reverse=True)
    last = newest[: destination.keep_last - 1]
    best = sorted((one for one in newest if one.figure < math.inf), key=lambda one: one.figure)[: destination.keep_best]
    every = [one for one in newest if destination.keep_every and one.step % destination.keep_every == 0]
    wanted = list(dict.fromkeys([*last, *best, *every]))
    if destination.budget_bytes:
        room = destination.budget_bytes - good_bytes
        while wanted and sum(one.size_bytes for one in wanted) > room:
            wanted.pop()  # those that only keep_every keeps go first, the oldest of them first
    return sorted((one for one in found if one not in wanted), key=lambda one: one.step)


def _look(store: Store, name: str, destination: Destination) -> _Found:
    size_bytes, figure = 0, math.inf
    if destination.budget_bytes:
        size_bytes = sum(store.size_bytes(name, file) for file in store.files(name))
    if destination.keep_best:
        figure = _figure(store, name, destination.best_metric)
    return _Found(name, step_of(name), size_bytes, figure)


def _figure(store: Store, name: str, metric: str) -> float:
    try:
        figure = manifests.decode(store.read(name, MANIFEST), Path(name)).metrics.get(metric, math.inf)
    except (UserError, FileNotFoundError):
        return math.inf
    return math.inf if math.isnan(figure) else figure
