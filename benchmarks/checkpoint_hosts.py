"""The loss of hosts at random moments, with nothing durable: what runs go on from, and how far that is back.

A tiny run on two or more "hosts" of this machine (keepers of their own) takes a snapshot at every step. Again and again
one host is lost, its ranks and its keeper at once, and the job with it; it is started again with a new host in its
place. Every time it must go on from the memory of the others, at most two snapshots before the newest that any of them
has, and in the end all losses must be those of the run that nobody disturbed, bit for bit.

    python benchmarks/checkpoint_hosts.py --kills 20
    python benchmarks/checkpoint_hosts.py --costs
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from support.hosts import Cluster, a_cluster
from support.kills.run import TinyRun

MOST_SNAPSHOTS_BACK = 2
_STEPS_PER_KILL = 40


@dataclass
class Loss:
    """What became of a host that was lost.

    Attributes:
        host: which.
        at_step: the last step that was written down.
        newest: of the snapshots of which anybody who was left had a part.
        taken_up: the step that the run went on from; -1: not from memory.
        snapshots_back: snapshots later than that, of which anybody had a part.
        seconds: from the start of the ranks until the next step was done.
    """

    host: int
    at_step: int
    newest: int
    taken_up: int = -1
    snapshots_back: int = 0
    seconds: float = 0.0

    @property
    def steps_back(self) -> int:
        """Steps that had to be done again."""
        return self.at_step - self.taken_up


@dataclass
class Campaign:
    """A run whose hosts are lost over and over."""

    cluster: Cluster
    random: random.Random
    losses: list[Loss] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def go(self, kills: int) -> None:
        """Lose hosts, then let the run come to its end."""
        self.cluster.start()
        self.cluster.until_step(3)
        for _ in range(kills):
            self._lose()
            if self.bad:
                return
        statuses = self.cluster.wait()
        if set(statuses) != {0}:
            self.bad.append(f"the ranks ended with {statuses}:\n{self.cluster.logs()}")

    def _lose(self) -> None:
        cluster = self.cluster
        cluster.until_step(cluster.run.last_step() + self.random.randint(1, _STEPS_PER_KILL // 2))
        time.sleep(self.random.uniform(0.0, 0.03))
        host = self.random.randrange(len(cluster.hosts))
        cluster.lose(host)
        cluster.end()
        others = [number for number in range(len(cluster.hosts)) if number != host]
        steps = sorted({record.step for other in others for record, _ in cluster.held(other)})
        loss = Loss(host, cluster.run.last_step(), max(steps, default=0))
        began_s = time.monotonic()
        cluster.start()
        self._look(loss, steps)
        loss.seconds = time.monotonic() - began_s
        self.losses.append(loss)

    def _look(self, loss: Loss, steps: list[int]) -> None:
        cluster, number = self.cluster, len(self.losses) + 1
        cluster.until("a step", lambda: "grad norm" in cluster.log() or "done" in cluster.log())
        found = cluster.taken_up()
        if found is None or not found.source.startswith("the memory of"):
            self.bad.append(f"loss {number}: not taken up from memory but from {found}; others had {steps}")
            return
        loss.taken_up = found.step
        loss.snapshots_back = sum(step > found.step for step in steps)
        if loss.snapshots_back > MOST_SNAPSHOTS_BACK:
            self.bad.append(f"loss {number}: step {found.step} is too far back; others had {steps}")


def lost_and_found(
    folder: Path, kills: int, seed: int = 0, ranks: tuple[int, ...] = (1, 1), **changes: Any
) -> tuple[list[Loss], list[str]]:
    """Lose hosts of a run in `folder`; what became of them, and what went wrong."""
    settings = {"train.steps": max(_STEPS_PER_KILL * kills, 60)} | (changes or {"parallel.shard": sum(ranks)})
    straight = TinyRun(folder, "straight", settings | {"checkpoint.mode": "blocking"} | _NOT_KEPT)
    with a_cluster(straight, ranks) as cluster:
        cluster.start()
        if set(cluster.wait()) != {0}:
            return [], [f"the undisturbed run fails:\n{cluster.logs()}"]
    with a_cluster(TinyRun(folder, "run", settings), ranks) as cluster:
        campaign = Campaign(cluster, random.Random(seed))
        campaign.go(kills)
        mine, theirs = cluster.run.steps(), straight.steps()
    if not campaign.bad and mine != theirs:
        wrong = [a[0] for a, b in zip(mine, theirs, strict=False) if a != b]
        campaign.bad.append(f"{len(mine)} steps of {len(theirs)}; these differ: {wrong[:5]}")
    return campaign.losses, campaign.bad


_NOT_KEPT = {"checkpoint.memory_every_steps": 0}
_WAYS: dict[str, dict[str, Any]] = {
    "no snapshots": _NOT_KEPT,
    "in the own host": {"checkpoint.replicas": False},
    "and in another": {},
}
_STAGES = ("stall", "examine", "replicate")


def costs(folder: Path, console: Console, steps: int, rounds: int) -> None:
    """What snapshots and replicas of every step cost a tiny run on two hosts; ways take turns."""
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    figures: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        for way, changes in _WAYS.items():
            settings = {"train.steps": steps, "parallel.shard": 2} | changes
            with a_cluster(TinyRun(folder, f"{way.replace(' ', '-')}-{number}", settings), (1, 1)) as cluster:
                cluster.start()
                cluster.wait()
                seconds[way] += [one["step_s"] for one in cluster.events("step")[10:]]
                figures[way] += cluster.events("snapshot")
    columns = ("step, median ms", "taken", "stall, median ms", "examine", "replicate", "MB/s")
    table = Table("a snapshot at every step", *columns)
    for way, found in figures.items():
        stall, examine, replicate = ([one[f"checkpoint/{name}_s"] for one in found] for name in _STAGES)
        sent = sum(one["checkpoint/replicate_bytes"] for one in found)
        rate = f"{sent / sum(replicate) / 1e6:.0f}" if sent else ""
        row = (_ms(seconds[way]), f"{len(found)} of {steps * rounds}", _ms(stall), _ms(examine), _ms(replicate), rate)
        table.add_row(way, *row)
    console.print(table)


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}" if seconds else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1], help="of each host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", action="store_true", help="what replicas cost instead")
    parser.add_argument("--quick", action="store_true", help="a few kills, to see that it works")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        if args.costs:
            costs(Path(folder), console, 50 if args.quick else 200, 1 if args.quick else 3)
            return 0
        losses, bad = lost_and_found(Path(folder), 3 if args.quick else args.kills, args.seed, tuple(args.ranks))
    report(losses, bad, console)
    return 1 if bad else 0


def report(losses: list[Loss], bad: list[str], console: Console) -> None:
    table = Table("host lost", "at step", "others had up to", "taken up at", "snapshots back", "steps back", "seconds")
    for loss in losses:
        row = (loss.host, loss.at_step, loss.newest, loss.taken_up, loss.snapshots_back, loss.steps_back)
        table.add_row(*map(str, row), f"{loss.seconds:.1f}")
    console.print(table)
    for name, values in (
        ("snapshots back", [loss.snapshots_back for loss in losses]),
        ("steps back", [loss.steps_back for loss in losses]),
    ):
        if values:
            console.print(f"{name}: median {statistics.median(values):g}, at most {max(values)}")
    for problem in bad:
        console.print(f"[red]{problem}[/]", highlight=False)
    if not bad:
        console.print(f"[green]{len(losses)} hosts lost, all taken up from memory; all losses are bit-equal[/]")


if __name__ == "__main__":
    sys.exit(main())
