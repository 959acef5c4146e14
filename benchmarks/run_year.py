"""A year of real faults in simulated time against the real decision function: how much of the time trains.

    python benchmarks/run_year.py                       # all layouts, some minutes
    python benchmarks/run_year.py --seed 2 --layouts 384+16

The faults are those of 400 GPU servers over 349 days (InfiniteHBD-Trace, SIGCOMM 2025: 584 faults on 231 of them, with
their repairs), one file that has to be there (`--trace`); without it nothing is run, and this is said. Each kind of
fault does something to the job (benchmarks/support/year/trace.py): a host dies, a rank fails with a word of the kernel,
ranks hang, a host is slow, or an operator wants it out. What is done about it is decided by `phalanx.run.decide`; how
long executors and the back end take is assumed and printed. "Effective" is the training that counts, over all of the
time; "of the cluster" is that times the share of the 400 nodes that train. The same seed gives the same figures.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

from support.harness import benchmark_parser
from support.year.cluster import Cluster, Pace, Tally
from support.year.trace import DAY_S, NODES, Fault, read_trace

from phalanx.run.decide.policy import Job, Policy

TRACE = Path(__file__).parents[2] / "shared" / "data" / "faults" / "infinitehbd-fault-trace" / "fault_trace.json"
YEAR_DAYS = 348.98
ROW = "{:22} {:>6} {:>7} {:>11} {:>11} {:>11} {:>9} {:>8} {:>7} {:>7} {:>7} {:>6}"
HEAD = (
    *("layout", "hosts", "spares", "effective", "of cluster", "waiting", "lost", "s/fault"),
    *("recov.", "evicted", "wrong", "ended"),
)


class Layout(NamedTuple):
    """How the nodes are used."""

    name: str
    hosts: int
    spares: int
    shrinks: bool = False
    is_cold: bool = True
    """Whether nodes that are no spares may be asked for."""


LAYOUTS = [
    Layout("400 wait", 400, 0),
    Layout("400 shrink", 400, 0, shrinks=True),
    Layout("384 cold", 384, 0),
    Layout("384+4", 384, 4),
    Layout("384+16", 384, 16),
    Layout("368+32", 368, 32),
    Layout("368+32 shrink", 368, 32, shrinks=True),
]


def main() -> None:
    parser = benchmark_parser(__doc__, quick="two layouts for 20 days, to see that it works")
    parser.add_argument("--trace", type=Path, default=TRACE, help="fault_trace.json of InfiniteHBD-Trace")
    parser.add_argument("--seed", type=int, default=1, help="which nodes begin in the job, and which come")
    parser.add_argument("--layouts", nargs="*", default=[layout.name for layout in LAYOUTS])
    parser.add_argument("--days", type=float, default=YEAR_DAYS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layouts, arguments.days = ["384 cold", "384+16"], 20.0
    if not arguments.trace.exists():
        print(f"left out: the faults are not there: {arguments.trace}")
        return
    faults = read_trace(arguments.trace)
    pace = Pace()
    print(f"{len(faults)} faults, seed {arguments.seed}, {arguments.days:g} days; seconds assumed:")
    print("  " + ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(pace).items()))
    print(ROW.format(*HEAD))
    for layout in LAYOUTS:
        if layout.name in arguments.layouts:
            show(layout, faults, arguments.seed, arguments.days, pace)


def simulate(layout: Layout, faults: list[Fault], seed: int, days: float, pace: Pace) -> Tally:
    """A job of this layout through all of the faults."""
    smaller = tuple(range(layout.hosts // 2, layout.hosts, 8)) if layout.shrinks else ()
    job = Job("year", layout.hosts, workers_per_host=8, spares=layout.spares, allowed_hosts=smaller)
    policy = Policy(
        when_missing="shrink" if layout.shrinks else "wait",
        give_up_s=0.0,
        replace_slow=True,
        passive_check_s=30.0,
        quick_check_s=60.0,
    )
    named = sorted({fault.node for fault in faults})
    nodes = [*named, *(f"healthy-{number}" for number in range(NODES - len(named)))]
    return Cluster(job, policy, nodes, faults, seed, pace).run(days * DAY_S)


def show(layout: Layout, faults: list[Fault], seed: int, days: float, pace: Pace) -> None:
    began_s = time.process_time()
    seen = simulate(layout, faults, seed, days, pace)
    total_s = days * DAY_S
    effective = seen.work_s / total_s
    each_s = (total_s - seen.work_s) / max(seen.recoveries, 1)
    print(
        ROW.format(
            layout.name,
            layout.hosts,
            layout.spares,
            f"{effective:.2%}",
            f"{effective * layout.hosts / NODES:.2%}",
            f"{seen.waited_s / total_s:.2%}",
            f"{seen.lost_s / total_s:.2%}",
            f"{each_s:.0f}",
            seen.recoveries,
            seen.evictions,
            seen.wrong,
            len(seen.endings),
        ),
        f" {seen.decisions} decisions in {time.process_time() - began_s:.0f} s of CPU time",
        flush=True,
    )
    for ending in dict.fromkeys(seen.endings):
        print(f"    ended with {ending[:160]}")


if __name__ == "__main__":
    main()
