"""The loss of hosts at random moments, with nothing durable: what runs go on from, and how far that is back.

A tiny run on two or more "hosts" of this machine (keepers of their own) takes a snapshot at every step. Again and again
one host is lost, its ranks and its keeper at once, and the job with it; it is started again with a new host in its
place. Every time it must go on from exactly the newest snapshot that the others have whole, and there must be one: at
most one before the newest that any of them has a part of. In the end all losses must be those of the run that nobody
disturbed, bit for bit.

No host is lost before the first snapshot after a start is replicated: until then there is none to go on from, or only
in the memory of those that were not lost the last time.

    python benchmarks/checkpoint_hosts.py --kills 20
    python benchmarks/checkpoint_hosts.py --costs
"""

from __future__ import annotations

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
from support.harness import benchmark_parser
from support.hosts import Cluster, Left, a_cluster
from support.kills.run import TinyRun

_MOST_SNAPSHOTS_BACK = 1  # the next is begun only when the last is whole on every host
_STEPS_PER_KILL = 40
_SLACK_STEPS = 20


@dataclass
class Loss:
    """What became of a host that was lost.

    Attributes:
        host: which.
        at_step: the last step that was written down.
        whole: the newest of the snapshots that those who were left had whole.
        newest: of the snapshots of which they had any part.
        taken_up: the step that the run went on from; -1: not from memory.
        snapshots_back: snapshots later than that, of which they had any part.
        seconds: from the start of the ranks until the next step was done.
    """

    host: int
    at_step: int
    whole: int
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
    steps_per_kill: int
    losses: list[Loss] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def go(self, kills: int) -> None:
        """Lose hosts, then let the run come to its end."""
        self.cluster.start()
        for _ in range(kills):
            self._lose()
            if self.bad:
                return
        statuses = self.cluster.wait()
        if set(statuses) != {0}:
            self.bad.append(f"the ranks ended with {statuses}:\n{self.cluster.logs()}")

    def _lose(self) -> None:
        cluster = self.cluster
        cluster.until_replicated(self.losses[-1].taken_up if self.losses else 0)
        cluster.until_step(cluster.run.last_step() + self.random.randint(0, self.steps_per_kill // 2))
        time.sleep(self.random.uniform(0.0, 0.03))
        host = self.random.randrange(len(cluster.hosts))
        left = cluster.lose(host)
        loss = Loss(host, cluster.run.last_step(), max(left.whole, default=0), max(left.parts, default=0))
        began_s = time.monotonic()
        cluster.start()
        self._look(loss, left)
        loss.seconds = time.monotonic() - began_s
        self.losses.append(loss)

    def _look(self, loss: Loss, left: Left) -> None:
        cluster, number = self.cluster, len(self.losses) + 1
        cluster.until("a step", lambda: "grad norm" in cluster.log() or "done" in cluster.log())
        found = cluster.taken_up()
        if found is None or not found.source.startswith("the memory of"):
            self.bad.append(f"loss {number}: not taken up from memory but from {found}; others had {left}")
            return
        loss.taken_up = found.step
        loss.snapshots_back = sum(step > found.step for step in left.parts)
        if left.whole[:1] != [found.step] or loss.snapshots_back > _MOST_SNAPSHOTS_BACK:
            self.bad.append(f"loss {number}: taken up at step {found.step}; others had {left}")


def lost_and_found(
    folder: Path, kills: int, seed: int = 0, ranks: tuple[int, ...] = (1, 1), steps_per_kill: int = _STEPS_PER_KILL
) -> tuple[list[Loss], list[str]]:
    """Lose hosts of a run in `folder`; what became of them, and what went wrong.

    Args:
        ranks: of each host.
        steps_per_kill: a host is lost at most half as many steps after the first replicated snapshot was seen.
    """
    size = sum(ranks)
    settings = {"parallel.shard": size, "train.global_batch": 2 * size}
    settings["train.steps"] = steps_per_kill * kills + _SLACK_STEPS
    straight = TinyRun(folder, "straight", settings | {"checkpoint.mode": "blocking"} | _NOT_KEPT)
    with a_cluster(straight, ranks) as cluster:
        cluster.start()
        if set(cluster.wait()) != {0}:
            return [], [f"the undisturbed run fails:\n{cluster.logs()}"]
    with a_cluster(TinyRun(folder, "run", settings), ranks) as cluster:
        campaign = Campaign(cluster, random.Random(seed), steps_per_kill)
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
    parser = benchmark_parser(__doc__, quick="a few kills, to see that it works")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1], help="of each host")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", action="store_true", help="what replicas cost instead")
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
    had = ("others had whole", "or a part of")
    table = Table("host lost", "at step", *had, "taken up at", "snapshots back", "steps back", "seconds")
    for loss in losses:
        row = (loss.host, loss.at_step, loss.whole, loss.newest, loss.taken_up, loss.snapshots_back, loss.steps_back)
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
        told = f"{len(losses)} hosts lost, all taken up from the newest whole snapshot in memory"
        console.print(f"[green]{told}; all losses are bit-equal[/]")


if __name__ == "__main__":
    sys.exit(main())
