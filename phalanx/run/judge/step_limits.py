"""Whether a job still makes steps: what its ranks report, and limits learnt from its own steps.

`StepJudge` belongs to one attempt: a new attempt gets a new one, so that nothing of an earlier attempt (a checkpoint
that began and never ended) counts. A slow step is not a hang; idle ranks are judged where they can be seen, beside
them (`phalanx.detect.hangs.stack_traces`). Here time without steps is compared with limits:

- *stopped*: a rank is stopped (SIGSTOP), dead, or nothing is heard of its host: evidence enough after ten seconds.
- *hang*: nothing of the job has moved for longer than the limit: no step, no change of phase, and at no rank anything
  else. The limit is never below a minute (`LimitConfig.floor_s`); steps and pauses of the job itself widen it.
- *long*: something moves, but no step has been made for so long that people should know. Nothing is done about it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from phalanx.core.config import Config
from phalanx.run.messages import ORDINARY_PHASES, Heartbeat, WorkerState

RECENT = 64  # times of steps whose median is the usual one
REMEMBERED = 256  # gaps between steps of which the second longest is remembered, so that pauses that recur are known
ENOUGH = 3  # steps of an attempt beyond which their median is used


class LimitConfig(Config):
    """How long a job may make no step. All are seconds but `factor`."""

    floor_s: float = Field(
        60.0, gt=0, description="everything has to stand still for so long, at least, until it is a hang"
    )
    factor: float = Field(3.0, gt=1, le=100, description="the same in usual step times; the longer of the two counts")
    margin_s: float = Field(2.5, ge=0, description="seconds added to those step times")
    first_step_s: float = Field(
        300.0, gt=0, description="limit for the first step, in which libraries load and compile"
    )
    stopped_s: float = Field(
        10.0,
        gt=0,
        description="limit where a rank is stopped, dead or silent, which no pause of a healthy job explains",
    )
    phase_s: float = Field(
        1800.0, gt=0, description="limit in evaluation, checkpoints and the like, where the rank names none"
    )
    patience_s: float = Field(
        1800.0, gt=0, description="after so long without a step people are told, though ranks move; nothing is done"
    )


MOST_WIDENED_S = 3600.0  # to which the floor is widened at most where a job seems to hang again at the same place


@dataclass(frozen=True)
class Standing:
    """Where a job stands.

    Attributes:
        kind: going on, a rank is stopped, dead or silent, nothing moves, or ranks move but make no step for very long.
        quiet_s: since the last sign of life of any rank: a step, a change of phase, any movement.
        step_s: since any rank's last step; before the first one since the start.
        ranks: that are stopped, dead or silent.
    """

    kind: Literal["moving", "stopped", "hang", "long"]
    quiet_s: float
    step_s: float
    limit_s: float
    usual_s: float | None
    why: str
    ranks: tuple[int, ...] = ()

    @property
    def age_s(self) -> float:
        """What is held against the limit."""
        return self.step_s if self.kind in ("stopped", "long") else self.quiet_s


class StepJudge:
    """Progress of one attempt, from what its ranks report.

    Args:
        attempt: its number; reports of others are ignored.
        now_s: when its workers were started, on the clock of all other times.

    Attributes:
        usual_s: the usual time of a step; None until enough are done.
    """

    def __init__(self, attempt: int, now_s: float, config: LimitConfig | None = None) -> None:
        self.attempt = attempt
        self._config = config or LimitConfig()
        self._step_of: dict[int, int] = {}
        self._paced: dict[int, tuple[int, int]] = {}
        """By the first rank of each host whose ranks all were at one step when last heard: how many, and that step."""
        self._pauses: dict[int, tuple[float, str]] = {}
        """Until when a rank's phase excuses the job, and its name."""
        self._longest: tuple[float, str] | None = None
        self._is_longest_known = True
        self._paused_at = 0
        """The most steps that a rank had done when it paused."""
        self._left: set[int] = set()
        """Ranks that have not made a step which others had done before they paused."""
        self._step_s = self._progress_s = now_s
        """When any rank's last step ended; the same, or when a phase began or anything moved, if that is later."""
        self._front = -1
        self._front_s = now_s
        self._steps = 0
        self._times: deque[float] = deque(maxlen=RECENT)
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self.usual_s: float | None = None
        self._recurring_s = 0.0
        self._was_excused = False
        self._stopped: dict[int, float] = {}
        """Since when ranks have been stopped, dead or silent."""
        self._patience_s = self._config.patience_s

    def observe_pace(self, beat: Heartbeat, now_s: float) -> bool:
        """Take in what one host's ranks have in common; False: `observe` has to look at each, and nothing was done.

        Of ten thousand hosts this is done ten thousand times a second.
        """
        # Whatever needs to know of single ranks (one that pauses, is stopped, or has fallen behind) goes the long way.
        pace, known = beat.pace, self._paced.get(beat.rank)
        if pace is None or known is None or pace.count != known[0] or self._pauses or self._left or self._stopped:
            return False
        step = beat.steps_here
        if pace.still_s >= 0:
            self._progress_s = max(self._progress_s, now_s - pace.still_s)
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
        # The first rank of a host may have stood for all of them until now: their steps are those that it reported.
        for worker in workers:
            if (paced := self._paced.pop(worker.rank, None)) is not None:
                count, step = paced
                step_of.update(dict.fromkeys(range(worker.rank, worker.rank + count), step))
        for worker in workers:
            rank, step = worker.rank, worker.steps_here if worker.step >= 0 else -1
            before = step_of.get(rank)
            if before != step:
                step_of[rank] = step
                # A rank that reports for the first time has made a step here only if it has the time of one.
                if worker.last_step_s > 0 if before is None else step > before:
                    at_s = now_s - worker.step_age_s
                    if at_s > self._step_s:
                        self._step_s = at_s
                if step > self._front:
                    self._advance(worker.last_step_s, step, max(now_s - worker.step_age_s, self._front_s))
            if worker.state == "ended" or worker.stopped_s <= 0:
                self._stopped.pop(rank, None)
            else:
                self._stopped[rank] = now_s - worker.stopped_s
            if worker.state != "ended" and worker.still_s >= 0:
                self._progress_s = max(self._progress_s, now_s - worker.still_s)
            if worker.state == "ended":
                step_of.pop(rank, None)
                self._drop_pause(rank)
                self._left.discard(rank)
            elif worker.phase not in ORDINARY_PHASES or worker.expects_s > 0 or rank in pauses:
                self._left.discard(rank)
                self._look_for_pause(worker, now_s)
            elif pauses:
                # A rank that waits for one that pauses has done as many steps; for one with fewer others will wait.
                usual_s, limit_s = self.usual_s, self._limit_s()
                late_s = limit_s / 2 if usual_s is None else min(1.2 * usual_s + 1.0, limit_s)
                if 0 < step < self._paused_at and worker.step_age_s > late_s:
                    self._left.add(rank)
                else:
                    self._left.discard(rank)
        self._progress_s = max(self._progress_s, self._step_s)
        if are_alike:
            self._paced[workers[0].rank] = len(workers), workers[0].steps_here

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

    def fall_silent(self, ranks: Sequence[int], now_s: float) -> None:
        """These ranks do not report any more: the phase that they reported last does not excuse the job."""
        for rank in ranks:
            self._drop_pause(rank)
            self._stopped.setdefault(rank, now_s)

    def _drop_pause(self, rank: int) -> None:
        before = self._pauses.pop(rank, None)
        if before is not None and before == self._longest:
            self._is_longest_known = False

    def _advance(self, last_step_s: float, step: int, at_s: float) -> None:
        """Steps that no rank had done before; the first one of the attempt is longer than others."""
        new = step - max(self._front, 0)
        if last_step_s > 0:
            # The first step compiles, and a step behind a pause contains it: neither is a usual one.
            is_first = self._steps == 0 and new <= 1
            if not is_first and not self._was_excused:
                self._times.append(last_step_s)
                if self._steps + new > ENOUGH:
                    self.usual_s = statistics.median_low(self._times)
                if self._steps > 0:
                    # Of several new steps only the last one's time is known; pauses of the others show in how long
                    # all of them took.
                    others_s = (new - 1) * statistics.median_low(self._times)
                    self._gaps.append(max(last_step_s, at_s - self._front_s - others_s))
                    # The second longest: a pause that came twice will come again, the longest alone may be an accident.
                    self._recurring_s = sorted(self._gaps)[-2] if len(self._gaps) > 1 else 0.0
            self._steps += max(new, 1)
        self._front, self._front_s = step, at_s
        self._was_excused = False
        self._patience_s = self._config.patience_s

    def be_patient(self) -> None:
        """People know that it takes long; they are alerted again after twice the time."""
        self._patience_s *= 2

    def standing(self, now_s: float) -> Standing:
        """Where the job stands now."""
        quiet_s, step_s = now_s - self._progress_s, now_s - self._step_s
        limit_s, usual_s = self._limit_s(), self.usual_s
        least_s = self._config.stopped_s
        stopped = tuple(sorted(rank for rank, since_s in self._stopped.items() if now_s - since_s >= least_s))
        # Before pauses: a rank that is stopped or dead does not evaluate, whatever it reported last.
        if stopped and step_s >= least_s:
            limit_s, ranks = self._config.stopped_s, ", ".join(map(str, stopped[:8]))
            why = f"rank {ranks} has been stopped, dead or silent for {limit_s:g} s, and no step was made since"
            return Standing("stopped", quiet_s, step_s, limit_s, usual_s, why, stopped)
        if not self._left and (pause := self._pause(now_s)) is not None:
            phase, left_s = pause
            why = f"in {phase}, for {left_s:.0f} s more"
            return Standing("moving", quiet_s, step_s, quiet_s + left_s, usual_s, why)
        if quiet_s > limit_s:
            usual = "too few steps to know the usual time" if usual_s is None else f"a usual step takes {usual_s:.2f} s"
            why = f"nothing has moved for {quiet_s:.1f} s, limit {limit_s:.1f} s; {usual}"
            return Standing("hang", quiet_s, step_s, limit_s, usual_s, why)
        if self._steps and step_s > self._patience_s:
            why = f"no step for {step_s:.0f} s, but ranks move"
            return Standing("long", quiet_s, step_s, self._patience_s, usual_s, why)
        why = "making steps" if self._steps else "before its first step"
        return Standing("moving", quiet_s, step_s, limit_s, usual_s, why)

    def is_paused(self, now_s: float) -> bool:
        """Whether a rank reports that it evaluates, writes a checkpoint or the like."""
        return self._pause(now_s) is not None

    def next_look_s(self, now_s: float) -> float:
        """Seconds until the standing changes if nothing is reported; at least 0."""
        # Limits that have passed change nothing any more.
        ahead = [self._limit_s() - (now_s - self._progress_s), self._patience_s - (now_s - self._step_s)]
        if not self._left and (pause := self._pause(now_s)) is not None:
            ahead = [pause[1]]
        if self._stopped:
            ahead.append(self._config.stopped_s - (now_s - max(self._step_s, min(self._stopped.values()))))
        return max(min((left_s for left_s in ahead if left_s >= 0), default=0.0), 0.0)

    def _pause(self, now_s: float) -> tuple[str, float] | None:
        """The phase that excuses the job for longest, and for how many seconds more."""
        if not self._is_longest_known:  # only now: a thousand ranks may have left a checkpoint together
            self._longest, self._is_longest_known = max(self._pauses.values(), default=None), True
        until_s, phase = self._longest or (now_s, "")
        return (phase or "a pause", until_s - now_s) if until_s > now_s else None

    def _limit_s(self) -> float:
        config, usual_s = self._config, self.usual_s
        if not self._steps:
            # Libraries load and kernels compile: there is no step yet to learn a limit from.
            return max(config.floor_s, config.first_step_s)
        own_s = 0.0 if usual_s is None else config.factor * usual_s + config.margin_s
        return max(config.floor_s, own_s, 1.5 * self._recurring_s)
