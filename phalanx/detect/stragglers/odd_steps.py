"""Ranks that are slow now and then: in too few steps to be called slow, and far more often than chance picks them.

A processor that throttles when it is hot, or a host that something else uses for seconds, is as fast as its peers in
most steps, so that medians hide it, and still all wait for it. Where ranks stall by chance, or batches differ, each is
the latest one about as often as the others. Nobody is blamed: it may be what the program does on that rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.detect.detection import Culprit, Detection
from phalanx.detect.stragglers.replay import Numbers, Seconds
from phalanx.detect.stragglers.straggler_facts import StragglerFacts

_EXCESS = 0.25
"""Of the usual time of a stage, by which the latest rank has to be later than the second in a step that counts."""

_LEAST_TIMES = 8
_LEAST_SHARE = 0.05
"""Of a step, that it costs."""

_OTHERS = 0.25
"""Of its cost, that any other rank of the stage may cost."""

_CHANCE = 0.001
_STRETCHES = 0.25
"""Of its steps, that begin a stretch of them: slow for long and well again is no habit."""

_PERIODIC = 0.7
"""Share of equal gaps from which on it is the program, such as an evaluation on one rank."""

_CONFIDENCE = 0.6


@dataclass(frozen=True)
class OddSteps:
    """A rank that holds up its stage now and then; `rank` is a place.

    Attributes:
        steps: places of the steps in which it does.
        cost_s: seconds of a mean step that the others wait for it then.
        chance: how likely one of all ranks is the latest so often.
    """

    rank: int
    steps: Numbers
    cost_s: float
    chance: float


def slow_now_and_then(facts: StragglerFacts, steady_share: float, named: set[int]) -> Iterator[Detection]:
    """One detection for each stage with such a rank, with the advice to watch it.

    Args:
        steady_share: of steps, from which on a rank is slow and not now and then.
        named: ranks that something else was found of.
    """
    places, mean_s = facts.places, float(np.mean(facts.what_if.recorded_s))
    for stage in range(places.stages):
        members = np.flatnonzero(places.stage == stage)
        odd = _odd_steps(facts.own_s, members, facts.places.ranks.size)
        if odd is None or int(places.ranks[odd.rank]) in named:
            continue
        share, count = odd.cost_s / mean_s, len(odd.steps)
        if share < _LEAST_SHARE or count > steady_share * len(facts.steps):
            continue
        rank, host = int(places.ranks[odd.rank]), places.hosts[odd.rank]
        of_steps = f"{count / len(facts.steps):.0%} of {len(facts.steps)} steps"
        one = f"`phalanx trace export RUN step.json.gz --steps {facts.steps[odd.steps[-1]]}`"
        yield Detection(
            "slow now and then",
            f"rank {rank} ({f'host {host}, ' if host else ''}stage {stage}) computes much longer than its peers now and"
            f" then, in {of_steps}, which costs {share:.0%} of a step",
            (Culprit("rank", str(rank), (rank,), (host,) if host else ()),),
            confidence=_CONFIDENCE,
            why=(
                f"it is the latest of {len(members)} ranks by a quarter of their usual time or more in {of_steps}; by"
                f" chance one of them would be as often once in {1 / max(odd.chance, 1e-9):,.0f} such jobs",
                "these steps come at no regular interval, and between them it is as fast as the others",
            ),
            then=(
                f"see what {host or 'its host'} did in such a step: {one}",
                f"if the program does nothing else there, `phalanx check --full` on {host or 'its host'}",
            ),
            advice="watch",
            figures={
                "lost_s": odd.cost_s,
                "lost_share": share,
                "steps": count,
                "share_of_steps": count / len(facts.steps),
            },
        )


def _odd_steps(own_s: Seconds, members: Numbers, ranks: int) -> OddSteps | None:
    """The rank of a stage that costs most by being the only late one, if it is one and the same too often."""
    if len(members) < 3:
        return None
    own = own_s[:, members]
    known = np.flatnonzero(~np.isnan(own).any(axis=1))
    own = own[known]
    if len(own) < 2 * _LEAST_TIMES:
        return None
    ordered = np.sort(own, axis=1)
    later_s = ordered[:, -1] - ordered[:, -2]
    is_odd = later_s > _EXCESS * ordered[:, (len(members) - 1) // 2]
    latest = own.argmax(axis=1)[is_odd]
    cost_s = np.bincount(latest, later_s[is_odd], len(members)) / len(own)
    worst = int(cost_s.argmax())
    steps = known[is_odd][latest == worst]
    if len(steps) < _LEAST_TIMES or np.delete(cost_s, worst).max() > _OTHERS * cost_s[worst]:
        return None
    chance = ranks * _binomial_tail(len(steps), len(latest), 1 / len(members))
    if chance > _CHANCE or _is_one_stretch(steps, len(own_s)) or _is_periodic(steps):
        return None
    return OddSteps(int(members[worst]), steps, float(cost_s[worst]), chance)


def _is_one_stretch(steps: Numbers, count: int) -> bool:
    """Whether it was slow for a while, or is over."""
    stretches = 1 + int(np.count_nonzero(np.diff(steps) > 1))
    return stretches < max(4, _STRETCHES * len(steps)) or steps[-1] < 0.75 * count


def _is_periodic(steps: Numbers) -> bool:
    gaps = np.diff(steps[np.concatenate([[True], np.diff(steps) > 1])])
    return bool(len(gaps)) and np.bincount(gaps).max() >= _PERIODIC * len(gaps)


def _binomial_tail(times: int, of: int, share: float) -> float:
    """How likely so many of so many, or more, are of one kind."""
    return math.fsum(math.comb(of, one) * share**one * (1 - share) ** (of - one) for one in range(times, of + 1))
