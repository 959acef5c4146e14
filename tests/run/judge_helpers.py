"""A job in simulated time: what its ranks report, how they look, and what is made of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from phalanx.run.judge.step_limits import LimitConfig, StepJudge
from phalanx.run.messages import WorkerState

BACKWARD = """Thread 0x00007f1 (most recent call first):
  File "/x/torch/autograd/graph.py", line 824 in _engine_run_backward
  File "/x/torch/_tensor.py", line 581 in backward
  File "/home/me/train.py", line 40 in main
"""


def py_spy(*frames: str, name: str = "MainThread") -> str:
    """A dump with one thread; frames as ``function (path:line)``, innermost first."""
    lines = "".join(f"    {frame}\n" for frame in frames)
    return f'Process 7: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread 7 (idle): "{name}"\n{lines}'


def worker(rank: int, step: int = -1, *given: Any, state: Any = "running") -> WorkerState:
    """A rank whose process has made so many steps."""
    return WorkerState(rank, 100 + rank, state, step, *given, steps_here=max(step, 0))


@dataclass(frozen=True)
class Pause:
    """Between step `after` and the next one something else goes on for `seconds`; `phase` is what the ranks say."""

    after: int
    seconds: float
    phase: str = ""
    expects_s: float = 0.0


class Job:
    """Steps of given durations, with pauses; after the last of them it stands still for ever."""

    def __init__(self, durations: Sequence[float], pauses: Sequence[Pause] = (), ranks: int = 2) -> None:
        self.ranks = ranks
        self.ends: list[float] = []
        self.took: list[float] = []
        self.phases: list[tuple[float, float, Pause]] = []
        now, by_step = 0.0, {pause.after: pause for pause in pauses}
        for step, duration in enumerate(durations, 1):
            begin = now
            now += duration
            self.ends.append(now)
            self.took.append(now - (self.ends[-2] if len(self.ends) > 1 else begin))
            if step in by_step:
                self.phases.append((now, now + by_step[step].seconds, by_step[step]))
                now += by_step[step].seconds
        self.end = now

    def workers(self, now_s: float) -> list[WorkerState]:
        done = bisect_right(self.ends, now_s)
        within = [(begin, pause) for begin, end, pause in self.phases if begin <= now_s < end and pause.phase]
        began = max([0.0, *(t for begin, end, p in self.phases if p.phase for t in (begin, end) if t <= now_s)])
        phase, expects_s = (within[0][1].phase, within[0][1].expects_s) if within else ("step", 0.0)
        age = now_s - self.ends[done - 1] if done else 0.0
        took = self.took[done - 1] if done else 0.0
        return [worker(rank, done or -1, age, took, phase, now_s - began, expects_s) for rank in range(self.ranks)]


def found_after_s(
    job: Job,
    config: LimitConfig | None = None,
    *,
    until_s: float,
    heartbeat_s: float = 1.0,
    tick_s: float = 0.25,
    is_busy: Callable[[float], bool] = lambda now_s: True,
) -> float | None:
    """Run the judge as a driver would; when it finds a hang, if it does before `until_s`.

    Executors look at ranks that have been quiet for five seconds every five seconds. Until the end of the job these
    move when `is_busy`, and not after it.
    """
    judge = StepJudge(1, 0.0, config)
    moved_s = next_look_s = next_beat_s = now_s = 0.0
    while now_s < until_s:
        workers = job.workers(now_s)
        since_s = workers[0].step_age_s if workers[0].step >= 0 else now_s
        if now_s >= next_look_s and since_s >= 5:
            if now_s - since_s > moved_s or (now_s <= job.end and is_busy(now_s)):
                moved_s = now_s
            next_look_s = now_s + 5
        if now_s >= next_beat_s:
            still_s = max(next_look_s - 5 - moved_s, 0.0) if since_s >= 5 else -1.0
            judge.observe(1, [replace(one, still_s=still_s) for one in workers], now_s)
            next_beat_s += heartbeat_s
        if judge.standing(now_s).kind == "hang":
            return now_s
        now_s += tick_s
    return None
