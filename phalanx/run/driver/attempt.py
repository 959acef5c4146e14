"""One attempt as its executors report it: soft state of the driver, of which only transitions become events.

Made anew for each attempt, so that nothing of an earlier one counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.run.clock import Now
from phalanx.run.decide.events import (
    USAGE,
    Advanced,
    Event,
    FailureKind,
    Fault,
    LeftEarly,
    LossBroken,
    NoProgress,
    Restored,
    Running,
    WorkerFailed,
    WorkersReturned,
)
from phalanx.run.judge.step_limits import LimitConfig, Standing, StepJudge
from phalanx.run.messages import BadReportError, Heartbeat, WorkerEnded, WorkerState, report_of

ADVANCED_S = 10.0
"""Seconds between two events about new steps, at least: one for each step would fill the journal."""

RATE_S = 60.0
"""Seconds over which steps per second are counted."""

BROKEN_STEPS = 5
"""Steps in a row with a loss that is not finite, after which it does not come back."""

PATIENT_STEPS = 200
"""Steps for which the driver waits for reports of ranks that have not come to such a step."""


@dataclass
class AttemptWatch:
    """Ranks of one attempt.

    Args:
        workers_per_host: successive ranks that are on one host.
        began: when its processes were started.
        classify: the class of the fault that ended a rank.
        limits: how long it may make no step.
    """

    attempt: int
    world_size: int
    workers_per_host: int
    began: Now
    classify: Callable[[WorkerEnded], Fault]
    limits: LimitConfig = field(default_factory=LimitConfig)

    def __post_init__(self) -> None:
        self._judge = StepJudge(self.attempt, self.began.monotonic_s, self.limits)
        self._seen: list[WorkerState | None] = [None] * self.world_size
        self._paced: dict[int, Heartbeat] = {}
        """By the first rank of hosts of which one rank spoke for all when last heard: newer than what is in `_seen`."""
        self._has_stepped, self._numbers = [False] * self.world_size, [False] * self.world_size
        """By rank: it has made a step in this attempt; it counts from the beginning of the training."""
        self._to_step = self._to_number = self.world_size
        """How many ranks have not."""
        self._ended: set[int] = set()
        self._returned: dict[int, int] = {}
        """Ranks that have ended with status 0, and their steps."""
        self._reported_left = 0
        self._has_failed = False
        self._broken: dict[int, int] = {}
        """Steps from which on the losses of ranks have not been finite."""
        self._is_broken = False
        self._first = -1
        self._restored = self._reported_restored = -1
        self._imported_s = -1.0
        self._reported_s = -math.inf
        self._reported_step = -1
        self._past: deque[tuple[float, int]] = deque()
        self.is_running = False
        """Every rank has made a step in this attempt."""
        self.step = -1
        """The newest step that any rank has done; -1: none has reported one."""

    @property
    def is_absolute(self) -> bool:
        """Whether all ranks count their steps from the beginning of the training."""
        return self._to_number == 0

    def workers(self, ranks: Sequence[int]) -> list[WorkerState]:
        """What these reported last, those that have."""
        for first in dict.fromkeys(rank - rank % self.workers_per_host for rank in ranks):
            self._recall(first)
        return [seen for rank in ranks if 0 <= rank < self.world_size and (seen := self._seen[rank]) is not None]

    def worker(self, rank: int) -> WorkerState | None:
        """What a rank reported last; None: nothing yet."""
        return next(iter(self.workers([rank])), None)

    def steps_per_s(self, now: Now) -> float | None:
        """Over the last minute; None: fewer than two steps."""
        if len(self._past) < 2:
            return None
        (began_s, first), (_, last) = self._past[0], self._past[-1]
        return (last - first) / max(now.monotonic_s - began_s, 1e-9)

    def on_heartbeat(self, beat: Heartbeat, now: Now) -> list[Event]:
        """What the ranks of one host report.

        Raises:
            BadReportError: it cannot be read.
        """
        if beat.attempt != self.attempt:
            return []
        before = self.step
        if not self._note_pace(beat, now):
            self._note_report(beat, now)
        if self.step > before:
            self._past.append((now.monotonic_s, self.step))
            # Two are kept however old: slow jobs have fewer steps in a minute, and a rate all the same.
            while len(self._past) > 2 and self._past[1][0] < now.monotonic_s - RATE_S:
                self._past.popleft()
        found: list[Event] = []
        if self._restored > self._reported_restored:
            self._reported_restored = self._restored
            found.append(Restored(now.unix_s, self.attempt, self._restored))
        if not self.is_running and not self._to_step:
            found += self._begin_running(now)
        if self.step > self._reported_step and now.monotonic_s - self._reported_s >= ADVANCED_S:
            found += self._advance(now)
        return found + self._break(now) if self._broken and not self._is_broken else found

    def on_ended(self, ended: WorkerEnded, now: Now) -> list[Event]:
        """A rank's process is gone; one that we have killed, or that was reported before, counts for no more."""
        if ended.attempt != self.attempt or ended.rank in self._ended or not 0 <= ended.rank < self.world_size:
            return []
        self._ended.add(ended.rank)
        if ended.by_us:  # it may have made steps until then that nothing else reported
            return self.catch_up(now, ended.step)
        if ended.kind == "returned" and ended.code == 0:
            self._returned[ended.rank] = ended.step
            self.step = max(self.step, ended.step)
            if len(self._returned) == self.world_size:
                # A job of less than a heartbeat has made its steps unseen.
                has_run = not self.is_running and min(self._returned.values()) > 0
                begun = self._begin_running(now) if has_run else []
                return [*begun, *self.catch_up(now), WorkersReturned(now.unix_s, self.attempt)]
            return self._left_early(now) if self._has_failed else []
        self._has_failed = True
        kind: FailureKind = "status" if ended.kind == "returned" else ended.kind
        kind = "usage" if kind == "status" and ended.code == USAGE else kind
        has_stepped, seen = self._has_stepped[ended.rank], self.worker(ended.rank)
        # Where a rank is before its first step ends is known only if it numbers its steps and has resumed.
        step = max(ended.step, -1 if seen is None else seen.step)
        step = step if step > 0 or has_stepped else -1
        return [
            *self.catch_up(now, step if has_stepped else -1),
            WorkerFailed(
                now.unix_s, self.attempt, ended.rank, kind, self.classify(ended), ended.summary, ended.follows, step
            ),
        ]

    def catch_up(self, now: Now, step: int = -1) -> list[Event]:
        """What has to be known before an end is judged: the newest step (a rank's last one), and ranks that left."""
        left = self._left_early(now)
        return [*self._advance(now, step), *left]

    def _advance(self, now: Now, step: int = -1) -> list[Event]:
        if self.is_running:
            self.step = max(self.step, step)
        newest = self.step
        if not self.is_running or newest <= self._reported_step:
            return []
        self._reported_s, self._reported_step = now.monotonic_s, newest
        # Shorter than the pause between two such events it says nothing.
        quiet_s = now.monotonic_s - self._past[-1][0] if self._past else 0.0
        age_s = quiet_s if quiet_s > ADVANCED_S else 0.0
        return [Advanced(now.unix_s, self.attempt, newest, self.is_absolute, age_s)]

    def _left_early(self, now: Now) -> list[Event]:
        """Ranks that ended with status 0, if more have since the last report; of most ranks it is the usual end."""
        count = len(self._returned)
        if count == self._reported_left or 2 * count > self.world_size:
            return []
        self._reported_left = count
        ranks = tuple(sorted(self._returned))
        return [LeftEarly(now.unix_s, self.attempt, ranks, tuple(self._returned[rank] for rank in ranks))]

    def standing(self, now: Now) -> Standing:
        """Whether steps are made; see `phalanx.run.judge.step_limits.StepJudge`."""
        return self._judge.standing(now.monotonic_s)

    def is_paused(self, now: Now) -> bool:
        """Whether a rank evaluates, writes a checkpoint or the like."""
        return self._judge.is_paused(now.monotonic_s)

    def fall_silent(self, ranks: Sequence[int], now: Now) -> None:
        """Nothing is heard of these: they do not excuse the job any more, until they report again what they do."""
        self._judge.fall_silent(ranks, now.monotonic_s)

    def no_progress(self, standing: Standing, now: Now) -> NoProgress:
        """The event of a standing that is not that of a job that goes on; of a long one once."""
        if standing.kind == "long":
            self._judge.be_patient()
        kind, why = standing.kind, standing.why
        return NoProgress(now.unix_s, self.attempt, standing.age_s, standing.limit_s, kind, why, standing.ranks)

    def next_look_s(self, now: Now) -> float:
        """Seconds until the standing changes if nothing is reported."""
        return self._judge.next_look_s(now.monotonic_s)

    def _note_pace(self, beat: Heartbeat, now: Now) -> bool:
        """Take in a host of which one rank speaks for all; False: its report has to be read."""
        # Of ten thousand hosts this is done ten thousand times a second: decoding each report would take a core.
        pace = beat.pace
        if pace is None or self._broken or not self.is_running or not self._judge.observe_pace(beat, now.monotonic_s):
            return False
        self._paced[beat.rank] = beat
        if pace.step > self.step and beat.steps_here > 0:
            self.step = pace.step
        return True

    def _note_report(self, beat: Heartbeat, now: Now) -> None:
        workers = report_of(beat).workers
        self._recall(beat.rank)
        if not self.is_running:
            for worker in workers:
                self._restored = max(self._restored, worker.restored)
                self._imported_s = max(self._imported_s, worker.imported_s)
                self._note_first(worker)
        # A loss that is not finite may pass, as with fp16's loss scale: it counts after `BROKEN_STEPS` in a row.
        if self._broken or not all(math.isfinite(worker.loss) for worker in workers):
            self._note_losses(workers)
        for worker in workers:
            self._note(worker)
        # All ranks of one host, in order: then one may speak for all from now on.
        whole = range(beat.rank, beat.rank + self.workers_per_host)
        are_alike = (
            beat.pace is not None
            and beat.pace.count == len(whole)
            and [worker.rank for worker in workers] == list(whole)
            and beat.rank >= 0
            and not beat.rank % len(whole)
            and whole.stop <= self.world_size
        )
        self._judge.observe(beat.attempt, workers, now.monotonic_s, are_alike=are_alike)

    def _note(self, worker: WorkerState) -> None:
        if 0 <= worker.rank < self.world_size:
            self._seen[worker.rank] = worker
            if worker.step > self.step and worker.steps_here > 0:
                self.step = worker.step

    def _recall(self, first: int) -> None:
        """What the ranks of a host reported last, where one has spoken for all until now."""
        if (beat := self._paced.pop(first, None)) is not None:
            with suppress(BadReportError):  # nobody has had to read it
                for worker in report_of(beat).workers:
                    self._note(worker)

    def _note_first(self, worker: WorkerState) -> None:
        """What counts until all ranks have made a step."""
        if not 0 <= worker.rank < self.world_size or worker.step < 0:
            return
        if worker.is_absolute != self._numbers[worker.rank]:
            self._numbers[worker.rank] = worker.is_absolute
            self._to_number += -1 if worker.is_absolute else 1
        if worker.steps_here > 0:
            # The rank's first step of this attempt, wherever it has resumed.
            first = worker.step - worker.steps_here + 1
            self._first = first if self._first < 0 else min(self._first, first)
            self._to_step -= not self._has_stepped[worker.rank]
            self._has_stepped[worker.rank] = True

    def _note_losses(self, workers: Sequence[WorkerState]) -> None:
        for worker in workers:
            rank = worker.rank
            if not 0 <= rank < self.world_size or worker.step < 0:
                continue
            before = self._seen[rank]
            if math.isfinite(worker.loss):
                self._broken.pop(rank, None)
            elif worker.step > (-1 if before is None else before.step) and rank not in self._broken:
                # Between two reports there may be many steps: the rank itself knows at which it began.
                self._broken[rank] = worker.broken_step if worker.broken_step >= 0 else worker.step

    def _begin_running(self, now: Now) -> list[Event]:
        self.is_running = True
        # What is lost is counted up to the first step, be the newest one further by now.
        self._reported_s, self._reported_step = now.monotonic_s, self._first if self.is_absolute else self.step
        return [Running(now.unix_s, self.attempt, self._reported_step, self.is_absolute, self._imported_s)]

    def _break(self, now: Now) -> list[Event]:
        broken = self._broken
        first = min(broken.values())
        if self.step < first + BROKEN_STEPS:
            return []
        seen = self.workers(range(self.world_size))
        if self.step < first + PATIENT_STEPS and any(0 <= worker.step < first for worker in seen):
            return []  # what others report of that step is on its way
        self._is_broken = True
        # Where all ranks share a loss, as after a reduction, none of them is to blame for it.
        ranks = tuple(sorted(number for number, step in broken.items() if step == first))
        named = () if len(ranks) == self.world_size else ranks
        return [LossBroken(now.unix_s, self.attempt, first, named, is_from_start=first <= self._first)]
