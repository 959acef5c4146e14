"""SIGKILL at random moments: of the process that trains, the keeper, the persister, and of all at once.

A tiny run takes a snapshot at every step and makes every seventh durable. Again and again some of its processes are
killed, by a timer or where they stand at a named point of the code; a run that is gone is started again. After every
kill the pointer must name a checkpoint whose every byte is right, and at the end all losses must be those of the run
that nobody disturbed, bit for bit, and so must the last weights.

A kill counts only if it was seen to end its process. What is killed besides, to start over without the fault, does not.

    python benchmarks/checkpoint_kills.py --kills 200
    python benchmarks/checkpoint_kills.py --kills 40 --ranks 2
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser
from support.kills.campaign import Campaign, compare
from support.kills.run import TinyRun, kill, wait

import phalanx.train.session  # noqa: F401  # imported before the first fork


def main() -> int:
    """Run the campaign that the command line asks for; 1 where something was wrong."""
    parser = benchmark_parser(__doc__, quick="a few kills, to see that it works")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of the run; 0: 70 for each kill")
    parser.add_argument("--log", type=Path, help="where to keep what the killed run said")
    args = parser.parse_args()
    kills = 3 if args.quick else args.kills
    steps = args.steps or (280 if args.quick else max(70 * kills, 400))
    with tempfile.TemporaryDirectory() as folder:
        campaign, problems = run_campaign(Path(folder), kills, args.ranks, steps, random.Random(args.seed))
        log = campaign.run.log.read_text()
    report(campaign, problems, log)
    if args.log:
        args.log.write_text(log)
    return 1 if problems else 0


def run_campaign(folder: Path, kills: int, ranks: int, steps: int, chosen: random.Random) -> tuple[Campaign, list[str]]:
    """The undisturbed run, the one that is killed, and what is wrong with that."""
    changes = {"train.steps": steps} | ({"parallel.replicate": ranks} if ranks > 1 else {})
    straight, run = TinyRun(folder, "straight", changes), TinyRun(folder, "run", changes)
    campaign = Campaign(run, ranks, steps, chosen)
    try:
        status = wait(straight.start(), 1200)
        if status != 0:
            print(straight.log.read_text())
            raise SystemExit(f"the undisturbed run ended with status {status}")
        campaign.go(kills)
        return campaign, campaign.bad + compare(run, straight)
    finally:
        kill([*run.processes("phalanx"), *straight.processes("phalanx")])


def report(campaign: Campaign, problems: list[str], log: str) -> None:
    """What was killed, where it went on from, and what went wrong."""
    table = Table("killed", "times", "not reached")
    for name in sorted(campaign.kills | campaign.missed):
        table.add_row(name, str(campaign.kills[name]), str(campaign.missed[name] or ""))
    console = Console()
    console.print(table)
    memory = log.count("going on from the memory")
    durable = log.count("going on from ") - memory
    console.print(f"{campaign.count} kills; taken up from memory {memory} times, from disk {durable} times")
    for problem in problems:
        console.print(f"[red]{problem}[/]")
    if not problems:
        console.print("[green]every pointer named a whole checkpoint; all losses and the last weights are bit-equal[/]")


if __name__ == "__main__":
    sys.exit(main())
