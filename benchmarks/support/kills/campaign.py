"""Killing the processes of one run over and over, by a timer or at named points, and looking at what is left."""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.storage.folder import candidates
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store
from support.kills.run import TinyRun, kill, wait
from support.open_checkpoint import open_checkpoint

RANK, KEEPER, PERSISTER = "phalanx rank", "phalanx keeper", "phalanx persister"
VICTIMS = ("worker", "keeper", "persister", "all")
POINTS = {
    "snapshot": ("begin", "begun", "copied", "taken"),
    "keeper": ("lease", "taken", "examined", "committed"),
    "persist": (
        "begin",
        "shard-half",
        "shard-written",
        "part-written",
        "manifest-written",
        "before-publish",
        "published",
        "pointer-moved",
        "pruned",
    ),
}
"""By whose process reaches them: that of a rank, the keeper, the persister."""

_PATIENCE_S = 60.0
_MOST_STEPS = 80  # that one kill may take; a point that is not reached within them is none that was


@dataclass
class Campaign:
    """One run that is killed over and over, and started again.

    Attributes:
        run: that is killed.
        ranks: its processes.
        steps: its steps; it must not come to its end before the last kill.
        random: what happens.
        kills: SIGKILLs by whom or what they hit, each seen to have ended its process.
        missed: points that were not reached in time.
        bad: what must not be.
    """

    run: TinyRun
    ranks: int
    steps: int
    random: random.Random
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    missed: collections.Counter[str] = field(default_factory=collections.Counter)
    bad: list[str] = field(default_factory=list)
    _pid: int | None = None
    _newest_step: int = 0

    @property
    def count(self) -> int:
        """Kills so far."""
        return self.kills.total()

    def go(self, count: int) -> None:
        """Kill `count` times, then let the run come to its end."""
        points = [f"{whose}.{name}" for whose, names in POINTS.items() for name in names]
        while self.count < count and self.run.last_step() < self.steps - 2 * _MOST_STEPS:
            if self.random.random() < 0.5:
                self.by_point(self.random.choice(points), self.random.randint(1, 4))
            else:
                self.by_timer(self.random.choice(VICTIMS))
            self.look()
        if self.count < count:
            self.bad.append(f"only {self.count} of {count} kills before the last step: give it more --steps")
        self.finish()

    def finish(self) -> None:
        """Let the run come to its end, and look at what it leaves."""
        status = wait(self._running(), 600)
        self._pid = None
        if status != 0:
            self.bad.append(f"the run ended with status {status}")
        self.look()

    def by_timer(self, victim: str) -> None:
        """Let it make some steps, and kill: a rank's process, the keeper, the persister, or all of them at once."""
        self.some_steps()
        time.sleep(self.random.uniform(0.0, 0.05))
        if victim == "worker":
            self._kill_worker()
        elif victim == "all":
            hit = kill([*self._helpers(), *self.run.processes(RANK)])
            self._end_job()
            self.kills[victim] += hit > 0
        else:
            self.kills[victim] += kill(self.run.processes(KEEPER if victim == "keeper" else PERSISTER)) > 0

    def by_point(self, point: str, times: int) -> None:
        """Start the run so that the process that reaches `point` kills itself there, the `times`-th time."""
        whose = point.partition(".")[0]
        if self._pid is not None:
            self._kill_worker()
        if whose != "snapshot":  # those processes hear of it when they are started
            kill(self._helpers())
        self._pid = self.run.start(f"{point}:{times}")
        first = self.run.last_step()
        reached = self._has_ended() if whose == "snapshot" else self._is_hit(KEEPER if whose == "keeper" else PERSISTER)
        (self.kills if reached else self.missed)[point] += 1
        if not reached and self.run.last_step() <= first:
            self.bad.append(f"the run made no step within {_PATIENCE_S:.0f} s when it was to end at {point}")
        if whose != "snapshot":
            self._without_fault()

    def some_steps(self) -> None:
        """Wait until the run has made some more steps, or ended."""
        pid = self._running()
        wanted = min(self.run.last_step() + self.random.randint(1, 30), self.steps)
        if not self._until(lambda: self.run.last_step() >= wanted or _has_exited(pid)):
            self.bad.append(f"the run made no more steps within {_PATIENCE_S:.0f} s after step {self.run.last_step()}")
        if _has_exited(pid) and self.run.last_step() < self.steps:
            self._pid = None
            self.bad.append(f"the run ended by itself, with status {wait(pid, 1)}")

    def look(self) -> None:
        """The pointer must name a checkpoint that is whole, and never go back."""
        store = open_store(str(self.run.path / "checkpoints"), {})
        for _ in range(3):  # which is deleted meanwhile where the run goes on
            latest = read_latest(store)
            if latest is None or not latest.name:
                return
            if latest.step < self._newest_step:
                self.bad.append(f"the pointer went back from step {self._newest_step} to {latest.step}")
            self._newest_step = latest.step
            try:
                examine(self.run.path / "checkpoints" / latest.name, manifest_sha256=latest.manifest_sha256)
                return
            except Exception as error:
                problem = f"after {self.count} kills the pointer's checkpoint is unreadable: {error}"
            if read_latest(store) == latest:
                self.bad.append(problem)
                return

    def _running(self) -> int:
        if self._pid is None:
            self._pid = self.run.start()
        return self._pid

    def _helpers(self) -> list[psutil.Process]:
        return [*self.run.processes(KEEPER), *self.run.processes(PERSISTER)]

    def _kill_worker(self) -> None:
        """A rank, which must take the whole job with it; or the only process that trains."""
        pid = self._running()
        ranks = self.run.processes(RANK)
        if ranks:
            self.kills["worker"] += kill([self.random.choice(ranks)])
            if wait(pid, _PATIENCE_S) is not None:
                self._pid = None
                return
            self.bad.append("a rank was killed and the others went on")
        else:
            self.kills["worker"] += not _has_exited(pid)
        self._end_job()

    def _end_job(self) -> None:
        pid = self._running()
        os.killpg(pid, signal.SIGKILL)
        wait(pid, _PATIENCE_S)
        self._pid = None

    def _has_ended(self) -> bool:
        """Whether the job ends by the death of a rank."""
        pid, last = self._running(), self.run.last_step() + _MOST_STEPS
        self._until(lambda: _has_exited(pid) or self.run.last_step() > last)
        if not _has_exited(pid):
            return False
        self._pid = None
        status = wait(pid, 1)
        expected = status == -signal.SIGKILL if self.ranks == 1 else bool(status)
        if not expected:
            self.bad.append(f"the run ended with status {status} where SIGKILL was due")
        return expected

    def _is_hit(self, title: str) -> bool:
        """Whether a process of this title dies while the run goes on."""
        pid, last = self._running(), self.run.last_step() + _MOST_STEPS
        seen: set[int] = set()
        died = False

        def dead_or_over() -> bool:
            nonlocal died
            now = {process.pid for process in self.run.processes(title)}
            died = bool(seen - now)
            seen.update(now)
            return died or _has_exited(pid) or self.run.last_step() > last

        self._until(dead_or_over)
        return died and self.run.last_step() < self.steps and not _has_exited(pid)

    def _without_fault(self) -> None:
        """Sometimes the run goes on with the fault still waiting; else all is killed, and goes on without it."""
        if self.random.random() < 0.5:
            self.some_steps()
        self._kill_worker()
        if self.random.random() < 0.5:
            kill(self._helpers())

    def _until(self, condition: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.005)
        return True


def compare(run: TinyRun, straight: TinyRun) -> list[str]:
    """What differs between a run that was killed and one that was not."""
    mine, theirs = run.steps(), straight.steps()
    problems = [] if len(mine) == len(theirs) else [f"{len(mine)} steps instead of {len(theirs)}"]
    wrong = [a[0] for a, b in zip(mine, theirs, strict=False) if a != b]
    if wrong:
        problems.append(f"{len(wrong)} steps differ, the first is step {wrong[0]}")
    last = [open_checkpoint(candidates(one.path / "checkpoints")[0].path).read() for one in (run, straight)]
    if last[0].keys() != last[1].keys():
        problems.append("the last checkpoints hold other tensors")
    differing = [name for name in last[0] if not torch.equal(last[0][name], last[1][name])]
    return problems + ([f"{len(differing)} tensors differ: {differing[:3]}"] if differing else [])


def _has_exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
