"""Time goes on in all runs at once: each has its own clock, and in every round its own next event."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months import events, hosts, training
from phalanx.plan.months.history import History
from phalanx.plan.months.state import DONE, RECOVER, RUN, WAIT, State

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FINISH, _SLOT, _READY, _FAILURE, _END = range(5)


def play(state: State, history: History, until_s: float) -> None:
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
        kinds = times_s.argmin(axis=0)
        _pass(state, runs, times_s[kinds, np.arange(len(runs))])
        runs = _do(state, history, runs, columns, kinds, cursor)


def _finish(state: State, runs: Ints) -> Floats:
    """When the work will be done if nothing happens; where no steps are made, never."""
    if not np.isfinite(state.story.work.goal_s):
        return np.full(len(runs), np.inf)
    ends_s = np.full(len(runs), np.inf)
    is_running = state.phase[runs] == RUN
    running = runs[is_running]
    ends_s[is_running] = state.now_s[running] + training.until_done(state, running)
    return ends_s


def _pass(state: State, runs: Ints, until_s: Floats) -> None:
    until_s = np.maximum(until_s, state.now_s[runs])
    is_running = state.phase[runs] == RUN
    running = runs[is_running]
    training.train(state, running, until_s[is_running] - state.now_s[running])
    state.account(runs[~is_running], until_s[~is_running])
    state.now_s[runs] = until_s


def _do(state: State, history: History, runs: Ints, columns: Ints, kinds: Ints, cursor: Ints) -> Ints:
    """What is due in each run; those that go on."""
    due = runs[kinds == _SLOT]
    if len(due):
        events.come_due(state, due, columns[kinds == _SLOT])
    _ready(state, runs[kinds == _READY])
    failing = runs[kinds == _FAILURE]
    if len(failing):
        cursor[failing] += 1
        events.happen(state, history, failing, cursor[failing] - 1)
    state.phase[runs[kinds == _FINISH]] = DONE
    going: Ints = runs[(kinds != _FINISH) & (kinds != _END)]
    return going


def _ready(state: State, runs: Ints) -> None:
    """What was waited for is over: patience, or a restart."""
    if not len(runs):
        return
    waited = state.phase[runs] == WAIT
    if waited.any():
        hosts.shrink(state, runs[waited])
    starting = runs[~waited]
    assert (state.phase[starting] == RECOVER).all()
    state.phase[starting] = RUN
    state.ready_s[starting] = np.inf
    hosts.use_spares(state, starting)
