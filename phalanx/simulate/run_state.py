"""The state of all simulated runs at once, one number or one row for each, and the failures that are to come.

`RunState` holds clocks, counts and hosts. `HostGroups` holds where each host is (job, spare, cold), and `Slots` those
that come back later. Every function on them takes `runs`, the numbers of different runs, and changes one host in each.

`History` is drawn at random from rates before anything is decided. What happens to a host does not depend on what the
job does with it, so one history serves every choice of intervals and spares: differences between them are theirs, not
of luck (common random numbers). A host that is out cannot fail; one that only waits may fail less often (`luck` against
`Failures.idle_ratio`). Usual failures hit all hosts alike; lemons have more on top of these (`is_extra`), which end
when one is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.failure_model import DAY_S, Duration, FailureScenario

Flags = NDArray[np.bool_]


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RUN, RECOVER, WAIT, DONE = 0, 1, 2, 3
"""Steps are made; something is done so that they will be; hosts are missing; all steps are made, or time is over."""

PARTS = (
    "training",
    "saving",
    "made again",
    "slow hosts",
    "fewer hosts",
    "planned",
    "detection",
    "queue",
    "restart",
    "waiting for hosts",
)
"""Where the time goes; they sum to all of it. Training counts as if all hosts took part and were healthy."""
TRAINING, SAVING, AGAIN, SLOW, FEWER, PLANNED, DETECTION, QUEUE, RESTART, WAITING = range(len(PARTS))

COUNTS = ("failures", "restarts", "hosts lost", "hosts found slow", "lemons replaced", "planned stops", "resizes")
FAILED, RESTARTED, LOST, FOUND, LEMONS, STOPS, RESIZED = range(len(COUNTS))

# Ends of what is done after each other in a recovery; after the second there may be a wait for hosts.
_SEGMENTS = (SAVING, PLANNED, DETECTION, QUEUE, RESTART)


class Classes(NamedTuple):
    """Failure classes as arrays, to be indexed with numbers of classes."""

    detection_s: Floats
    stops: NDArray[np.bool_]
    slowdown: Floats
    survives: NDArray[np.bool_]


def classes_of(scenario: FailureScenario) -> Classes:
    """What the scenario says of each class."""
    recovery, classes = scenario.recovery, scenario.failures.classes
    usual = {"stops": recovery.detection_s, "slow": recovery.find_slow_s, "taken out": 0.0}
    noticed = [usual[c.effect] if c.detection_s is None else c.detection_s for c in classes]
    return Classes(
        np.array(noticed, dtype=float),
        np.array([c.effect == "stops" for c in classes], dtype=bool),
        np.array([c.slowdown if c.effect == "slow" else 1.0 for c in classes], dtype=float),
        np.array([c.survives for c in classes], dtype=bool),
    )


class RunState:
    """All runs."""

    def __init__(self, scenario: FailureScenario, runs: int) -> None:
        self.scenario = scenario
        self.classes = classes_of(scenario)
        pool = scenario.pool
        self.host_groups = HostGroups(runs, (scenario.work.hosts, pool.spares, pool.cold))
        self.slots = Slots(runs)
        self.phase = np.full(runs, RUN, dtype=np.int8)
        self.now_s = np.zeros(runs)
        self.ready_s = np.full(runs, np.inf)
        # Ends of what the present recovery does, in the order of `_SEGMENTS`.
        self.segments_s = np.zeros((runs, len(_SEGMENTS)))
        self.queue_s = np.zeros(runs)
        self.start_s = np.zeros(runs)
        self.parts_s = np.zeros((runs, len(PARTS)))  # where the time went: runs x `PARTS`
        self.counts = np.zeros((runs, len(COUNTS)), dtype=np.int64)  # what happened: runs x `COUNTS`
        self.since_save_s = np.zeros(runs)  # training since the newest durable checkpoint began to be made
        self.stall_left_s = np.zeros(runs)  # until the checkpoint that is being made lets training go on
        # Since the newest checkpoint was made, which is durable later; infinite: there is none.
        self.persisting_s = np.full(runs, np.inf)
        self.slowdown = np.ones(runs)
        # Hosts with which the job last started; 0: it could not for a while, and takes what it gets.
        self.size = np.full(runs, scenario.work.hosts, dtype=np.int64)
        self.coming = np.zeros(runs, dtype=np.int64)
        self.fails = np.zeros(self.host_groups.where.shape, dtype=np.uint8)  # stops of each host
        self.is_cured = np.zeros(self.host_groups.where.shape, dtype=bool)  # hosts that are lemons no more
        self.most_out = np.zeros(runs, dtype=np.int64)

    @property
    def job_hosts(self) -> Ints:
        """Hosts in the job, by run."""
        hosts: Ints = self.host_groups.counts[JOB]
        return hosts

    @property
    def spares(self) -> Ints:
        """Hosts that are ready beside it, by run."""
        hosts: Ints = self.host_groups.counts[SPARE]
        return hosts

    def count(self, what: int, runs: Ints) -> None:
        """One more of these."""
        self.counts[runs, what] += 1

    def account(self, runs: Ints, until_s: Floats) -> None:
        """Say where the time until then goes, in runs that make no steps."""
        from_s = self.now_s[runs]
        is_starting = self.phase[runs] == RECOVER
        for column, part in enumerate(_SEGMENTS):
            ends_s = np.clip(self.segments_s[runs, column], from_s, until_s)
            if part in (QUEUE, RESTART):
                ends_s = np.where(is_starting, ends_s, from_s)
            self.parts_s[runs, part] += ends_s - from_s
            from_s = ends_s
        self.parts_s[runs, WAITING] += until_s - from_s


JOB, SPARE, COLD, AWAY = 0, 1, 2, 3  # in the job; ready beside it; could be asked for; out, or coming


class HostGroups:
    """The hosts in the job, the spares and the cold ones; a host is in one of the groups, or away.

    Args:
        counts: hosts in each group at first; they are numbered in this order.
    """

    def __init__(self, runs: int, counts: tuple[int, int, int]) -> None:
        total = sum(counts)
        self.where = np.repeat(np.array([JOB, SPARE, COLD], dtype=np.int8), counts)[None].repeat(runs, axis=0)
        starts = np.repeat(np.cumsum((0, *counts[:2])), counts)
        self._place = (np.arange(total, dtype=np.int32) - starts.astype(np.int32))[None].repeat(runs, axis=0)
        self._items = np.zeros((3, runs, total), dtype=np.int32)
        self.counts: Ints = np.zeros((3, runs), dtype=np.int64)
        for group, count in enumerate(counts):
            first = sum(counts[:group])
            self._items[group, :, :count] = np.arange(first, first + count)
            self.counts[group] = count

    def put(self, group: int, runs: Ints, hosts: Ints) -> None:
        """Hosts that were away."""
        last = self.counts[group, runs]
        self._items[group, runs, last] = hosts
        self._place[runs, hosts] = last
        self.where[runs, hosts] = group
        self.counts[group, runs] = last + 1

    def remove(self, group: int, runs: Ints, hosts: Ints) -> None:
        """These hosts, which are in that group, are away from now on; the last one takes their place."""
        last = self.counts[group, runs] - 1
        moved = self._items[group, runs, last]
        place = self._place[runs, hosts]
        self._items[group, runs, place] = moved
        self._place[runs, moved] = place
        self.where[runs, hosts] = AWAY
        self.counts[group, runs] = last

    def take(self, group: int, runs: Ints) -> Ints:
        """The last host of a group that is not empty; it is away from now on."""
        last = self.counts[group, runs] - 1
        hosts: Ints = self._items[group, runs, last].astype(np.int64)
        self.where[runs, hosts] = AWAY
        self.counts[group, runs] = last
        return hosts


FREE, OUT, COMING, UNSEEN, WANTED = 0, 1, 2, 3, 4
"""A slot is free; its host is being repaired; will be ready; is bad and not found; is found, and waits for another."""


class Slots:
    """What will happen to hosts later, in a few columns that grow when they have to."""

    def __init__(self, runs: int, width: int = 8) -> None:
        self.at_s = np.full((runs, width), np.inf)  # when; infinite: not by itself
        self.end_s = np.full((runs, width), np.inf)  # when the host is good again by itself, if it is
        self.length_s = np.zeros((runs, width))  # how long its repair takes
        self.slowdown = np.ones((runs, width))  # of the whole job by this host, ratio
        self.hosts = np.full((runs, width), -1, dtype=np.int64)
        self.kinds = np.zeros((runs, width), dtype=np.int8)

    def put(self, kind: int, runs: Ints, hosts: Ints, at_s: Floats) -> Ints:
        """Use a free slot of each run; its column."""
        is_free = self.kinds[runs] == FREE
        if not is_free.any(axis=1).all():
            for name in ("at_s", "end_s", "length_s", "slowdown", "hosts", "kinds"):
                old = getattr(self, name)
                fresh = type(self)(len(old), old.shape[1])
                setattr(self, name, np.concatenate([old, getattr(fresh, name)], axis=1))
            is_free = self.kinds[runs] == FREE
        columns: Ints = is_free.argmax(axis=1)
        self.set(kind, runs, columns, at_s)
        self.hosts[runs, columns] = hosts
        return columns

    def set(self, kind: int, runs: Ints, columns: Ints, at_s: Floats | float) -> None:
        """Give the slot's host another fate; it holds nothing up any more."""
        self.kinds[runs, columns] = kind
        self.at_s[runs, columns] = at_s
        self.slowdown[runs, columns] = 1.0

    def clear(self, runs: Ints, columns: Ints) -> None:
        """Nothing is known of the host any more."""
        self.set(FREE, runs, columns, np.inf)
        self.end_s[runs, columns] = np.inf
        self.hosts[runs, columns] = -1

    def find(self, runs: Ints, hosts: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Whether these hosts have a slot, and its column."""
        is_theirs = self.hosts[runs] == hosts[:, None]
        return is_theirs.any(axis=1), is_theirs.argmax(axis=1)

    def first(self, kind: int, runs: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Whether there is a slot of this kind, and its column."""
        is_kind = self.kinds[runs] == kind
        return is_kind.any(axis=1), is_kind.argmax(axis=1)


PLANNED_STOP = -1  # the host, and the class, of a planned interruption


@dataclass(frozen=True)
class History:
    """What happens in each run: arrays of runs x events, in the order of time, the rest at infinity."""

    times_s: Floats
    hosts: Ints
    classes: Ints  # numbers of failure classes, or `PLANNED`
    repairs_s: Floats  # how long the host is away; of a planned interruption, how long it takes
    stretch: Floats  # how long this recovery takes, over the usual, ratio
    luck: Floats  # even from 0 to 1
    is_extra: Flags  # it only happens because the host is a lemon
    # Failures end at a set time whatever is done about them, and add up (a trace); else the repair begins when the host
    # is taken out, and a host that is out has no others.
    is_fixed: bool = False

    @property
    def runs(self) -> int:
        """How many."""
        return len(self.times_s)


def draw_duration(duration: Duration, random: np.random.Generator, count: int) -> Floats:
    """That many of them, seconds."""
    if duration.kind == "fixed":
        return np.full(count, duration.mean_s)
    if duration.kind == "exponential":
        return random.exponential(duration.mean_s, count)
    if duration.kind == "lognormal":
        return random.lognormal(np.log(duration.median_s), duration.sigma, count)
    return random.choice(np.asarray(duration.values_s), count)


def draw_stretch(spread: float, random: np.random.Generator, count: int) -> Floats:
    """Lognormal with mean 1 and that standard deviation."""
    if spread == 0:
        return np.ones(count)
    sigma = np.sqrt(np.log1p(spread**2))
    return random.lognormal(-(sigma**2) / 2, sigma, count)


def draw_lemons(share: float, runs: int, hosts: int, random: np.random.Generator) -> Flags:
    """Which hosts are lemons: runs x hosts."""
    return random.random((runs, hosts)) < share if share else np.zeros((runs, hosts), dtype=bool)


def draw(
    scenario: FailureScenario, lemons: Flags, begins_s: float, ends_s: float, random: np.random.Generator
) -> History:
    """Everything that happens from `begins_s` to `ends_s`, in as many runs and hosts as `lemons` has."""
    runs, hosts = lemons.shape
    days = (ends_s - begins_s) / DAY_S
    usual, extra, planned, rest = random.spawn(4)
    rate = scenario.failures.per_host_day() * scenario.failures.usual_ratio * days
    usual_counts: Ints = usual.poisson(rate * hosts, (runs,))
    more = np.asarray(rate * (scenario.failures.lemon_times - 1) * lemons.sum(axis=1), dtype=np.float64)
    extra_counts: Ints = extra.poisson(more, (runs,))
    planned_counts: Ints = planned.poisson(scenario.recovery.planned_per_day * days, (runs,))
    events = [
        _hits(usual_counts, usual.integers(0, hosts, usual_counts.sum()), False),
        _hits(extra_counts, _lemons_hit(lemons, extra_counts, extra), True),
        _hits(planned_counts, np.full(planned_counts.sum(), PLANNED_STOP), False),
    ]
    runs_hit, hosts_hit, are_extra = (np.concatenate(column) for column in zip(*events, strict=True))
    # Each event gets a time, a class and all else; then they are sorted.
    count = len(runs_hit)
    times_s, classes, repairs, stretch, luck = rest.spawn(5)
    when_s = times_s.uniform(begins_s, ends_s, count)
    is_planned = hosts_hit == PLANNED_STOP
    rates = np.array([c.per_host_day for c in scenario.failures.classes] or [1.0])
    shares = np.cumsum(rates) / max(rates.sum(), 1e-300)
    kinds = np.where(
        is_planned,
        PLANNED_STOP,
        np.minimum(np.searchsorted(shares, classes.random(count), side="right"), len(rates) - 1),
    )
    repairs_s = np.full(len(kinds), scenario.recovery.planned_s)
    for number, failure in enumerate(scenario.failures.classes):
        ours = kinds == number
        repairs_s[ours] = draw_duration(failure.repair, repairs, int(ours.sum()))
    return laid_out(
        runs,
        runs_hit,
        History(
            when_s,
            hosts_hit,
            kinds,
            repairs_s,
            draw_stretch(scenario.recovery.spread, stretch, count),
            luck.random(count),
            are_extra,
        ),
    )


def _hits(counts: Ints, hosts: Ints, is_extra: bool) -> tuple[Ints, Ints, Flags]:
    runs = np.repeat(np.arange(len(counts)), counts)
    return runs, hosts, np.full(len(runs), is_extra)


def _lemons_hit(lemons: Flags, counts: Ints, random: np.random.Generator) -> Ints:
    numbers = lemons.sum(axis=1)
    by_run, which = np.nonzero(lemons)
    first = np.searchsorted(by_run, np.arange(len(lemons)))
    runs = np.repeat(np.arange(len(counts)), counts)
    chosen = (random.random(len(runs)) * numbers[runs]).astype(np.int64)
    hit: Ints = which[first[runs] + chosen].astype(np.int64)
    return hit


def laid_out(runs: int, runs_hit: Ints, flat: History) -> History:
    """A history whose arrays are one long row of events, as runs x events in the order of time."""
    order = np.lexsort((flat.times_s, runs_hit))
    sorted_runs = runs_hit[order]
    counts = np.bincount(sorted_runs, minlength=runs)
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=0)) + 1  # one more, so that there is always a next one: never

    def table(values: NDArray, empty: float) -> NDArray:
        filled = np.full((runs, width), empty, dtype=values.dtype)
        filled[sorted_runs, column] = values[order]
        return filled

    return History(
        table(flat.times_s, np.inf),
        table(flat.hosts, PLANNED_STOP),
        table(flat.classes, PLANNED_STOP),
        table(flat.repairs_s, 0),
        table(flat.stretch, 1),
        table(flat.luck, 0),
        table(flat.is_extra, False),
        flat.is_fixed,
    )
