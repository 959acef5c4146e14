"""Many runs of one story, each with failures of its own."""

from __future__ import annotations

import math

import numpy as np

from phalanx.core.errors import UserError
from phalanx.plan.months.history import History, draw, draw_lemons
from phalanx.plan.months.machine import play
from phalanx.plan.months.outcome import Outcome, Runs, summarise
from phalanx.plan.months.state import DONE, State
from phalanx.plan.months.values import DAY_S, Story, require

_MOST_EVENTS = 200_000
_EVENTS_AT_ONCE = 2_000_000
_HOSTS_AT_ONCE = 4_000_000


def simulate(story: Story, runs: int = 1000, seed: int = 0, hosts_drawn: int = 0) -> Outcome:
    """What is to be expected, by playing `runs` runs.

    The same seed gives the same figures. Two stories are comparable run by run if they have the same failures,
    `Recovery.spread` and `hosts_drawn`.

    Args:
        hosts_drawn: for how many hosts failures are drawn, at least all of them; 0: as many as there are.

    Raises:
        UserError: there are too many failures to play; of such a job nothing would come.
    """
    require("runs", runs, 1, 1_000_000)
    hosts = max(hosts_drawn, story.all_hosts)
    require_playable(story, hosts)
    at_once = max(min(runs, _HOSTS_AT_ONCE // hosts), 1)
    sizes = [min(at_once, runs - first) for first in range(0, runs, at_once)]
    played = [_play_batch(story, size, hosts, (seed, number)) for number, size in enumerate(sizes)]
    return summarise(story, seed, Runs.joined(played))


def require_playable(story: Story, hosts: int) -> None:
    """Refuse more failures of so many hosts than can be played.

    Raises:
        UserError: there are too many; of such a job nothing would come.
    """
    per_day = _events_per_day(story, hosts)
    if per_day * story.work.days > _MOST_EVENTS:
        cure = f"watch {_MOST_EVENTS / per_day:.3g} days at most, or look at the rates"
        raise UserError(f"{per_day:.3g} failures a day are too many to play", cure=cure, field="days")


def simulate_histories(story: Story, histories: list[History], seed: int = 0) -> Outcome:
    """What comes of histories that are given, such as a trace's; each may have several runs."""
    played = []
    for history in histories:
        state = State(story, history.runs)
        play(state, history, story.work.days * DAY_S)
        played.append(Runs.of(state))
    return summarise(story, seed, Runs.joined(played))


def _events_per_day(story: Story, hosts: int) -> float:
    return story.failures.per_host_day() * hosts + story.recovery.planned_per_day


def _play_batch(story: Story, runs: int, hosts: int, seeds: tuple[int, int]) -> Runs:
    """Failures are drawn for some time at once, as far as memory allows, while there are runs that go on."""
    state = State(story, runs)
    end_s = story.work.days * DAY_S
    days_at_once = _EVENTS_AT_ONCE / (runs * max(_events_per_day(story, hosts), 1e-9))
    if math.isfinite(story.work.goal_s):  # most runs are over long before the limit
        days_at_once = min(days_at_once, 2 * story.work.goal_s / DAY_S)
    lemons = draw_lemons(story.failures.lemon_share, runs, hosts, np.random.default_rng((*seeds, 0)))
    begins_s, number = 0.0, 0
    while begins_s < end_s and (state.phase != DONE).any():
        number += 1
        ends_s = min(begins_s + days_at_once * DAY_S, end_s)
        random = np.random.default_rng((*seeds, number))
        play(state, draw(story, lemons, begins_s, ends_s, random), ends_s)
        begins_s = ends_s
    return Runs.of(state)
