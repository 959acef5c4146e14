"""Months in a minute: how fast they are played, and whether the recorded year lies where the drawn ones do.

    python benchmarks/plan_months.py                    # speed, and all layouts with 200 years each: some minutes
    python benchmarks/plan_months.py --write-rates      # phalanx/simulate/failures/infinitehbd.toml anew

The layouts, and what recoveries take, are those of benchmarks/run_year.py, which plays the same year against the real
decision function (its figures, seed 1, are printed beside). "memoryless" has the trace's rates and nothing else;
"by hosts" and "by blocks" draw other years from the recorded one. Intervals hold 95 % of the years. The same seed
gives the same figures; only the seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from support.harness import benchmark_parser
from support.months.rates import write_rates

from phalanx.simulate import failure_trace
from phalanx.simulate.failure_model import (
    FOLDER,
    Checkpoints,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
    load_failures,
)
from phalanx.simulate.failure_simulation import RunsOutcome, simulate, simulate_histories

TRACE = Path(__file__).parents[2] / "shared" / "data" / "faults" / "infinitehbd-fault-trace" / "fault_trace.json"


class Layout(NamedTuple):
    """How the 400 nodes are used, and what the real driver's decisions made of them (docs/benchmarks/run.md)."""

    name: str
    hosts: int
    spares: int
    shrinks: bool
    by_driver: float


LAYOUTS = [
    Layout("400 wait", 400, 0, False, 0.0365),
    Layout("400 shrink", 400, 0, True, 0.9576),
    Layout("384 cold", 384, 0, False, 0.8486),
    Layout("384+4", 384, 4, False, 0.8542),
    Layout("384+16", 384, 16, False, 0.8542),
    Layout("368+32", 368, 32, False, 0.9960),
    Layout("368+32 shrink", 368, 32, True, 0.9965),
]


def story_of(layout: Layout, failures: Failures, days: float) -> FailureScenario:
    """As in benchmarks/run_year.py: what recoveries take, and what else is done."""
    return FailureScenario(
        Work(layout.hosts, days=days),
        failures,
        Recovery(detection_s=5.0, restart_s=62.6, find_slow_s=1000.0, saves_first=False),
        Checkpoints(interval_s=300.0, stall_s=0.0),
        Pool(
            spares=layout.spares,
            cold=failure_trace.NODES - layout.hosts - layout.spares,
            provision_s=900.0,
            when_missing="shrink" if layout.shrinks else "wait",
            shrink_by=8,
            smallest_hosts=layout.hosts // 2,
            patience_s=300.0,
        ),
    )


def main() -> None:
    parser = benchmark_parser(__doc__, quick="few runs of two layouts, to see that it works")
    parser.add_argument("--trace", type=Path, default=TRACE, help="fault_trace.json of InfiniteHBD-Trace")
    parser.add_argument("--runs", type=int, default=200, help="years of each kind and layout")
    parser.add_argument("--months", type=int, default=1000, help="months that are timed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", nargs="*", default=[layout.name for layout in LAYOUTS])
    parser.add_argument("--write-rates", action="store_true", help="write the rates of the trace, and nothing else")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.months, arguments.layouts = 5, 20, ["400 shrink", "368+32"]
    if not arguments.write_rates:
        show_speed(arguments.months, arguments.seed)
    if not arguments.trace.exists():
        print(f"left out: the faults are not there: {arguments.trace}")
        return
    faults = failure_trace.read_trace(arguments.trace)
    if arguments.write_rates:
        write_rates(faults, FOLDER / "infinitehbd.toml")
    else:
        show_years(faults, arguments)


def show_speed(months: int, seed: int) -> None:
    """Months of 12,288 GPUs with Meta's rate; in one of two everything happens: memory, shrinking, planned stops."""
    failures = load_failures("meta-rsc1")
    plain = FailureScenario(Work(1536), failures, Recovery(60.0, 300.0), Checkpoints(1800.0, 5.0), Pool(spares=64))
    rich = FailureScenario(
        Work(1536),
        failures,
        Recovery(60.0, 300.0, spread=0.5, planned_per_day=0.9, planned_s=1800.0),
        Checkpoints(1800.0, 5.0, 100.0, memory_interval_s=10.0, memory_stall_s=0.05),
        Pool(spares=16, provision_s=900.0, when_missing="shrink", shrink_by=64),
    )
    for name, scenario in (("spares that last", plain), ("all that there is", rich)):
        began_s, used_s = time.perf_counter(), time.process_time()
        outcome = simulate(scenario, months, seed)
        seconds, used_s = time.perf_counter() - began_s, time.process_time() - used_s
        ettr = f"ETTR {outcome.ettr.mean:.2%} ({outcome.ettr.low:.2%} to {outcome.ettr.high:.2%})"
        print(f"{months} months of 12,288 GPUs, {name}: {seconds:.1f} s, {used_s:.1f} s of CPU time; {ettr}")


def show_years(faults: list[failure_trace.Fault], arguments: argparse.Namespace) -> None:
    """Every layout through the recorded year, and through years drawn in each way."""
    runs, seed = arguments.runs, arguments.seed
    rates = failure_trace.rates_of(faults)
    histories = {
        "recorded": failure_trace.replay(faults, runs, seed),
        "by hosts": failure_trace.by_hosts(faults, runs, seed),
        "by blocks": failure_trace.by_blocks(faults, runs, seed),
    }
    print(f"{len(faults)} faults; effective time, of {runs} years each; * the recorded year is not in the interval")
    print(f"{'layout':15} {'driver':>8} {'recorded':>9} {'memoryless':>26} {'by hosts':>26} {'by blocks':>26}")
    for layout in LAYOUTS:
        if layout.name not in arguments.layouts:
            continue
        scenario = story_of(layout, rates, failure_trace.DAYS)
        seen = {name: simulate_histories(scenario, [history], seed) for name, history in histories.items()}
        seen["memoryless"] = simulate(scenario, runs, seed)
        year = seen["recorded"].ettr.mean
        cells = [f"{_interval(seen[name], year):>26}" for name in ("memoryless", "by hosts", "by blocks")]
        print(f"{layout.name:15} {layout.by_driver:8.2%} {year:9.2%} {' '.join(cells)}", flush=True)


def _interval(outcome: RunsOutcome, year: float) -> str:
    ettr = outcome.ettr
    is_in = ettr.least <= year <= ettr.most
    return f"{ettr.mean:.2%} {ettr.least:.2%}–{ettr.most:.2%}{' ' if is_in else '*'}"


if __name__ == "__main__":
    main()
