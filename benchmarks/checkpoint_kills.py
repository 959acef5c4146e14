"""SIGKILL at random moments: of the process that trains, the keeper, the persister, and of all at once.

A tiny run takes a snapshot at every step and makes every seventh durable. Again and again some of its processes are
killed, by a timer or where they stand at a named point of the code; a run that is gone is started again. After every
kill the pointer must name a checkpoint whose every byte is right, and at the end all losses must be those of the run
that nobody disturbed, bit for bit, and so must the last weights.

    python benchmarks/checkpoint_kills.py --kills 200
    python benchmarks/checkpoint_kills.py --kills 40 --ranks 2
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from support.kills.run import TinyRun, kill, wait

import phalanx.train.session  # noqa: F401  # imported before the first fork
from phalanx.checkpoint.format.verify import examine
from phalanx.checkpoint.restore import candidates, open_checkpoint
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store

VICTIMS = ("worker", "keeper", "persister", "all")
POINTS = (
    "snapshot.begin",
    "snapshot.begun",
    "snapshot.copied",
    "snapshot.taken",
    "keeper.taken",
    "keeper.examined",
    "keeper.committed",
    "persist.begin",
    "persist.shard-half",
    "persist.shard-written",
    "persist.part-written",
    "persist.manifest-written",
    "persist.before-publish",
    "persist.published",
    "persist.pointer-moved",
    "persist.pruned",
)
_NEXT_STEPS_S = 30.0


@dataclass
class Campaign:
    """One run that is killed over and over."""

    run: TinyRun
    steps: int
    random: random.Random
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    sources: collections.Counter[str] = field(default_factory=collections.Counter)
    bad: list[str] = field(default_factory=list)

    def go(self, count: int) -> None:
        """Kill `count` times, then let the run come to its end."""
        while sum(self.kills.values()) < count and self.run.last_step() < self.steps - 50:
            if self.random.random() < 0.4:
                self._by_point(self.random.choice(POINTS))
            else:
                self._by_timer(self.random.choice(VICTIMS))
            self._look()
        pid = self.run.start()
        status = wait(pid, 600)
        if status != 0:
            self.bad.append(f"the run ended with status {status}")

    def _by_timer(self, victim: str) -> None:
        pid = self.run.start()
        self._some_steps(pid)
        time.sleep(self.random.uniform(0.0, 0.05))
        found = [] if victim == "worker" else self.run.processes("phalanx keeper")
        persisters = self.run.processes("phalanx persister") if victim in ("persister", "all") else []
        hit = kill(persisters if victim == "persister" else [*found, *persisters] if victim == "all" else found)
        if victim in ("worker", "all"):
            self._end(pid)
            hit += 1
        self.kills[victim] += hit > 0
        if victim in ("keeper", "persister"):
            self._some_steps(pid)
            self._end(pid)
            self.kills["worker"] += 1

    def _by_point(self, point: str) -> None:
        if not point.startswith("snapshot."):  # those processes hear of it when they are started
            kill([*self.run.processes("phalanx keeper"), *self.run.processes("phalanx persister")])
        pid = self.run.start(f"{point}:{self.random.randint(1, 4)}")
        status = wait(pid, self.random.uniform(2.0, 3.0))
        if status is None:
            self._end(pid)
        self.kills[point] += 1
        kill([*self.run.processes("phalanx keeper"), *self.run.processes("phalanx persister")]) if not point.startswith(
            "snapshot."
        ) else None

    def _some_steps(self, pid: int) -> None:
        """Wait until the run has made some more steps, or ended."""
        wanted = self.run.last_step() + self.random.randint(1, 30)
        end_s = time.monotonic() + _NEXT_STEPS_S
        while self.run.last_step() < min(wanted, self.steps) and time.monotonic() < end_s:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.005)

    def _end(self, pid: int) -> None:
        os.killpg(pid, signal.SIGKILL)
        wait(pid, 60)

    def _look(self) -> None:
        """The pointer must name a checkpoint that is whole."""
        store = open_store(str(self.run.path / "checkpoints"), {})
        latest = read_latest(store)
        if latest is None or not latest.name:
            return
        try:
            examine(self.run.path / "checkpoints" / latest.name)
        except Exception as error:
            self.bad.append(f"after {sum(self.kills.values())} kills the pointer's checkpoint is unreadable: {error}")


def compare(run: TinyRun, straight: TinyRun) -> list[str]:
    """What differs between a run that was killed and one that was not."""
    mine, theirs = run.steps(), straight.steps()
    problems = [] if len(mine) == len(theirs) else [f"{len(mine)} steps instead of {len(theirs)}"]
    wrong = [a[0] for a, b in zip(mine, theirs, strict=False) if a != b]
    if wrong:
        problems.append(f"{len(wrong)} steps differ, the first is step {wrong[0]}")
    last = [open_checkpoint(candidates(one.path / "checkpoints")[0].path).read() for one in (run, straight)]
    differing = [name for name in last[0] if not torch.equal(last[0][name], last[1][name])]
    return problems + ([f"{len(differing)} tensors differ: {differing[:3]}"] if differing else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: about 60 for each kill")
    parser.add_argument("--quick", action="store_true", help="a few kills, to see that it works")
    args = parser.parse_args()
    kills = 4 if args.quick else args.kills
    steps = args.steps or max(60 * kills, 300)
    changes = {"train.steps": steps} | ({"parallel.replicate": args.ranks} if args.ranks > 1 else {})
    with tempfile.TemporaryDirectory() as folder:
        straight = TinyRun(Path(folder), "straight", changes)
        if (status := wait(straight.start(), 1200)) != 0:
            print((Path(folder) / "straight.log").read_text())
            raise SystemExit(f"the undisturbed run ended with status {status}")
        run = TinyRun(Path(folder), "run", changes)
        campaign = Campaign(run, steps, random.Random(args.seed))
        try:
            campaign.go(kills)
            problems = campaign.bad + compare(run, straight)
        finally:
            kill([*run.processes("phalanx"), *straight.processes("phalanx")])
        report(campaign, problems, (Path(folder) / "run.log").read_text())
    return 1 if problems else 0


def report(campaign: Campaign, problems: list[str], log: str) -> None:
    """What was killed, where it went on from, and what went wrong."""
    table = Table("killed", "times")
    for name, times in sorted(campaign.kills.items()):
        table.add_row(name, str(times))
    console = Console()
    console.print(table)
    memory, durable = log.count("going on from the memory"), log.count("going on from checkpoint")
    console.print(
        f"{sum(campaign.kills.values())} kills; taken up from memory {memory} times, from disk {durable} times"
    )
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    if not problems:
        console.print("[green]every pointer named a whole checkpoint; all losses and the last weights are bit-equal[/]")


if __name__ == "__main__":
    sys.exit(main())
