"""The state of all runs at once: one number, or one row, for each of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months.shelves import JOB, SPARE, Shelves, Slots
from phalanx.plan.months.values import Story

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


def classes_of(story: Story) -> Classes:
    """What the story says of each class."""
    recovery, classes = story.recovery, story.failures.classes
    usual = {"stops": recovery.detection_s, "slow": recovery.find_slow_s, "taken out": 0.0}
    noticed = [usual[c.effect] if c.detection_s is None else c.detection_s for c in classes]
    return Classes(
        np.array(noticed, dtype=float),
        np.array([c.effect == "stops" for c in classes], dtype=bool),
        np.array([c.slowdown if c.effect == "slow" else 1.0 for c in classes], dtype=float),
        np.array([c.survives for c in classes], dtype=bool),
    )


class State:
    """All runs.

    Attributes:
        size: hosts with which the job last started; 0: it could not for a while, and takes what it gets.
        parts_s: where the time went: runs x `PARTS`.
        counts: what happened: runs x `COUNTS`.
        segments_s: ends of what the present recovery does, in the order of `_SEGMENTS`.
        since_save_s: training since the newest durable checkpoint began to be made.
        stall_left_s: until the checkpoint that is being made lets training go on.
        persisting_s: since the newest checkpoint was made, which is durable later; infinite: there is none.
        fails: stops of each host.
        is_cured: hosts that are lemons no more.
    """

    def __init__(self, story: Story, runs: int) -> None:
        self.story = story
        self.classes = classes_of(story)
        pool = story.pool
        self.shelves = Shelves(runs, (story.work.hosts, pool.spares, pool.cold))
        self.slots = Slots(runs)
        self.phase = np.full(runs, RUN, dtype=np.int8)
        self.now_s = np.zeros(runs)
        self.ready_s = np.full(runs, np.inf)
        self.segments_s = np.zeros((runs, len(_SEGMENTS)))
        self.queue_s = np.zeros(runs)
        self.start_s = np.zeros(runs)
        self.parts_s = np.zeros((runs, len(PARTS)))
        self.counts = np.zeros((runs, len(COUNTS)), dtype=np.int64)
        self.since_save_s = np.zeros(runs)
        self.stall_left_s = np.zeros(runs)
        self.persisting_s = np.full(runs, np.inf)
        self.slowdown = np.ones(runs)
        self.size = np.full(runs, story.work.hosts, dtype=np.int64)
        self.coming = np.zeros(runs, dtype=np.int64)
        self.fails = np.zeros(self.shelves.where.shape, dtype=np.uint8)
        self.is_cured = np.zeros(self.shelves.where.shape, dtype=bool)
        self.most_out = np.zeros(runs, dtype=np.int64)

    @property
    def job_hosts(self) -> Ints:
        """Hosts in the job, by run."""
        hosts: Ints = self.shelves.counts[JOB]
        return hosts

    @property
    def spares(self) -> Ints:
        """Hosts that are ready beside it, by run."""
        hosts: Ints = self.shelves.counts[SPARE]
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
