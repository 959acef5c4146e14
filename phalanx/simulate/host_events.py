"""What events do to simulated runs: failures, repairs, spares, restarts, and training in between.

`apply_failures` takes failures from the history, `apply_due_slots` what comes due at a time; hosts leave and come back,
the job starts again with what there is; `train` moves steps and checkpoints on, `lose` takes back what a failure costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.run_state import (
    AGAIN,
    AWAY,
    COLD,
    COMING,
    FAILED,
    FEWER,
    FOUND,
    JOB,
    LEMONS,
    LOST,
    OUT,
    PLANNED_STOP,
    RECOVER,
    RESIZED,
    RESTARTED,
    RUN,
    SAVING,
    SLOW,
    SPARE,
    STOPS,
    TRAINING,
    UNSEEN,
    WAIT,
    WANTED,
    History,
    RunState,
)

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


def apply_failures(state: RunState, history: History, runs: Ints, columns: Ints) -> None:
    """Each run has its next event of the history."""
    hits = Hits(history, runs, columns)
    is_planned = hits.hosts == PLANNED_STOP
    if is_planned.any():
        planned = hits.where(is_planned & (state.phase[runs] == RUN))  # else it is done while the job stands still
        stop_gently(state, planned.runs, planned.repairs_s)
        state.count(STOPS, planned.runs)
        begin(state, planned.runs)
        hits = hits.where(~is_planned)
    # A recorded year may have more hosts than the job and its spares; lemons that were replaced fail no more.
    hits = hits.where(hits.hosts < state.scenario.all_hosts)
    hits = hits.where(~(history.is_extra[hits.runs, hits.columns] & state.is_cured[hits.runs, hits.hosts]))
    places = state.host_groups.where[hits.runs, hits.hosts]
    # Where the host is now decides what its failure does. All runs are looked at together, one kind after the other.
    is_away, in_job = places == AWAY, places == JOB
    stops = state.classes.stops[hits.classes]
    cases = ((in_job & stops, _stopped), (in_job & ~stops, _unseen), (is_away, _away), (~in_job & ~is_away, _idle))
    for chosen, do in cases:
        if chosen.any():
            do(state, hits.where(chosen))


def _until(state: RunState, hits: Hits) -> Floats:
    return state.now_s[hits.runs] + hits.repairs_s


def _idle(state: RunState, hits: Hits) -> None:
    luck = hits.history.luck[hits.runs, hits.columns]
    hits = hits.where((luck < state.scenario.failures.idle_ratio) & (hits.repairs_s > 0))
    leave(state, hits.runs, hits.hosts)
    state.count(LOST, hits.runs)
    go_out(state, hits.runs, hits.hosts, _until(state, hits))


def _away(state: RunState, hits: Hits) -> None:
    """Failures of a trace add up; a host that is coming does not come."""
    found, columns = state.slots.find(hits.runs, hits.hosts)
    assert found.all()
    is_coming = state.slots.kinds[hits.runs, columns] == COMING
    counts = (is_coming | hits.history.is_fixed) & (hits.repairs_s > 0)
    state.coming[hits.runs[counts & is_coming]] -= 1
    hits, columns = hits.where(counts), columns[counts]
    until_s = np.where(is_coming[counts], 0.0, state.slots.at_s[hits.runs, columns])
    go_out(state, hits.runs, hits.hosts, np.maximum(until_s, _until(state, hits)))


def _stopped(state: RunState, hits: Hits) -> None:
    runs, survives = hits.runs, state.classes.survives[hits.classes]
    state.count(FAILED, runs)
    repairs_s = _with_lemons(state, hits)
    was_waiting = state.phase[runs] == WAIT
    lose(state, runs[was_waiting], survives[was_waiting])
    detection_s = state.classes.detection_s[hits.classes] * hits.stretch
    stands = runs[~was_waiting]
    stop_hard(state, stands, detection_s[~was_waiting], hits.stretch[~was_waiting], survives[~was_waiting])
    leaves = repairs_s > 0
    gone, who = runs[leaves], hits.hosts[leaves]
    leave(state, gone, who)
    state.count(LOST, gone)
    # Where failures add up, a host is not good again before the last is over.
    ends_s = state.now_s[hits.runs] + repairs_s
    if hits.history.is_fixed:
        found, columns = state.slots.find(hits.runs, hits.hosts)
        earlier_s = state.slots.end_s[hits.runs, columns]
        ends_s = np.where(found & np.isfinite(earlier_s), np.maximum(ends_s, earlier_s), ends_s)
    go_out(state, gone, who, ends_s[leaves])
    begin_or_wait(state, stands)


def _with_lemons(state: RunState, hits: Hits) -> Floats:
    """How long the hosts are away: one that has failed too often for good, until another stands in for it."""
    failures = state.scenario.failures
    if not failures.evict_after:
        return hits.repairs_s
    fails = state.fails[hits.runs, hits.hosts] + 1
    is_lemon = fails >= failures.evict_after
    state.fails[hits.runs, hits.hosts] = np.where(is_lemon, 0, fails)
    state.is_cured[hits.runs[is_lemon], hits.hosts[is_lemon]] = True
    state.count(LEMONS, hits.runs[is_lemon])
    return np.where(is_lemon, failures.replace_s, hits.repairs_s)


def _unseen(state: RunState, hits: Hits) -> None:
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
    refresh_speed(state, runs)


def apply_due_slots(state: RunState, runs: Ints, columns: Ints) -> None:
    """Each run has a slot whose time has come."""
    kinds = state.slots.kinds[runs, columns]
    is_over = state.slots.end_s[runs, columns] <= state.now_s[runs]
    is_bad = (kinds == UNSEEN) | (kinds == WANTED)
    state.count(FOUND, runs[(kinds == UNSEEN) & ~is_over & (state.slots.slowdown[runs, columns] > 1)])
    for chosen, do in (
        (kinds == OUT, repaired),
        (kinds == COMING, arrived),
        (is_bad & is_over, good_again),
        (is_bad & ~is_over, replace_found),
    ):
        if chosen.any():
            do(state, runs[chosen], columns[chosen])


def allowed(state: RunState, hosts: Ints) -> Ints:
    """The largest number of hosts that the job may run on with so many; 0: none."""
    work, pool = state.scenario.work, state.scenario.pool
    if pool.when_missing == "wait":
        return np.where(hosts >= work.hosts, work.hosts, 0)
    missing = -(-np.maximum(work.hosts - hosts, 0) // pool.shrink_by) * pool.shrink_by
    return np.where(work.hosts - missing >= state.scenario.smallest_hosts, work.hosts - missing, 0)


def is_complete(state: RunState, runs: Ints) -> Flags:
    """Whether the job can start on just the hosts that it has, without having shrunk further."""
    now = state.job_hosts[runs]
    complete: Flags = (now > 0) & (now >= state.size[runs]) & (allowed(state, now) == now)
    return complete


def fill(state: RunState, runs: Ints) -> None:
    """Take spares into the job, as many as there are and as it can use."""
    runs = runs[(state.spares[runs] > 0) & (state.job_hosts[runs] < state.scenario.work.hosts)]
    if not len(runs):
        return
    goal = np.zeros_like(state.coming)
    available = state.job_hosts[runs] + state.spares[runs]
    waits = state.scenario.pool.when_missing == "wait"
    goal[runs] = np.minimum(available, state.scenario.work.hosts) if waits else allowed(state, available)
    runs = runs[state.job_hosts[runs] < goal[runs]]
    while len(runs):
        state.host_groups.put(JOB, runs, state.host_groups.take(SPARE, runs))
        runs = runs[state.job_hosts[runs] < goal[runs]]


def ask(state: RunState, runs: Ints) -> None:
    """Ask for cold hosts: as many as are missing in the job and beside it, and one for each that should leave."""
    runs = runs[state.host_groups.counts[COLD, runs] > 0]
    while len(runs):
        leaving = (state.slots.kinds[runs] == WANTED).sum(axis=1)
        wanted = state.scenario.work.hosts + state.scenario.pool.spares + leaving
        missing = wanted - state.job_hosts[runs] - state.spares[runs] - state.coming[runs]
        runs = runs[missing > 0]
        if len(runs):
            ready_s = state.now_s[runs] + state.scenario.pool.provision_s
            state.slots.put(COMING, runs, state.host_groups.take(COLD, runs), ready_s)
            state.coming[runs] += 1
        runs = runs[state.host_groups.counts[COLD, runs] > 0]


def go_out(state: RunState, runs: Ints, hosts: Ints, until_s: Floats) -> None:
    """Hosts that are in no group are repaired until then."""
    if not len(runs):
        return
    has_slot, columns = state.slots.find(runs, hosts)
    state.slots.set(OUT, runs[has_slot], columns[has_slot], until_s[has_slot])
    state.slots.put(OUT, runs[~has_slot], hosts[~has_slot], until_s[~has_slot])
    out = (state.slots.kinds[runs] == OUT).sum(axis=1)
    state.most_out[runs] = np.maximum(state.most_out[runs], out)
    refresh_speed(state, runs)
    ask(state, runs)


def refresh_speed(state: RunState, runs: Ints) -> None:
    """The job is as slow as its slowest host."""
    state.slowdown[runs] = state.slots.slowdown[runs].max(axis=1)


def repaired(state: RunState, runs: Ints, columns: Ints) -> None:
    """Hosts are good again, and are asked for if they are wanted."""
    hosts = state.slots.hosts[runs, columns]
    state.slots.clear(runs, columns)
    state.host_groups.put(COLD, runs, hosts)
    ask(state, runs)


def arrived(state: RunState, runs: Ints, columns: Ints) -> None:
    """Hosts are ready."""
    hosts = state.slots.hosts[runs, columns]
    state.slots.clear(runs, columns)
    state.coming[runs] -= 1
    state.host_groups.put(SPARE, runs, hosts)
    use_spares(state, runs)


def use_spares(state: RunState, runs: Ints) -> None:
    """There may be spares that the job needs: missing hosts, or ones for hosts that should leave."""
    runs = runs[state.spares[runs] > 0]
    if not len(runs):
        return
    lacks = state.job_hosts[runs] < state.scenario.work.hosts
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


def stop_gently(state: RunState, runs: Ints, planned_s: Floats) -> None:
    """Stop the job where it can wait for that, save first if it does so, then stand still for `planned_s`."""
    now_s, recovery = state.now_s[runs], state.scenario.recovery
    saving_s = np.zeros(len(runs))
    if recovery.saves_first:
        save(state, runs)
        saving_s += state.scenario.checkpoints.stall_s
    else:
        lose(state, runs, np.ones(len(runs), dtype=bool))
    state.segments_s[runs] = (now_s + saving_s)[:, None]
    state.segments_s[runs, 1:] += planned_s[:, None]
    _start_takes(state, runs, np.ones(len(runs)), np.ones(len(runs), dtype=bool))
    state.phase[runs] = RECOVER


def stop_hard(state: RunState, runs: Ints, detection_s: Floats, stretch: Floats, survives: Flags) -> None:
    """Ranks are gone: what was not saved is lost. It takes so long until that is noticed."""
    lose(state, runs, survives)
    now_s = state.now_s[runs]
    segments = state.segments_s[runs]
    segments[:, :2] = np.maximum(np.where((state.phase[runs] == RUN)[:, None], 0, segments[:, :2]), now_s[:, None])
    segments[:, 2] = np.maximum(segments[:, 1], now_s + detection_s)
    state.segments_s[runs] = segments
    _start_takes(state, runs, stretch, survives)
    state.phase[runs] = RECOVER


def _start_takes(state: RunState, runs: Ints, stretch: Floats, survives: Flags) -> None:
    recovery = state.scenario.recovery
    from_memory = survives & (state.scenario.checkpoints.memory_interval_s > 0)
    load_s = np.where(from_memory, recovery.memory_load_s, recovery.load_s)
    state.queue_s[runs] = recovery.queue_s * stretch
    state.start_s[runs] = (recovery.restart_s + load_s) * stretch


def begin(state: RunState, runs: Ints) -> None:
    """Start the job on the hosts that it has, when what comes before is over."""
    if not len(runs):
        return
    segments = state.segments_s[runs]
    segments[:, 2] = np.maximum(segments[:, 2], state.now_s[runs])
    segments[:, 3] = segments[:, 2] + state.queue_s[runs]
    segments[:, 4] = segments[:, 3] + state.start_s[runs]
    # Waiting for hosts lies between what was done before it and the queue; see `RunState.account`.
    state.segments_s[runs] = segments
    state.ready_s[runs] = segments[:, 4]
    state.phase[runs] = RECOVER
    state.count(RESTARTED, runs)
    state.count(RESIZED, runs[state.size[runs] != state.job_hosts[runs]])
    state.size[runs] = state.job_hosts[runs]


def begin_or_wait(state: RunState, runs: Ints) -> None:
    """Fill the job from the spares and start it, or wait for hosts."""
    fill(state, runs)
    complete = is_complete(state, runs)
    begin(state, runs[complete])
    waiting = runs[~complete]
    if not len(waiting):
        return
    state.phase[waiting] = WAIT
    pool = state.scenario.pool
    patience_s = pool.patience_s if pool.when_missing == "shrink" else np.inf
    state.ready_s[waiting] = np.maximum(state.segments_s[waiting, 2], state.now_s[waiting] + patience_s)


def shrink(state: RunState, runs: Ints) -> None:
    """Nobody came: start with as many hosts as are allowed, or go on waiting."""
    state.ready_s[runs] = np.inf
    goal = np.zeros_like(state.coming)
    goal[runs] = allowed(state, state.job_hosts[runs] + state.spares[runs])
    state.size[runs[goal[runs] == 0]] = 0  # it starts as soon as it can with any
    runs = runs[goal[runs] > 0]
    surplus = runs[state.job_hosts[runs] > goal[runs]]
    while len(surplus):
        state.host_groups.put(SPARE, surplus, state.host_groups.take(JOB, surplus))
        surplus = surplus[state.job_hosts[surplus] > goal[surplus]]
    fill(state, runs)
    begin(state, runs)


def leave(state: RunState, runs: Ints, hosts: Ints) -> None:
    """Hosts are in no group any more, whichever they were in."""
    for group in (JOB, SPARE, COLD):
        ours = state.host_groups.where[runs, hosts] == group
        if ours.any():
            state.host_groups.remove(group, runs[ours], hosts[ours])


def replace_found(state: RunState, runs: Ints, columns: Ints) -> None:
    """A host that should leave was found, or another is there for it now; else it stays until one is."""
    hosts = state.slots.hosts[runs, columns]
    in_job = state.host_groups.where[runs, hosts] == JOB
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


def good_again(state: RunState, runs: Ints, columns: Ints) -> None:
    """Hosts that were never taken out got well by themselves."""
    state.slots.clear(runs, columns)
    refresh_speed(state, runs)


def speed(state: RunState, runs: Ints) -> Floats:
    """Training per second of running, over that of all hosts, healthy and without snapshots in memory."""
    shrunk = state.job_hosts[runs] / state.scenario.work.hosts
    ratio: Floats = state.scenario.checkpoints.memory_ratio * shrunk / state.slowdown[runs]
    return ratio


def train(state: RunState, runs: Ints, seconds: Floats) -> None:
    """Let these runs make steps for so long, with checkpoints when they are due."""
    checkpoints = state.scenario.checkpoints
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


def _count(state: RunState, runs: Ints, stalled: Floats, running: Floats) -> None:
    """Running time is training as far as no snapshot, slow host or missing host takes from it."""
    ratio = state.scenario.checkpoints.memory_ratio
    healthy = running * ratio
    as_slow = healthy / state.slowdown[runs]
    useful = as_slow * (state.job_hosts[runs] / state.scenario.work.hosts)
    parts = state.parts_s
    parts[runs, SAVING] += stalled + running - healthy
    parts[runs, SLOW] += healthy - as_slow
    parts[runs, FEWER] += as_slow - useful
    parts[runs, TRAINING] += useful


def until_done(state: RunState, runs: Ints) -> Floats:
    """Seconds until all the work is done, if nothing happens."""
    checkpoints = state.scenario.checkpoints
    left = np.maximum(state.scenario.work.goal_s - state.parts_s[runs, TRAINING], 0.0)
    is_stalled = state.stall_left_s[runs] > 0
    since = np.where(is_stalled, 0.0, state.since_save_s[runs])
    stalls = np.ceil(np.maximum(left - (checkpoints.interval_s - since), 0.0) / checkpoints.interval_s)
    seconds: Floats = state.stall_left_s[runs] + left / speed(state, runs) + stalls * checkpoints.stall_s
    return seconds


def lose(state: RunState, runs: Ints, survives: Flags) -> None:
    """Go back to the newest snapshot in memory, where it survives, else to the newest durable checkpoint."""
    checkpoints = state.scenario.checkpoints
    since = state.since_save_s[runs]
    has_memory = survives & (checkpoints.memory_interval_s > 0)
    kept = np.zeros_like(since)
    if every_s := checkpoints.memory_interval_s:
        kept = np.where(has_memory, np.floor(since / every_s * (1 + 1e-12)) * every_s, 0.0)
    is_persisting = state.persisting_s[runs] < checkpoints.persist_s
    older = np.where(is_persisting & ~has_memory, checkpoints.interval_s, 0.0)
    lost = np.minimum(since - kept + older, state.parts_s[runs, TRAINING])
    state.parts_s[runs, TRAINING] -= lost
    state.parts_s[runs, AGAIN] += lost
    state.since_save_s[runs] = kept
    state.stall_left_s[runs] = 0.0
    state.persisting_s[runs] = np.where(has_memory, state.persisting_s[runs], np.inf)


def save(state: RunState, runs: Ints) -> None:
    """All that was done is safe; the time that it takes is the caller's to say."""
    state.since_save_s[runs] = 0.0
    state.stall_left_s[runs] = 0.0
    state.persisting_s[runs] = np.inf
