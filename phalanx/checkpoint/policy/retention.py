"""Which checkpoints are kept: a pure function of what there is and of the settings."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Rules(Protocol):
    """What decides; `phalanx.checkpoint.config.CheckpointConfig` says what each means."""

    @property
    def keep_last(self) -> int:
        """How many of the newest."""
        ...

    @property
    def keep_every(self) -> int:
        """Besides, those whose step is a multiple of it; 0: none."""
        ...

    @property
    def keep_best(self) -> int:
        """Besides, how many with the lowest `best_metric`."""
        ...

    @property
    def best_metric(self) -> str:
        """Name of a figure in the manifest."""
        ...

    @property
    def budget_bytes(self) -> int:
        """Room for all of them together; 0: no limit."""
        ...


@dataclass(frozen=True)
class Stocked:
    """A checkpoint that is there.

    Attributes:
        name: of it.
        step: of it.
        is_sound: nothing is wrong with it at first sight.
        size_bytes: what it takes.
        metrics: its figures.
    """

    name: str
    step: int
    is_sound: bool = True
    size_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()


def unkept(found: Sequence[Stocked], good: str, rules: Rules, spared: Collection[str] = ()) -> list[Stocked]:
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
    kept = bound | recent | _extra([one for one in found if one.is_sound], rules)
    if rules.budget_bytes:
        excess = sum(one.size_bytes for one in found if one.name in kept) - rules.budget_bytes
        kept -= _over_budget(found, kept - bound, recent, excess)
    return [one for one in reversed(found) if one.name not in kept]


def _extra(sound: list[Stocked], rules: Rules) -> set[str]:
    every = [one for one in sound if rules.keep_every and one.step % rules.keep_every == 0]
    scored = [(dict(one.metrics).get(rules.best_metric, math.nan), -one.step, one.name) for one in sound]
    best = sorted(score for score in scored if math.isfinite(score[0]))[: rules.keep_best]
    return _names(every) | {name for _, _, name in best}


def _over_budget(found: Sequence[Stocked], may_go: set[str], recent: set[str], excess_bytes: int) -> set[str]:
    oldest_first = [one for one in reversed(found) if one.name in may_go]
    gone: set[str] = set()
    for one in sorted(oldest_first, key=lambda one: one.name in recent):  # stable: oldest first in both groups
        if excess_bytes <= 0:
            break
        gone.add(one.name)
        excess_bytes -= one.size_bytes
    return gone


def _names(some: Iterable[Stocked]) -> set[str]:
    return {one.name for one in some}
