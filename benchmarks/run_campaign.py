"""The fault campaign: every case with the real ``phalanx run``, gloo ranks on this machine, scored by the referee.

Four hosts of two ranks and a spare train a tiny model while one thing or two go wrong; see docs/faults.md. Each case
leaves a JSON file; a campaign that was interrupted goes on with ``--resume``. Exit status 1: a case was not right.

    python benchmarks/run_campaign.py --quick                       # three cases
    python benchmarks/run_campaign.py --cases all --resume          # all of them, those with a result left out
    python benchmarks/run_campaign.py --only sigkill 049 --keep     # by family, id, or number
    python benchmarks/run_campaign.py --healthy --minutes 10        # ten runs of which nothing must come
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from support.harness import benchmark_parser
from support.leaving import nothing_left

from phalanx.faults.campaign import STEPS, ci_cases, family_of, generate, healthy
from phalanx.faults.case_manifest import Manifest
from phalanx.faults.referee import Results
from phalanx.run.campaign.case_command import PACE_S
from phalanx.run.campaign.case_run import forget_networks, run_cases, show_results

SEED = 7
WIDTH = 132
"""Of the table, where nobody watches a terminal."""
QUICK = ("sigkill--rank-1", "host-killed--host-2", "exception-recurring--rank-0")


def read_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick="three cases only")
    parser.add_argument("--cases", choices=("ci", "all"), default="ci", help="the 12 of CI, or all 95")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="families, ids or numbers, of all cases")
    parser.add_argument("--healthy", action="store_true", help="ten runs with innocent disturbances instead")
    parser.add_argument("--minutes", type=float, default=1.0, help="that each of those trains, about")
    parser.add_argument("--resume", action="store_true", help="leave out cases that have a result")
    parser.add_argument("--folder", type=Path, default=Path("campaign"), help="of the results")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--guard",
        type=float,
        default=600.0,
        help="seconds until a case is ended; healthy ones have more",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    return parser.parse_args()


def main() -> int:
    options = read_options()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    cases = chosen(options)
    todo = Results(options.folder).pending(cases) if options.resume else cases
    with nothing_left(forget_networks, keep=options.keep):
        guard_s = options.guard + (options.minutes * 120 if options.healthy else 0)
        run_cases(todo, options.folder, guard_s=guard_s, keep=options.keep, console=console)
    return int(not show_results(cases, options.folder, console))


def chosen(options: argparse.Namespace) -> list[Manifest]:
    every = generate(options.seed)
    if options.healthy:
        every = healthy(options.seed, steps=max(round(options.minutes * 60 / PACE_S), STEPS))
        return [case for case in every if not options.only or case.id in options.only]
    if options.only:
        return [case for case in every if any(_is_named(case, name) for name in options.only)]
    if options.quick:
        return [case for case in every if case.id.split("-", 1)[1] in QUICK]
    return ci_cases(every) if options.cases == "ci" else every


def _is_named(case: Manifest, name: str) -> bool:
    number, words = case.id.split("-", 1)
    return name in (case.id, number, words, family_of(case))


if __name__ == "__main__":
    sys.exit(main())
