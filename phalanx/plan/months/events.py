"""What failures, and slots whose time has come, do to runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months import hosts, training
from phalanx.plan.months.history import PLANNED, History
from phalanx.plan.months.shelves import AWAY, COMING, JOB, OUT, UNSEEN, WANTED
from phalanx.plan.months.state import FAILED, FOUND, LEMONS, LOST, RUN, STOPS, WAIT, State

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Hits:
    """One event of a history in each of `runs`, which can be narrowed down."""

    def __init__(self, history: History, runs: Ints, columns: Ints) -> None:
        self.history, self.runs, self.columns = history, runs, columns
        self.hosts = history.hosts[runs, columns]
        self.classes = history.classes[runs, columns]
        self.repairs_s = history.repairs_s[runs, columns]

    def where(self, chosen: Flags) -> Hits:
        """Only these."""
        return Hits(self.history, self.runs[chosen], self.columns[chosen])

    @property
    def stretch(self) -> Floats:
        """How long this recovery takes, over the usual."""
        return self.history.stretch[self.runs, self.columns]


def happen(state: State, history: History, runs: Ints, columns: Ints) -> None:
    """Each run has its next event of the history."""
    hits = Hits(history, runs, columns)
    is_planned = hits.hosts == PLANNED
    hits = _each(state, hits, is_planned, _planned)
    hits = hits.where(hits.hosts < state.story.all_hosts)
    hits = hits.where(~(history.is_extra[hits.runs, hits.columns] & state.is_cured[hits.runs, hits.hosts]))
    places = state.shelves.where[hits.runs, hits.hosts]
    is_away, in_job = places == AWAY, places == JOB
    _each(state, hits, in_job & state.classes.stops[hits.classes], _stopped)
    _each(state, hits, in_job & ~state.classes.stops[hits.classes], _unseen)
    _each(state, hits, is_away, _away)
    _each(state, hits, ~in_job & ~is_away, _idle)


def _each(state: State, hits: Hits, chosen: Flags, do: Callable[[State, Hits], None]) -> Hits:
    """Do this with the chosen ones, if there are any; the others."""
    if chosen.any():
        do(state, hits.where(chosen))
        return hits.where(~chosen)
    return hits


def _planned(state: State, hits: Hits) -> None:
    """Planned work is done while the job stands still anyway, if it does."""
    hits = hits.where(state.phase[hits.runs] == RUN)
    hosts.stop_gently(state, hits.runs, hits.repairs_s)
    state.count(STOPS, hits.runs)
    hosts.begin(state, hits.runs)


def _until(state: State, hits: Hits) -> Floats:
    return state.now_s[hits.runs] + hits.repairs_s


def _idle(state: State, hits: Hits) -> None:
    luck = hits.history.luck[hits.runs, hits.columns]
    hits = hits.where((luck < state.story.failures.idle_ratio) & (hits.repairs_s > 0))
    hosts.leave(state, hits.runs, hits.hosts)
    state.count(LOST, hits.runs)
    hosts.go_out(state, hits.runs, hits.hosts, _until(state, hits))


def _away(state: State, hits: Hits) -> None:
    """Failures of a trace add up; a host that is coming does not come."""
    found, columns = state.slots.find(hits.runs, hits.hosts)
    assert found.all()
    is_coming = state.slots.kinds[hits.runs, columns] == COMING
    counts = (is_coming | hits.history.is_fixed) & (hits.repairs_s > 0)
    state.coming[hits.runs[counts & is_coming]] -= 1
    hits, columns = hits.where(counts), columns[counts]
    until_s = np.where(is_coming[counts], 0.0, state.slots.at_s[hits.runs, columns])
    hosts.go_out(state, hits.runs, hits.hosts, np.maximum(until_s, _until(state, hits)))


def _stopped(state: State, hits: Hits) -> None:
    runs, survives = hits.runs, state.classes.survives[hits.classes]
    state.count(FAILED, runs)
    repairs_s = _with_lemons(state, hits)
    was_waiting = state.phase[runs] == WAIT
    training.lose(state, runs[was_waiting], survives[was_waiting])
    detection_s = state.classes.detection_s[hits.classes] * hits.stretch
    stands = runs[~was_waiting]
    hosts.stop_hard(state, stands, detection_s[~was_waiting], hits.stretch[~was_waiting], survives[~was_waiting])
    leaves = repairs_s > 0
    gone, who = runs[leaves], hits.hosts[leaves]
    hosts.leave(state, gone, who)
    state.count(LOST, gone)
    hosts.go_out(state, gone, who, _end_of(state, hits, repairs_s)[leaves])
    hosts.begin_or_wait(state, stands)


def _end_of(state: State, hits: Hits, repairs_s: Floats) -> Floats:
    """When these hosts are good again; where failures add up, not before the last is over."""
    ends_s = state.now_s[hits.runs] + repairs_s
    if hits.history.is_fixed:
        found, columns = state.slots.find(hits.runs, hits.hosts)
        earlier_s = state.slots.end_s[hits.runs, columns]
        ends_s = np.where(found & np.isfinite(earlier_s), np.maximum(ends_s, earlier_s), ends_s)
    return ends_s


def _with_lemons(state: State, hits: Hits) -> Floats:
    """How long the hosts are away: one that has failed too often for good, until another stands in for it."""
    failures = state.story.failures
    if not failures.evict_after:
        return hits.repairs_s
    fails = state.fails[hits.runs, hits.hosts] + 1
    is_lemon = fails >= failures.evict_after
    state.fails[hits.runs, hits.hosts] = np.where(is_lemon, 0, fails)
    state.is_cured[hits.runs[is_lemon], hits.hosts[is_lemon]] = True
    state.count(LEMONS, hits.runs[is_lemon])
    return np.where(is_lemon, failures.replace_s, hits.repairs_s)


def _unseen(state: State, hits: Hits) -> None:
    """The job goes on, slower or not, until the host is found; one that is known to be bad gets no second record."""
    found, columns = state.slots.find(hits.runs, hits.hosts)
    if hits.history.is_fixed:
        again, slot = hits.where(found), columns[found]
        state.slots.end_s[again.runs, slot] = np.maximum(state.slots.end_s[again.runs, slot], _until(state, again))
    hits = hits.where(~found)
    runs = hits.runs
    found_s = state.now_s[runs] + state.classes.detection_s[hits.classes] * hits.stretch
    end_s = _until(state, hits) if hits.history.is_fixed else np.full(len(runs), np.inf)
    columns = state.slots.put(UNSEEN, runs, hits.hosts, np.minimum(found_s, end_s))
    state.slots.end_s[runs, columns] = end_s
    state.slots.length_s[runs, columns] = hits.repairs_s
    state.slots.slowdown[runs, columns] = state.classes.slowdown[hits.classes]
    hosts.refresh_speed(state, runs)


def come_due(state: State, runs: Ints, columns: Ints) -> None:
    """Each run has a slot whose time has come."""
    kinds = state.slots.kinds[runs, columns]
    is_over = state.slots.end_s[runs, columns] <= state.now_s[runs]
    is_bad = (kinds == UNSEEN) | (kinds == WANTED)
    state.count(FOUND, runs[(kinds == UNSEEN) & ~is_over & (state.slots.slowdown[runs, columns] > 1)])
    for chosen, do in (
        (kinds == OUT, hosts.repaired),
        (kinds == COMING, hosts.arrived),
        (is_bad & is_over, hosts.good_again),
        (is_bad & ~is_over, hosts.replace_found),
    ):
        if chosen.any():
            do(state, runs[chosen], columns[chosen])
