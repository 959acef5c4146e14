"""Every layout against a single process, in fp32: weights, gradients, losses and norms; and from any layout to another.

Each layout is run for 20 steps with SGD and with AdamW, LAMB or CAME in turn, one of the two clipped. Most have threads
of this process as their ranks, with real groups over gloo; some are run by real processes too. With ``--reshard`` six
layouts save a run and each of them takes up what every other one saved. Ends with status 1 where a bar is missed.

    python benchmarks/parity.py
    python benchmarks/parity.py --only "pp2 zbv" "tp4"
    python benchmarks/parity.py --reshard
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from support.harness import benchmark_parser
from support.parity.cases import CASES, QUICK, REAL, ways
from support.parity.compare import BAR, Difference, difference, worst
from support.parity.places import by_processes, by_threads
from support.parity.reshard import LAYOUTS, QUICK_LAYOUTS, all_pairs, reshard
from support.parity.runs import single
from support.parity.table import markdown, parity_row, reshard_row, shown
from support.parity.task import Case, Seen

STEPS, QUICK_STEPS = 20, 4
PARITY_HEADS = ("layout", "ranks", "as", "with", "weights", "gradients", "losses", "norms", "verdict")
RESHARD_HEADS = ("saved by", "taken up by", "state", "losses", "norms", "verdict")


def compare(name: str, case: Case, steps: int, place: Callable[[Sequence[Case]], list[Seen]]) -> Difference:
    """The worst of all ways in which a layout is run."""
    tried = list(ways(case, list(CASES).index(name), steps))
    expected = [single(way) for way in tried]
    for seen, way in zip(expected, tried, strict=True):
        limit = way.optim["clip_norm"]
        assert not limit or min(seen.norms) > limit, "clipping was to change every step"
    return worst([difference(found, seen) for found, seen in zip(place(tried), expected, strict=True)])


def run_parity(names: Sequence[str], real: Sequence[str], steps: int, console: Console) -> list[tuple[str, ...]]:
    """A row for each layout."""
    work = [(name, "threads", by_threads) for name in names] + [(name, "processes", by_processes) for name in real]
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("layouts", total=len(work))
        for name, kind, place in work:
            progress.update(task, description=f"{name} ({kind})")
            case = CASES[name]
            tried = ", ".join(_way(way) for way in ways(case, list(CASES).index(name), steps))
            rows.append(parity_row(name, case, kind, tried, compare(name, case, steps, place)))
            progress.advance(task)
    return rows


def run_reshard(names: Sequence[str], console: Console) -> list[tuple[str, ...]]:
    """A row for each pair of layouts."""
    with tempfile.TemporaryDirectory() as folder, console.status("resharding"):
        return [reshard_row(moved) for moved in reshard(Path(folder), all_pairs(names))]


def _way(case: Case) -> str:
    return f"{case.optim['name']}{' clipped' if case.optim['clip_norm'] else ''}"


def main() -> int:
    parser = benchmark_parser(__doc__, quick="few layouts and steps, to see that it works")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="LAYOUT", help="some of the layouts")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--reshard", action="store_true", help="the matrix of checkpoints instead")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    begin_s = time.monotonic()
    if arguments.reshard:
        heads = RESHARD_HEADS
        rows = run_reshard(QUICK_LAYOUTS if arguments.quick else list(LAYOUTS), console)
    else:
        heads = PARITY_HEADS
        names = arguments.only or (list(QUICK) if arguments.quick else list(CASES))
        real = () if arguments.quick else [name for name in REAL if name in names]
        rows = run_parity(names, real, QUICK_STEPS if arguments.quick else arguments.steps, console)
    console.print(shown(heads, rows))
    failed = [row for row in rows if row[-1] != "equal"]
    console.print(
        f"{len(rows) - len(failed)} of {len(rows)} equal; bar {BAR:g} relative; {time.monotonic() - begin_s:.0f} s"
    )
    if arguments.markdown:
        arguments.markdown.write_text(markdown(heads, rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
