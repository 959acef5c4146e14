"""Simulates many runs of one job over months, each with failures of its own, and sums them up with their confidence.

Time goes on in all runs at once: each has its own clock, and in every round its own next event. The best interval
between checkpoints and the best number of spares are searched by formula, and tried with the same failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.simulate import host_events
from phalanx.simulate.failure_formulas import away_ratio, capacity_of, closed_form, durable_mtbf_s
from phalanx.simulate.failure_model import DAY_S, HOUR_S, FailureScenario, require
from phalanx.simulate.run_state import (
    COUNTS,
    DONE,
    PARTS,
    RECOVER,
    RUN,
    TRAINING,
    WAIT,
    History,
    RunState,
    draw,
    draw_lemons,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_MOST_EVENTS = 200_000
_EVENTS_AT_ONCE = 2_000_000
_HOSTS_AT_ONCE = 4_000_000


def simulate(scenario: FailureScenario, runs: int = 1000, seed: int = 0, hosts_drawn: int = 0) -> RunsOutcome:
    """What is to be expected, by playing `runs` runs.

    The same seed gives the same figures. Two scenarios are comparable run by run if they have the same failures,
    `Recovery.spread` and `hosts_drawn`.

    Args:
        hosts_drawn: for how many hosts failures are drawn, at least all of them; 0: as many as there are.
    """
    require("runs", runs, 1, 1_000_000)
    hosts = max(hosts_drawn, scenario.all_hosts)
    require_playable(scenario, hosts)
    at_once = max(min(runs, _HOSTS_AT_ONCE // hosts), 1)
    sizes = [min(at_once, runs - first) for first in range(0, runs, at_once)]
    played = [_play_batch(scenario, size, hosts, (seed, number)) for number, size in enumerate(sizes)]
    return summarise(scenario, seed, RunSamples.joined(played))


def require_playable(scenario: FailureScenario, hosts: int) -> None:
    """Refuse more failures of so many hosts than can be played."""
    per_day = _events_per_day(scenario, hosts)
    if per_day * scenario.work.days > _MOST_EVENTS:
        cure = f"watch {_MOST_EVENTS / per_day:.3g} days at most, or look at the rates"
        raise UserError(f"{per_day:.3g} failures a day are too many to play", cure=cure, field="days")


def simulate_histories(scenario: FailureScenario, histories: list[History], seed: int = 0) -> RunsOutcome:
    """What comes of histories that are given, such as a trace's; each may have several runs."""
    played = []
    for history in histories:
        state = RunState(scenario, history.runs)
        play(state, history, scenario.work.days * DAY_S)
        played.append(RunSamples.of(state))
    return summarise(scenario, seed, RunSamples.joined(played))


def _events_per_day(scenario: FailureScenario, hosts: int) -> float:
    return scenario.failures.per_host_day() * hosts + scenario.recovery.planned_per_day


def _play_batch(scenario: FailureScenario, runs: int, hosts: int, seeds: tuple[int, int]) -> RunSamples:
    """Failures are drawn for some time at once, as far as memory allows, while there are runs that go on."""
    state = RunState(scenario, runs)
    end_s = scenario.work.days * DAY_S
    days_at_once = _EVENTS_AT_ONCE / (runs * max(_events_per_day(scenario, hosts), 1e-9))
    if math.isfinite(scenario.work.goal_s):  # most runs are over long before the limit
        days_at_once = min(days_at_once, 2 * scenario.work.goal_s / DAY_S)
    lemons = draw_lemons(scenario.failures.lemon_share, runs, hosts, np.random.default_rng((*seeds, 0)))
    begins_s, number = 0.0, 0
    while begins_s < end_s and (state.phase != DONE).any():
        number += 1
        ends_s = min(begins_s + days_at_once * DAY_S, end_s)
        random = np.random.default_rng((*seeds, number))
        play(state, draw(scenario, lemons, begins_s, ends_s, random), ends_s)
        begins_s = ends_s
    return RunSamples.of(state)


_FINISH, _SLOT, _READY, _FAILURE, _END = range(5)


def play(state: RunState, history: History, until_s: float) -> None:
    """Let all runs that are not done go on until then, through what their histories say."""
    cursor = np.zeros(history.runs, dtype=np.int64)
    runs = np.flatnonzero(state.phase != DONE)
    while len(runs):
        slots = state.slots.at_s[runs]
        columns = slots.argmin(axis=1)
        times_s = np.empty((5, len(runs)))
        times_s[_FINISH] = _finish(state, runs)
        times_s[_SLOT] = slots[np.arange(len(runs)), columns]
        times_s[_READY] = state.ready_s[runs]
        times_s[_FAILURE] = history.times_s[runs, cursor[runs]]
        times_s[_END] = until_s
        # The first of the five to come wins; of equals the one that stands first, so that work that is done is not
        # lost to a failure at the same moment.
        kinds = times_s.argmin(axis=0)
        _advance_time(state, runs, times_s[kinds, np.arange(len(runs))])
        due = runs[kinds == _SLOT]
        if len(due):
            host_events.apply_due_slots(state, due, columns[kinds == _SLOT])
        _ready(state, runs[kinds == _READY])
        failing = runs[kinds == _FAILURE]
        if len(failing):
            cursor[failing] += 1
            host_events.apply_failures(state, history, failing, cursor[failing] - 1)
        state.phase[runs[kinds == _FINISH]] = DONE
        runs = runs[(kinds != _FINISH) & (kinds != _END)]


def _finish(state: RunState, runs: Ints) -> Floats:
    if not np.isfinite(state.scenario.work.goal_s):
        return np.full(len(runs), np.inf)
    ends_s = np.full(len(runs), np.inf)
    is_running = state.phase[runs] == RUN
    running = runs[is_running]
    ends_s[is_running] = state.now_s[running] + host_events.until_done(state, running)
    return ends_s


def _advance_time(state: RunState, runs: Ints, until_s: Floats) -> None:
    until_s = np.maximum(until_s, state.now_s[runs])
    is_running = state.phase[runs] == RUN
    running = runs[is_running]
    host_events.train(state, running, until_s[is_running] - state.now_s[running])
    state.account(runs[~is_running], until_s[~is_running])
    state.now_s[runs] = until_s


def _ready(state: RunState, runs: Ints) -> None:
    if not len(runs):
        return
    waited = state.phase[runs] == WAIT
    if waited.any():
        host_events.shrink(state, runs[waited])
    starting = runs[~waited]
    assert (state.phase[starting] == RECOVER).all()
    state.phase[starting] = RUN
    state.ready_s[starting] = np.inf
    host_events.use_spares(state, starting)


_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A figure over all runs."""

    mean: float
    # In which the true mean lies with 95 % confidence.
    low: float
    high: float
    # 2.5 %, half and 97.5 % of the runs have no more than this: where one single run lies.
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Floats) -> Estimate:
        """Of one value for each run."""
        if not np.isfinite(values).all():
            least, median, most = np.quantile(values, (0.025, 0.5, 0.975), method="nearest").tolist()
            return cls(math.inf, math.inf, math.inf, least, median, most)
        mean = float(values.mean())
        half = _Z95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        least, median, most = np.quantile(values, (0.025, 0.5, 0.975)).tolist()
        return cls(mean, mean - half, mean + half, least, median, most)


@dataclass(frozen=True)
class RunSamples:
    """What became of each run, in arrays."""

    wall_s: Floats
    parts_s: Floats  # runs x `PARTS`; they sum to `wall_s`
    counts: NDArray[np.int64]
    finished: NDArray[np.bool_]
    most_out: NDArray[np.int64]  # hosts that were away at once at most

    @classmethod
    def of(cls, state: RunState) -> RunSamples:
        """What they have come to by now."""
        return cls(state.now_s, state.parts_s, state.counts, state.phase == DONE, state.most_out)

    @classmethod
    def joined(cls, parts: list[RunSamples]) -> RunSamples:
        """All of them."""
        names = ("wall_s", "parts_s", "counts", "finished", "most_out")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def ettr(self) -> Floats:
        """Effective training time ratio of each run."""
        return self.parts_s[:, TRAINING] / np.maximum(self.wall_s, 1e-300)


@dataclass(frozen=True)
class RunsOutcome:
    """What is to be expected."""

    scenario: FailureScenario
    seed: int
    ettr: Estimate  # effective training time ratio: training that counts, over all time
    goodput: Estimate  # that times the share of all hosts, spares too, that the job uses
    days: Estimate  # that a run takes; with a goal, until it is reached (infinite: it was not)
    device_hours: Estimate  # of all hosts, spares too, cold ones not
    cost: Estimate  # of these, in the money of `Work.price_per_device_hour`
    steps: Estimate
    shares: Mapping[str, Estimate]  # where the time goes, of all of it; they sum to 1
    counts: Mapping[str, Estimate]  # what happened in a run
    finished: float  # runs that reached the goal, ratio; 0 where there is none
    most_out: Estimate
    samples: RunSamples


def summarise(scenario: FailureScenario, seed: int, runs: RunSamples) -> RunsOutcome:
    """The figures of these runs."""
    work = scenario.work
    paid_hosts = work.hosts + scenario.pool.spares
    device_hours = runs.wall_s / HOUR_S * paid_hosts * work.devices_per_host
    days = runs.wall_s / DAY_S
    if work.steps:
        days = np.where(runs.finished, days, np.inf)
    wall_s = np.maximum(runs.wall_s, 1e-300)
    return RunsOutcome(
        scenario=scenario,
        seed=seed,
        ettr=Estimate.of(runs.ettr),
        goodput=Estimate.of(runs.ettr * work.hosts / paid_hosts),
        days=Estimate.of(days),
        device_hours=Estimate.of(device_hours),
        cost=Estimate.of(device_hours * work.price_per_device_hour),
        steps=Estimate.of(runs.parts_s[:, TRAINING] / work.step_s),
        shares={part: Estimate.of(runs.parts_s[:, n] / wall_s) for n, part in enumerate(PARTS)},
        counts={name: Estimate.of(runs.counts[:, n].astype(float)) for n, name in enumerate(COUNTS)},
        finished=float(runs.finished.mean()),
        most_out=Estimate.of(runs.most_out.astype(float)),
        samples=runs,
    )


_MOST_SPARES = 4096


@dataclass(frozen=True)
class PlayedChoice:
    """One of the values that were tried."""

    value: float  # seconds between checkpoints, or spares
    outcome: RunsOutcome
    gain: Estimate  # how much more of what is wanted it brings than the value that the scenario had, in the same runs


def with_interval(scenario: FailureScenario, interval_s: float) -> FailureScenario:
    """The same scenario with another interval between durable checkpoints."""
    return replace(scenario, checkpoints=replace(scenario.checkpoints, interval_s=interval_s))


def with_spares(scenario: FailureScenario, spares: int) -> FailureScenario:
    """The same scenario with another number of spares."""
    return replace(scenario, pool=replace(scenario.pool, spares=spares))


def best_interval(scenario: FailureScenario) -> float:
    """The interval, whole steps, with which the closed form has the highest ETTR.

    No shorter than persisting takes, nor than snapshots in memory are apart; no longer than all of the time.
    """
    step_s, checkpoints = scenario.work.step_s, scenario.checkpoints
    least = max(math.ceil(max(checkpoints.persist_s, checkpoints.memory_interval_s) / step_s - 1e-9), 1)
    # Much longer than that, next to nothing is left, and roundings would decide.
    longest_s = min(scenario.work.days * DAY_S, 10 * durable_mtbf_s(scenario))
    most = max(int(longest_s / step_s), least)

    def lost(steps: int) -> float:
        return -closed_form(with_interval(scenario, steps * step_s)).running

    return _lowest(lost, least, most) * step_s


def _lowest(cost: Callable[[int], float], low: int, high: int) -> int:
    """Where `cost`, which falls and then rises, is lowest; where it does not rise, the highest number."""
    if cost(high) <= cost(max(high - 1, low)) and cost(high) <= cost(low):
        return high
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if cost(left) <= cost(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=cost)


def best_spares(scenario: FailureScenario) -> int:
    """The number of spares with the highest goodput by the closed form: training, over all hosts that are paid."""
    hosts, first = scenario.work.hosts, _first_to_try(scenario)
    best, highest, without_gain = first, -1.0, 0
    for spares in range(first, _MOST_SPARES + 1):
        capacity, _ = capacity_of(with_spares(scenario, spares))
        goodput = capacity * hosts / (hosts + spares)
        if goodput > highest:
            best, highest, without_gain = spares, goodput, 0
        without_gain += 1
        # Beyond these nothing can be gained any more.
        if capacity > 1 - 1e-6 or (without_gain > 64 and highest > 0.01):
            break
    return best


def _first_to_try(scenario: FailureScenario) -> int:
    """Fewer spares than that are never enough for a job that waits for all of its hosts."""
    if scenario.pool.when_missing == "shrink":
        return 0
    away = away_ratio(scenario)
    needed = scenario.work.hosts * away / max(1 - away, 1e-9)
    if needed > _MOST_SPARES:
        cure = f"look at rates and repairs, or give a number of spares up to {_MOST_SPARES}"
        raise UserError(f"{away:.1%} of all hosts are away on average", cure=cure, field="spares", value="best")
    return max(int(needed - 8 * math.sqrt(needed + 1)) - scenario.pool.cold, 0)


def play_intervals(
    scenario: FailureScenario, intervals_s: Sequence[float], runs: int = 200, seed: int = 0
) -> list[PlayedChoice]:
    """Each interval with the same failures; `gain` is in ETTR."""
    scenarios = [(interval_s, with_interval(scenario, interval_s)) for interval_s in intervals_s]
    return _play(scenario, scenarios, runs, seed, lambda outcome: outcome.samples.ettr)


def play_spares(
    scenario: FailureScenario, numbers: Sequence[int], runs: int = 200, seed: int = 0
) -> list[PlayedChoice]:
    """Each number of spares with the same failures; `gain` is in goodput."""
    for number in numbers:
        require("spares", number, 0, _MOST_SPARES)

    def goodput(outcome: RunsOutcome) -> np.ndarray:
        work = outcome.scenario.work
        return np.asarray(outcome.samples.ettr * work.hosts / (work.hosts + outcome.scenario.pool.spares))

    return _play(scenario, [(number, with_spares(scenario, number)) for number in numbers], runs, seed, goodput)


def _play(
    scenario: FailureScenario,
    scenarios: Sequence[tuple[float, FailureScenario]],
    runs: int,
    seed: int,
    wanted: Callable[[RunsOutcome], np.ndarray],
) -> list[PlayedChoice]:
    if not scenarios:
        raise UserError("there is nothing to try", cure="give one value at least", field="values")
    drawn = max(other.all_hosts for other in (scenario, *(other for _, other in scenarios)))
    now = wanted(simulate(scenario, runs, seed, drawn))
    outcomes = [(value, simulate(other, runs, seed, drawn)) for value, other in scenarios]
    return [PlayedChoice(value, outcome, Estimate.of(wanted(outcome) - now)) for value, outcome in outcomes]
