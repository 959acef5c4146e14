"""Ranks that do the same work, by the groups that they are in, and when one of them takes longer beyond doubt."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LEAST_RANKS = 3
"""That do the same: with two, the median lies between them and either may be the odd one."""

SPREADS = 4.0
"""How many robust standard deviations of its peers a slow rank must stand out."""

STEADY_SHARE = 0.75
"""Of steps in which a slow rank is slower than its peers."""

FEW_RANKS = 4
"""Up to so many say little of how much ranks differ anyway: one that is fast, and is half of what is compared with,
must not hide one that is slow."""

FEW_DIFFER = 0.3
"""By which few ranks of a healthy job differ at most, throughout: on a busy host 0.15 was seen."""

_FEW_SPREADS = 2.0  # the nearest of few ranks is nearer than what they differ by
_OFTEN = 0.66  # of steps
_WORTH_A_DOUBT = 0.2  # nobody is well who is slower than that, however much the others differ
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_PIPELINE, _EXPERT = "pipeline", "expert"


def excess_limit(excesses: Sequence[float], least: float) -> float:
    """By how much of its peers' time a rank has to take longer to be slow: `least`, or more where ranks differ.

    Args:
        excesses: of all that do the same; 0.1: 10 % longer than their median.
    """
    differ = SPREADS * _SIGMA * spread_of(excesses)
    return max(least, min(_FEW_SPREADS * differ, FEW_DIFFER) if len(excesses) <= FEW_RANKS else differ)


def spread_of(excesses: Sequence[float]) -> float:
    """By how much ranks differ that do the same: the lower median of their deviations. With four ranks of which two are
    slow, those two shall not widen it."""
    return sorted(abs(one) for one in excesses)[(len(excesses) - 1) // 2]


def chance_limit(varies: float, steps: int) -> float:
    """How large a rank's median excess becomes by chance, where it differs so much from step to step.

    Args:
        varies: median absolute deviation of its excess.
    """
    return SPREADS * _SIGMA * varies / math.sqrt(steps)


def is_doubtful(excess: float, slow_share: float, excesses: Sequence[float], least: float) -> bool:
    """Whether a rank takes so much longer that it is not to be called well, though it may not be slow."""
    if slow_share < STEADY_SHARE:
        return slow_share >= _OFTEN and excess > max(least, _WORTH_A_DOUBT)
    return excess > max(least, min(max(2 * least, excess_limit(excesses, least) / 2), _WORTH_A_DOUBT))


def doubt_of(who: str, excess: float, slow_share: float, excesses: Sequence[float]) -> str:
    """Why a rank that takes longer is not called slow, as a sentence."""
    longer = f"{who} computes {excess:.0%} longer than its stage"
    if slow_share < STEADY_SHARE:
        return f"{longer}, but is slower in {slow_share:.0%} of steps only, too few to be sure"
    spread = spread_of(excesses)
    return f"{longer}, but its {len(excesses)} ranks differ by {spread:.0%} anyway, too much to be sure"


def groups_of(folder: Path) -> list[dict[str, Any]]:
    """Groups of ranks of the newest attempt as they were described: ``{"group": "shard", "ranks": [0, 1]}``, each once.

    Args:
        folder: `telemetry` of a run.
    """
    found = {}
    for path in sorted((folder / "groups").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            found[(one["attempt"], one["group"], tuple(one["ranks"]))] = {"group": one["group"], "ranks": one["ranks"]}
    newest = max((attempt for attempt, *_ in found), default=0)
    return [value for (attempt, *_), value in sorted(found.items()) if attempt == newest]


def work_of_ranks(groups: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Pipeline stage and place among the experts of each rank that has either; ranks without a group have 0 of it.

    Stages have other layers, and experts other tokens: who has another of these does other work.

    Args:
        groups: as `groups_of` gives them.
    """
    stage: dict[int, int] = {}
    expert: dict[int, int] = {}
    for group in groups:
        axes = group["group"].split("·")
        for place, rank in enumerate(group["ranks"]):
            if _PIPELINE in axes:
                stage[rank] = min(place, stage.get(rank, place))
            if _EXPERT in axes:
                expert[rank] = min(place, expert.get(rank, place))
    return {rank: (stage.get(rank, 0), expert.get(rank, 0)) for rank in stage | expert}
