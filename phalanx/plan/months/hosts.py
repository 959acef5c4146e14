"""Hosts that come and go, and starts of the job: with what there is, in each of these runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months import training
from phalanx.plan.months.shelves import COLD, COMING, JOB, OUT, SPARE, WANTED
from phalanx.plan.months.state import RECOVER, RESIZED, RESTARTED, RUN, WAIT, State

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def allowed(state: State, hosts: Ints) -> Ints:
    """The largest number of hosts that the job may run on with so many; 0: none."""
    work, pool = state.story.work, state.story.pool
    if pool.when_missing == "wait":
        return np.where(hosts >= work.hosts, work.hosts, 0)
    missing = -(-np.maximum(work.hosts - hosts, 0) // pool.shrink_by) * pool.shrink_by
    return np.where(work.hosts - missing >= state.story.smallest_hosts, work.hosts - missing, 0)


def is_complete(state: State, runs: Ints) -> Flags:
    """Whether the job can start on just the hosts that it has, without having shrunk further."""
    now = state.job_hosts[runs]
    complete: Flags = (now > 0) & (now >= state.size[runs]) & (allowed(state, now) == now)
    return complete


def fill(state: State, runs: Ints) -> None:
    """Take spares into the job, as many as there are and as it can use."""
    runs = runs[(state.spares[runs] > 0) & (state.job_hosts[runs] < state.story.work.hosts)]
    if not len(runs):
        return
    goal = np.zeros_like(state.coming)
    available = state.job_hosts[runs] + state.spares[runs]
    waits = state.story.pool.when_missing == "wait"
    goal[runs] = np.minimum(available, state.story.work.hosts) if waits else allowed(state, available)
    runs = runs[state.job_hosts[runs] < goal[runs]]
    while len(runs):
        state.shelves.put(JOB, runs, state.shelves.take(SPARE, runs))
        runs = runs[state.job_hosts[runs] < goal[runs]]


def ask(state: State, runs: Ints) -> None:
    """Ask for cold hosts: as many as are missing in the job and beside it, and one for each that should leave."""
    runs = runs[state.shelves.counts[COLD, runs] > 0]
    while len(runs):
        leaving = (state.slots.kinds[runs] == WANTED).sum(axis=1)
        wanted = state.story.work.hosts + state.story.pool.spares + leaving
        missing = wanted - state.job_hosts[runs] - state.spares[runs] - state.coming[runs]
        runs = runs[missing > 0]
        if len(runs):
            _come(state, runs, state.shelves.take(COLD, runs))
        runs = runs[state.shelves.counts[COLD, runs] > 0]


def _come(state: State, runs: Ints, hosts: Ints) -> None:
    state.slots.put(COMING, runs, hosts, state.now_s[runs] + state.story.pool.provision_s)
    state.coming[runs] += 1


def go_out(state: State, runs: Ints, hosts: Ints, until_s: Floats) -> None:
    """Hosts that are on no shelf are repaired until then."""
    if not len(runs):
        return
    has_slot, columns = state.slots.find(runs, hosts)
    state.slots.set(OUT, runs[has_slot], columns[has_slot], until_s[has_slot])
    state.slots.put(OUT, runs[~has_slot], hosts[~has_slot], until_s[~has_slot])
    out = (state.slots.kinds[runs] == OUT).sum(axis=1)
    state.most_out[runs] = np.maximum(state.most_out[runs], out)
    refresh_speed(state, runs)
    ask(state, runs)


def refresh_speed(state: State, runs: Ints) -> None:
    """The job is as slow as its slowest host."""
    state.slowdown[runs] = state.slots.slowdown[runs].max(axis=1)


def repaired(state: State, runs: Ints, columns: Ints) -> None:
    """Hosts are good again, and are asked for if they are wanted."""
    hosts = state.slots.hosts[runs, columns]
    state.slots.clear(runs, columns)
    state.shelves.put(COLD, runs, hosts)
    ask(state, runs)


def arrived(state: State, runs: Ints, columns: Ints) -> None:
    """Hosts are ready."""
    hosts = state.slots.hosts[runs, columns]
    state.slots.clear(runs, columns)
    state.coming[runs] -= 1
    state.shelves.put(SPARE, runs, hosts)
    use_spares(state, runs)


def use_spares(state: State, runs: Ints) -> None:
    """There may be spares that the job needs: missing hosts, or ones for hosts that should leave."""
    runs = runs[state.spares[runs] > 0]
    if not len(runs):
        return
    lacks = state.job_hosts[runs] < state.story.work.hosts
    before = state.job_hosts[runs]
    is_running = state.phase[runs] == RUN
    fill(state, runs[lacks & ~is_running])
    waiting = runs[state.phase[runs] == WAIT]
    begin(state, waiting[is_complete(state, waiting)])
    can_grow = lacks & (allowed(state, before + state.spares[runs]) > before)
    grows = runs[is_running & can_grow]
    if len(grows):
        stop_gently(state, grows, np.zeros(len(grows)))
        fill(state, grows)
        begin(state, grows)
    others = runs[is_running & ~can_grow]
    is_wanted, columns = state.slots.first(WANTED, others)
    state.slots.at_s[others[is_wanted], columns[is_wanted]] = state.now_s[others[is_wanted]]


def stop_gently(state: State, runs: Ints, planned_s: Floats) -> None:
    """Stop the job where it can wait for that, save first if it does so, then stand still for `planned_s`."""
    now_s, recovery = state.now_s[runs], state.story.recovery
    saving_s = np.zeros(len(runs))
    if recovery.saves_first:
        training.save(state, runs)
        saving_s += state.story.checkpoints.stall_s
    else:
        training.lose(state, runs, np.ones(len(runs), dtype=bool))
    state.segments_s[runs] = (now_s + saving_s)[:, None]
    state.segments_s[runs, 1:] += planned_s[:, None]
    _start_takes(state, runs, np.ones(len(runs)), np.ones(len(runs), dtype=bool))
    state.phase[runs] = RECOVER


def stop_hard(state: State, runs: Ints, detection_s: Floats, stretch: Floats, survives: Flags) -> None:
    """Ranks are gone: what was not saved is lost. It takes so long until that is noticed."""
    training.lose(state, runs, survives)
    now_s = state.now_s[runs]
    segments = state.segments_s[runs]
    segments[:, :2] = np.maximum(np.where((state.phase[runs] == RUN)[:, None], 0, segments[:, :2]), now_s[:, None])
    segments[:, 2] = np.maximum(segments[:, 1], now_s + detection_s)
    state.segments_s[runs] = segments
    _start_takes(state, runs, stretch, survives)
    state.phase[runs] = RECOVER


def _start_takes(state: State, runs: Ints, stretch: Floats, survives: Flags) -> None:
    recovery = state.story.recovery
    from_memory = survives & (state.story.checkpoints.memory_interval_s > 0)
    load_s = np.where(from_memory, recovery.memory_load_s, recovery.load_s)
    state.queue_s[runs] = recovery.queue_s * stretch
    state.start_s[runs] = (recovery.restart_s + load_s) * stretch


def begin(state: State, runs: Ints) -> None:
    """Start the job on the hosts that it has, when what comes before is over."""
    if not len(runs):
        return
    segments = state.segments_s[runs]
    segments[:, 2] = np.maximum(segments[:, 2], state.now_s[runs])
    segments[:, 3] = segments[:, 2] + state.queue_s[runs]
    segments[:, 4] = segments[:, 3] + state.start_s[runs]
    # Waiting for hosts lies between what was done before it and the queue; see `State.account`.
    state.segments_s[runs] = segments
    state.ready_s[runs] = segments[:, 4]
    state.phase[runs] = RECOVER
    state.count(RESTARTED, runs)
    state.count(RESIZED, runs[state.size[runs] != state.job_hosts[runs]])
    state.size[runs] = state.job_hosts[runs]


def begin_or_wait(state: State, runs: Ints) -> None:
    """Fill the job from the spares and start it, or wait for hosts."""
    fill(state, runs)
    complete = is_complete(state, runs)
    begin(state, runs[complete])
    waiting = runs[~complete]
    if not len(waiting):
        return
    state.phase[waiting] = WAIT
    pool = state.story.pool
    patience_s = pool.patience_s if pool.when_missing == "shrink" else np.inf
    state.ready_s[waiting] = np.maximum(state.segments_s[waiting, 2], state.now_s[waiting] + patience_s)


def shrink(state: State, runs: Ints) -> None:
    """Nobody came: start with as many hosts as are allowed, or go on waiting."""
    state.ready_s[runs] = np.inf
    goal = np.zeros_like(state.coming)
    goal[runs] = allowed(state, state.job_hosts[runs] + state.spares[runs])
    state.size[runs[goal[runs] == 0]] = 0  # it starts as soon as it can with any
    runs = runs[goal[runs] > 0]
    surplus = runs[state.job_hosts[runs] > goal[runs]]
    while len(surplus):
        state.shelves.put(SPARE, surplus, state.shelves.take(JOB, surplus))
        surplus = surplus[state.job_hosts[surplus] > goal[surplus]]
    fill(state, runs)
    begin(state, runs)


def leave(state: State, runs: Ints, hosts: Ints) -> None:
    """Hosts are on no shelf any more, whichever they were on."""
    for shelf in (JOB, SPARE, COLD):
        ours = state.shelves.where[runs, hosts] == shelf
        if ours.any():
            state.shelves.remove(shelf, runs[ours], hosts[ours])


def replace_found(state: State, runs: Ints, columns: Ints) -> None:
    """A host that should leave was found, or another is there for it now; else it stays until one is."""
    hosts = state.slots.hosts[runs, columns]
    in_job = state.shelves.where[runs, hosts] == JOB
    in_place = state.slots.length_s[runs, columns] <= 0
    can = ~in_job | in_place | (state.spares[runs] > 0)
    state.slots.kinds[runs[~can], columns[~can]] = WANTED
    state.slots.at_s[runs[~can], columns[~can]] = state.slots.end_s[runs[~can], columns[~can]]
    ask(state, runs[~can])
    runs, columns, hosts, in_job, in_place = (each[can] for each in (runs, columns, hosts, in_job, in_place))
    if not len(runs):
        return
    stops = runs[in_job & (state.phase[runs] == RUN)]
    stop_gently(state, stops, np.zeros(len(stops)))
    state.slots.clear(runs[in_place], columns[in_place])
    refresh_speed(state, runs[in_place])
    away, slot = runs[~in_place], columns[~in_place]
    until_s = np.minimum(state.slots.end_s[away, slot], state.now_s[away] + state.slots.length_s[away, slot])
    leave(state, away, hosts[~in_place])
    go_out(state, away, hosts[~in_place], until_s)
    fill(state, runs[in_job])
    begin(state, stops)


def good_again(state: State, runs: Ints, columns: Ints) -> None:
    """Hosts that were never taken out got well by themselves."""
    state.slots.clear(runs, columns)
    refresh_speed(state, runs)
