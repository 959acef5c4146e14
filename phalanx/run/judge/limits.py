"""Whether a job still makes steps: a limit learnt from its own step times, and what a rank says of its phase.

`StepJudge` belongs to one attempt: a new attempt gets a new one, so that nothing of an earlier attempt (a checkpoint
that began and never ended) counts. Its answer goes in three stages, so that a hang is known soon and a slow step is
not taken for one:

- *watch*: a step takes longer than usual; look at the ranks (stacks, CPU time) for the first time.
- *due*: the limit is passed; look again and `compare` (see `phalanx.run.judge.still`). If all stand still it is a hang,
  otherwise `StepJudge.dismiss`, after which the limit is twice as long until the next step.
- *hang*: patience is over, whether something moves or not.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from phalanx.core.config import Config
from phalanx.run.heartbeats import ORDINARY_PHASES
from phalanx.run.messages import Heartbeat, WorkerState

RECENT = 64
"""Times of steps whose median is the usual one."""
REMEMBERED = 256
"""Gaps between steps of which the second longest is remembered, so that pauses that recur are known."""
ENOUGH = 3
"""With more steps than these in an attempt, their median says something."""


class LimitConfig(Config):
    """How long a job may make no step. All are seconds but `factor`."""

    factor: float = Field(3.0, gt=1, le=100, description="usual step times until the limit")
    margin_s: float = Field(2.5, ge=0, description="seconds added to that")
    first_step_s: float = Field(
        300.0, gt=0, description="limit for the first step, in which libraries load and compile"
    )
    early_s: float = Field(60.0, gt=0, description="limit until enough steps are done to know their usual time")
    phase_s: float = Field(
        1800.0, gt=0, description="limit in evaluation, checkpoints and the like, where the rank names none"
    )
    patience_s: float = Field(600.0, gt=0, description="after so long without a step it is a hang even if ranks move")


@dataclass(frozen=True)
class Standing:
    """Where a job stands.

    Attributes:
        kind: making steps, longer than usual, beyond the limit, or beyond patience.
        quiet_s: since the last sign of progress of any rank.
        limit_s: the present limit.
        usual_s: the usual step time; None: not known yet.
        why: one line.
    """

    kind: Literal["moving", "watch", "due", "hang"]
    quiet_s: float
    limit_s: float
    usual_s: float | None
    why: str


class StepJudge:
    """Progress of one attempt, from what its ranks report.

    Args:
        attempt: its number; reports of others are ignored.
        now_s: when its workers were started, on the clock of all other times.
    """

    def __init__(self, attempt: int, now_s: float, config: LimitConfig | None = None) -> None:
        self.attempt = attempt
        self._config = config or LimitConfig()
        self._step_of: dict[int, int] = {}
        self._paced: dict[int, tuple[int, int]] = {}
        """By the first rank of hosts whose ranks all were at one step when last heard: how many, and that step."""
        self._pauses: dict[int, tuple[float, str]] = {}
        """Until when a rank's phase excuses the job, and its name."""
        self._longest: tuple[float, str] | None = None
        self._is_longest_known = True
        self._paused_at = 0
        """The most steps that a rank had done when it paused."""
        self._left: set[int] = set()
        """Ranks that have not made a step which others had done before they paused."""
        self._step_s = self._progress_s = now_s
        """When any rank's last step ended, and the same or when a phase began, if that is later."""
        self._front = -1
        self._front_s = now_s
        self._steps = 0
        self._times: deque[float] = deque(maxlen=RECENT)
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._usual_s: float | None = None
        self._recurring_s = 0.0
        self._was_excused = False
        self._dismissed_s = 0.0

    @property
    def usual_s(self) -> float | None:
        """The usual time of a step; None until enough are done."""
        return self._usual_s

    def observe_pace(self, beat: Heartbeat, now_s: float) -> bool:
        """Take in what one host's ranks have in common; False: `observe` has to look at each, and nothing was done.

        Of ten thousand hosts this is done ten thousand times a second.
        """
        pace, known = beat.pace, self._paced.get(beat.rank)
        if pace is None or known is None or pace.count != known[0] or self._pauses or self._left:
            return False
        step = beat.steps_here
        if step == known[1]:
            return True
        self._paced[beat.rank] = pace.count, step
        at_s = now_s - pace.step_age_s
        if step > known[1] and at_s > self._step_s:
            self._step_s = at_s
            self._progress_s = max(self._progress_s, at_s)
        if step > self._front:
            self._advance(pace.last_step_s, step, max(at_s, self._front_s))
        return True

    def observe(self, attempt: int, workers: Sequence[WorkerState], now_s: float, *, are_alike: bool = False) -> None:
        """Take in what some ranks report, such as those of one heartbeat.

        Args:
            are_alike: they are those of a host, and it has a pace.
        """
        if attempt != self.attempt:
            return
        step_of, pauses = self._step_of, self._pauses
        if self._left and not pauses:
            self._left.clear()
        self._recall(workers)
        for worker in workers:
            rank, step = worker.rank, worker.steps_here if worker.step >= 0 else -1
            before = step_of.get(rank)
            if before != step:
                step_of[rank] = step
                if worker.last_step_s > 0 if before is None else step > before:
                    at_s = now_s - worker.step_age_s
                    if at_s > self._step_s:
                        self._step_s = at_s
                if step > self._front:
                    self._advance(worker.last_step_s, step, max(now_s - worker.step_age_s, self._front_s))
            if worker.state == "ended":
                step_of.pop(rank, None)
                self._drop_pause(rank)
                self._left.discard(rank)
            elif worker.phase not in ORDINARY_PHASES or worker.expects_s > 0 or rank in pauses:
                self._left.discard(rank)
                self._look_for_pause(worker, now_s)
            elif pauses:
                self._look_if_left(worker, step)
        self._progress_s = max(self._progress_s, self._step_s)
        if are_alike:
            self._paced[workers[0].rank] = len(workers), workers[0].steps_here

    def _recall(self, workers: Sequence[WorkerState]) -> None:
        """The steps of ranks for which one has spoken until now."""
        for worker in workers:
            if (paced := self._paced.pop(worker.rank, None)) is not None:
                count, step = paced
                self._step_of.update(dict.fromkeys(range(worker.rank, worker.rank + count), step))

    def _look_for_pause(self, worker: WorkerState, now_s: float) -> None:
        wanted_s = worker.expects_s or (0.0 if worker.phase in ORDINARY_PHASES else self._config.phase_s)
        began_s = now_s - worker.phase_age_s
        self._progress_s = max(self._progress_s, began_s)
        if wanted_s > 0:
            self._paused_at = max(self._paused_at, worker.steps_here)
            pause = began_s + wanted_s, worker.phase
            before = self._pauses.get(worker.rank)
            self._pauses[worker.rank] = pause
            if self._longest is None or pause >= self._longest:
                self._longest = pause
            elif before == self._longest:
                self._is_longest_known = False
            self._was_excused |= began_s + wanted_s > now_s
        else:
            self._drop_pause(worker.rank)

    def _look_if_left(self, worker: WorkerState, step: int) -> None:
        """Who waits for a rank that pauses has done as many steps; who has done fewer is what others will wait for."""
        if 0 < step < self._paused_at and worker.step_age_s > self._watch_s():
            self._left.add(worker.rank)
        else:
            self._left.discard(worker.rank)

    def forget_pauses(self, ranks: Sequence[int]) -> None:
        """Nothing is heard of these ranks: what they said that they do does not excuse the job any more."""
        for rank in ranks:
            self._drop_pause(rank)

    def _drop_pause(self, rank: int) -> None:
        before = self._pauses.pop(rank, None)
        if before is not None and before == self._longest:
            self._is_longest_known = False

    def _advance(self, last_step_s: float, step: int, at_s: float) -> None:
        """Steps that no rank had done before; the first one of the attempt is longer than others."""
        new = step - max(self._front, 0)
        if last_step_s > 0:
            is_first = self._steps == 0 and new <= 1
            if not is_first and not self._was_excused:
                self._learn(last_step_s, at_s - self._front_s, new)
            self._steps += max(new, 1)
        self._front, self._front_s = step, at_s
        self._was_excused = False
        self._dismissed_s = 0.0

    def _learn(self, last_s: float, elapsed_s: float, new: int) -> None:
        """Of several new steps only the last one's time is known; pauses of the others show in how long all took."""
        self._times.append(last_s)
        if self._steps + new > ENOUGH:
            self._usual_s = statistics.median_low(self._times)
        if self._steps > 0:
            self._gaps.append(max(last_s, elapsed_s - (new - 1) * statistics.median_low(self._times)))
            self._recurring_s = sorted(self._gaps)[-2] if len(self._gaps) > 1 else 0.0

    def dismiss(self, now_s: float) -> None:
        """What was due has been looked at, and ranks move: wait twice as long as until now."""
        self._dismissed_s = 2 * self._quiet_s(now_s)

    def standing(self, now_s: float) -> Standing:
        """Where the job stands now."""
        quiet_s, limit_s, usual_s = self._quiet_s(now_s), self._limit_s(), self.usual_s
        if not self._left and (pause := self._pause(now_s)) is not None:
            phase, left_s = pause
            return Standing("moving", quiet_s, quiet_s + left_s, usual_s, f"in {phase}, for {left_s:.0f} s more")
        if (patience_s := self._exceeded_patience_s(now_s)) is not None:
            return Standing(
                "hang", quiet_s, patience_s, usual_s, f"no step for {patience_s:.0f} s, whatever else moves"
            )
        why = f"no step for {quiet_s:.1f} s, limit {limit_s:.1f} s"
        why += f", usual step {usual_s:.2f} s" if usual_s is not None else ", too few steps yet to know the usual time"
        if quiet_s > limit_s:
            return Standing("due", quiet_s, limit_s, usual_s, why)
        if quiet_s > self._watch_s():
            return Standing("watch", quiet_s, limit_s, usual_s, why)
        return Standing("moving", quiet_s, limit_s, usual_s, "making steps" if self._steps else "before its first step")

    def is_paused(self, now_s: float) -> bool:
        """Whether a rank says that it evaluates, writes a checkpoint or the like."""
        return self._pause(now_s) is not None

    def next_look_s(self, now_s: float) -> float:
        """Seconds until the standing changes if nothing is reported; at least 0."""
        quiet_s = self._quiet_s(now_s)
        if not self._left and (pause := self._pause(now_s)) is not None:
            return pause[1]
        ahead = [at_s - quiet_s for at_s in (self._watch_s(), self._limit_s()) if at_s >= quiet_s]
        return max(min(ahead, default=0.0), 0.0)

    def _pause(self, now_s: float) -> tuple[str, float] | None:
        """The phase that excuses the job for longest, and for how many seconds more."""
        if not self._is_longest_known:  # only now: a thousand ranks may have left a checkpoint together
            self._longest, self._is_longest_known = max(self._pauses.values(), default=None), True
        until_s, phase = self._longest or (now_s, "")
        return (phase or "a pause", until_s - now_s) if until_s > now_s else None

    def _limit_s(self) -> float:
        config, usual_s = self._config, self.usual_s
        if usual_s is None:
            limit_s = config.early_s if self._steps else config.first_step_s
        else:
            limit_s = max(config.factor * usual_s + config.margin_s, 1.5 * self._recurring_s)
        return max(limit_s, self._dismissed_s)

    def _watch_s(self) -> float:
        usual_s = self.usual_s
        return min(self._limit_s() / 2 if usual_s is None else 1.2 * usual_s + 1.0, self._limit_s())

    def _exceeded_patience_s(self, now_s: float) -> float | None:
        """The patience, if it is exceeded; where no rank has reported a step, it has no end."""
        patience_s = max(self._config.patience_s, 5 * self._recurring_s)
        return patience_s if self._steps and now_s - self._step_s > patience_s else None

    def _quiet_s(self, now_s: float) -> float:
        """Since any rank made a step, changed its phase, or was started."""
        return now_s - self._progress_s
