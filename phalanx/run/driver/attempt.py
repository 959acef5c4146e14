"""One attempt as its executors report it: soft state of the driver, out of which only transitions become events.

Made anew for each attempt, so that nothing of an earlier one counts. Torch-free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from phalanx.run.decide.events import Advanced, Event, Fault, LossBroken, Running, WorkerFailed, WorkersReturned
from phalanx.run.judge.limits import LimitConfig, Standing, StepJudge
from phalanx.run.messages import Heartbeat, WorkerEnded, WorkerState
from phalanx.run.now import Now

ADVANCED_S = 10.0
"""Steps that advance become an event this often at most: the journal is no place for each of them."""

RATE_S = 60.0
"""Over so long steps per second are counted."""

BROKEN_STEPS = 5
"""After so many steps in a row whose loss is no number it does not come back."""

PATIENT_STEPS = 200
"""For so many steps the reports of ranks that have not come to such a step are waited for."""

Classify = Callable[[WorkerEnded], Fault]
"""The class of the fault that ended a rank."""


@dataclass
class _Rank:
    """What is known of a rank.

    Attributes:
        seen: its last report; None: there is none.
        has_stepped: in this attempt.
        is_absolute: its steps are counted from the beginning of the training.
        broken: the step from which on its loss has been no number; -1: it is one.
    """

    seen: WorkerState | None = None
    step: int = -1
    has_stepped: bool = False
    is_absolute: bool = False
    broken: int = -1


@dataclass
class AttemptWatch:
    """Ranks of one attempt.

    Args:
        attempt: its number.
        world_size: how many ranks it has.
        began: when its processes were started.
        classify: for ranks that fail.
        limits: how long it may make no step.
    """

    attempt: int
    world_size: int
    began: Now
    classify: Classify
    limits: LimitConfig = field(default_factory=LimitConfig)

    def __post_init__(self) -> None:
        self._judge = StepJudge(self.attempt, self.began.monotonic_s, self.limits)
        self._ranks = {rank: _Rank() for rank in range(self.world_size)}
        self._ended: set[int] = set()
        self._returned: set[int] = set()
        self._to_step = self._to_number = self.world_size
        self._broken: dict[int, int] = {}
        self._step = self._first = -1
        self._is_running = False
        self._is_broken = False
        self._told_s = -math.inf
        self._told_step = -1
        self._past: deque[tuple[float, int]] = deque()

    @property
    def step(self) -> int:
        """The newest step that any rank has done; -1: none has said so."""
        return self._step

    @property
    def is_absolute(self) -> bool:
        """Whether all ranks count their steps from the beginning of the training."""
        return self._to_number == 0

    @property
    def workers(self) -> list[WorkerState]:
        """What ranks reported last, those that have."""
        return [rank.seen for rank in self._ranks.values() if rank.seen is not None]

    def worker(self, rank: int) -> WorkerState | None:
        """What a rank reported last; None: nothing yet."""
        found = self._ranks.get(rank)
        return None if found is None else found.seen

    def steps_per_s(self, now: Now) -> float | None:
        """Over the last minute; None: there are not two steps to tell it from."""
        if len(self._past) < 2:
            return None
        (began_s, first), (_, last) = self._past[0], self._past[-1]
        return (last - first) / max(now.monotonic_s - began_s, 1e-9)

    @property
    def is_running(self) -> bool:
        """Whether every rank has made a step in this attempt."""
        return self._is_running

    def on_heartbeat(self, beat: Heartbeat, now: Now) -> list[Event]:
        """What the ranks of one host report."""
        if beat.attempt != self.attempt:
            return []
        self._judge.observe(beat.attempt, beat.workers, now.monotonic_s)
        for worker in beat.workers:
            self._note(worker)
        self._count(now)
        return [*self._begin_running(now), *self._advance(now), *self._break(now)]

    def on_ended(self, ended: WorkerEnded, now: Now) -> list[Event]:
        """A rank's process is gone. One that we have killed ourselves, or that has been told before, is no news."""
        rank = self._ranks.get(ended.rank)
        if ended.attempt != self.attempt or ended.rank in self._ended or rank is None:
            return []
        self._ended.add(ended.rank)
        if ended.by_us:
            return []
        if ended.kind == "returned" and ended.code == 0:
            self._returned.add(ended.rank)
            return [WorkersReturned(now.unix_s, self.attempt)] if len(self._returned) == self.world_size else []
        kind = "status" if ended.kind == "returned" else ended.kind
        step = ended.step if ended.step >= 0 else rank.step
        return [
            *self.catch_up(now, step if rank.has_stepped else -1),
            WorkerFailed(
                now.unix_s,
                self.attempt,
                ended.rank,
                kind,
                self.classify(ended),
                ended.summary,
                ended.follows,
                step,
            ),
        ]

    def catch_up(self, now: Now, step: int = -1) -> list[Event]:
        """The newest step, for whoever has to know what is lost; `step`: what a rank said at its end."""
        newest = max(self.step, step)
        if not self._is_running or newest <= self._told_step:
            return []
        self._told_s, self._told_step = now.monotonic_s, newest
        return [Advanced(now.unix_s, self.attempt, newest, self.is_absolute)]

    def standing(self, now: Now) -> Standing:
        """Whether steps are made; see `phalanx.run.judge.limits.StepJudge`."""
        return self._judge.standing(now.monotonic_s)

    def is_paused(self, now: Now) -> bool:
        """Whether a rank says that it evaluates, writes a checkpoint or the like."""
        return self._judge.is_paused(now.monotonic_s)

    def dismiss(self, now: Now) -> None:
        """What stood still has been looked at, and moves."""
        self._judge.dismiss(now.monotonic_s)

    def next_look_s(self, now: Now) -> float:
        """Seconds until the standing changes if nothing is reported."""
        return self._judge.next_look_s(now.monotonic_s)

    def _note(self, worker: WorkerState) -> None:
        rank = self._ranks.get(worker.rank)
        if rank is None:
            return
        rank.seen = worker
        if worker.step < 0:
            return
        if worker.steps_here > 0 and not rank.has_stepped:
            rank.has_stepped = True
            self._to_step -= 1
        if worker.is_absolute != rank.is_absolute:
            rank.is_absolute = worker.is_absolute
            self._to_number += -1 if worker.is_absolute else 1
        if worker.steps_here > 0:
            self._step = max(self._step, worker.step)
            if not self._is_running:
                first = worker.step - worker.steps_here + 1
                self._first = first if self._first < 0 else min(self._first, first)
        self._note_loss(rank, worker)
        rank.step = worker.step

    def _note_loss(self, rank: _Rank, worker: WorkerState) -> None:
        if math.isfinite(worker.loss):
            if rank.broken >= 0:
                rank.broken = -1
                del self._broken[worker.rank]
        elif worker.step > rank.step and rank.broken < 0:
            # Between two reports there may be many steps: the rank itself knows at which it began.
            rank.broken = worker.broken_step if worker.broken_step >= 0 else worker.step
            self._broken[worker.rank] = rank.broken

    def _count(self, now: Now) -> None:
        if self.step >= 0 and (not self._past or self.step > self._past[-1][1]):
            self._past.append((now.monotonic_s, self.step))
        while len(self._past) > 2 and self._past[1][0] < now.monotonic_s - RATE_S:
            self._past.popleft()

    def _begin_running(self, now: Now) -> Iterable[Event]:
        if self._is_running or self._to_step:
            return []
        self._is_running = True
        # What is lost is counted up to the first step, be the newest one further by now.
        self._told_s, self._told_step = now.monotonic_s, self._first if self.is_absolute else self.step
        return [Running(now.unix_s, self.attempt, self._told_step, self.is_absolute)]

    def _advance(self, now: Now) -> Iterable[Event]:
        return self.catch_up(now) if now.monotonic_s - self._told_s >= ADVANCED_S else []

    def _break(self, now: Now) -> Iterable[Event]:
        broken = self._broken
        if self._is_broken or not broken or self.step < min(broken.values()) + BROKEN_STEPS:
            return []
        first = min(broken.values())
        if self.step < first + PATIENT_STEPS and any(0 <= rank.step < first for rank in self._ranks.values()):
            return []  # what others say of that step is on its way
        self._is_broken = True
        ranks = tuple(sorted(number for number, step in broken.items() if step == first))
        named = () if len(ranks) == self.world_size else ranks
        return [LossBroken(now.unix_s, self.attempt, first, named, is_from_start=first <= self._first)]
