"""Training between events: steps, checkpoints, and what is lost when ranks are gone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months.state import AGAIN, FEWER, SAVING, SLOW, TRAINING, State

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def speed(state: State, runs: Ints) -> Floats:
    """Training per second of running, over that of all hosts, healthy and without snapshots in memory."""
    shrunk = state.job_hosts[runs] / state.story.work.hosts
    ratio: Floats = state.story.checkpoints.memory_ratio * shrunk / state.slowdown[runs]
    return ratio


def train(state: State, runs: Ints, seconds: Floats) -> None:
    """Let these runs make steps for so long, with checkpoints when they are due."""
    checkpoints = state.story.checkpoints
    rate = speed(state, runs)
    stalled = np.minimum(seconds, state.stall_left_s[runs])
    is_saved = (state.stall_left_s[runs] > 0) & (stalled == state.stall_left_s[runs])
    left = seconds - stalled
    since = np.where(is_saved, 0.0, state.since_save_s[runs])
    persisting = np.where(is_saved, left, state.persisting_s[runs] + seconds)
    going = checkpoints.interval_s / rate
    period = going + checkpoints.stall_s
    # Where the run would stand in its period, had it trained at this pace all along.
    place = since / rate + left
    whole = np.where(state.stall_left_s[runs] > stalled, 0.0, np.floor(place / period))
    rest = place - whole * period
    stalling = np.maximum(rest - going, 0.0)
    running = left - whole * checkpoints.stall_s - stalling
    state.persisting_s[runs] = np.where(whole > 0, rest, persisting)
    is_waiting = stalled < state.stall_left_s[runs]
    state.since_save_s[runs] = np.where(is_waiting, since, np.minimum(rest, going) * rate)
    in_stall = np.where(stalling > 0, period - rest, 0.0)
    state.stall_left_s[runs] = np.where(is_waiting, state.stall_left_s[runs] - stalled, in_stall)
    _count(state, runs, seconds - running, np.maximum(running, 0.0))


def _count(state: State, runs: Ints, stalled: Floats, running: Floats) -> None:
    """Running time is training as far as no snapshot, slow host or missing host takes from it."""
    ratio = state.story.checkpoints.memory_ratio
    healthy = running * ratio
    as_slow = healthy / state.slowdown[runs]
    useful = as_slow * (state.job_hosts[runs] / state.story.work.hosts)
    parts = state.parts_s
    parts[runs, SAVING] += stalled + running - healthy
    parts[runs, SLOW] += healthy - as_slow
    parts[runs, FEWER] += as_slow - useful
    parts[runs, TRAINING] += useful


def until_done(state: State, runs: Ints) -> Floats:
    """Seconds until all the work is done, if nothing happens."""
    checkpoints = state.story.checkpoints
    left = np.maximum(state.story.work.goal_s - state.parts_s[runs, TRAINING], 0.0)
    is_stalled = state.stall_left_s[runs] > 0
    since = np.where(is_stalled, 0.0, state.since_save_s[runs])
    stalls = np.ceil(np.maximum(left - (checkpoints.interval_s - since), 0.0) / checkpoints.interval_s)
    seconds: Floats = state.stall_left_s[runs] + left / speed(state, runs) + stalls * checkpoints.stall_s
    return seconds


def lose(state: State, runs: Ints, survives: Flags) -> None:
    """Go back to the newest snapshot in memory, where it survives, else to the newest durable checkpoint."""
    checkpoints = state.story.checkpoints
    since = state.since_save_s[runs]
    has_memory = survives & (checkpoints.memory_interval_s > 0)
    kept = np.where(has_memory, _kept_in_memory(since, checkpoints.memory_interval_s), 0.0)
    is_persisting = state.persisting_s[runs] < checkpoints.persist_s
    older = np.where(is_persisting & ~has_memory, checkpoints.interval_s, 0.0)
    lost = np.minimum(since - kept + older, state.parts_s[runs, TRAINING])
    state.parts_s[runs, TRAINING] -= lost
    state.parts_s[runs, AGAIN] += lost
    state.since_save_s[runs] = kept
    state.stall_left_s[runs] = 0.0
    state.persisting_s[runs] = np.where(has_memory, state.persisting_s[runs], np.inf)


def _kept_in_memory(since: Floats, interval_s: float) -> Floats:
    return np.floor(since / interval_s * (1 + 1e-12)) * interval_s if interval_s else np.zeros_like(since)


def save(state: State, runs: Ints) -> None:
    """All that was done is safe; the time that it takes is the caller's to say."""
    state.since_save_s[runs] = 0.0
    state.stall_left_s[runs] = 0.0
    state.persisting_s[runs] = np.inf
