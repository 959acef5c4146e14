"""The paper's Minder, its baselines and its ablations beside `phalanx detect machines`; how sure that is; how fast.

    python benchmarks/minder_compare.py calibrate            # thresholds of the paper's method and what it compares
    python benchmarks/minder_compare.py variants             # how well each does on 150 faults
    python benchmarks/minder_compare.py confidence           # ours: confidence against being right, delay after onset
    python benchmarks/minder_compare.py speed                # a full call, an increment, memory

On the final split, on which nothing was tuned: weights come from `train_minder.py`, ours also from
`calibrate_minder.py`. `detect_machines.py` scores ours by class and in healthy hours. With `--keep FOLDER` what was
found of each job is written there as soon as it is known, and taken from there the next time.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.harness import benchmark_parser, machine, write_json
from support.minder_candidates import JobCandidates, of_jobs
from support.minder_scores import (
    NUMBERS,
    SIZES,
    PaperNumbers,
    as_json,
    calibrate,
    calibration_faults,
    calm_jobs,
    healthy_jobs,
    judged,
    score_line,
    table_of,
)
from support.minder_variants import MINDER, VARIANTS

from phalanx.detect.minder.machine_judge import judge_machines
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.online_minder import OnlineMinder
from phalanx.detect.monitoring.detection_scores import score
from phalanx.detect.monitoring.job_scenarios import Scenario, draw_scenario, fault_scenarios
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate
from phalanx.detect.monitoring.metric_table import MetricTable

SPLIT = "final"


def chosen(scenarios: Iterator[Scenario], most_machines: int) -> Iterator[Scenario]:
    return (one for one in scenarios if one.machines <= most_machines)


def judge_confidence(cases: int, most_machines: int) -> dict[str, Any]:
    """Ours, with all 21 metrics: how often incidents of each confidence are right, and how late they are told."""
    late_s, sure, judged = [], [], []
    for scenario in chosen(fault_scenarios(SPLIT, cases), most_machines):
        case = generate(scenario, tuple(CATALOGUE))
        verdict, fault = judge_machines(case.table), case.labels.faults[0]
        judged.append((verdict, case.labels))
        for one in verdict.detections:
            is_right = bool(set(one.blamed_hosts) & set(fault.machines))
            sure.append((one.confidence, is_right))
            if is_right:
                late_s.append(float(one.figures["raised_unix_s"]) - fault.start_unix_s - 240)
    found = score(judged)
    print(f"ours, 21 metrics given: {score_line(found)}", flush=True)
    guesses = [one.guess == one.fault for one in found.outcomes if one.is_found]
    late = np.quantile(late_s, [0.5, 0.9, 1]).round(1).tolist() if late_s else []
    print(f"class guessed right: {np.mean(guesses) if guesses else 0:.0%}; alarms after onset + 240 s: {late} s")
    for low, high in ((0, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        of_bin = [is_right for confidence, is_right in sure if low <= confidence < high]
        if of_bin:
            print(f"  confidence {low:.2f} to {min(high, 1):.2f}: {len(of_bin)} incidents, {np.mean(of_bin):.0%} right")
    return {"score": found.as_json(), "late_s": late_s, "sure": sure}


def judge_variants(
    split: str, cases: int, calm: int, most_machines: int, names: list[str], kept: Path | None
) -> dict[str, Any]:
    """The paper's method, its baselines and ablations, each on the same tables, small ones first."""
    numbers = PaperNumbers.read()
    variants = {name: VARIANTS[name] for name in names}
    scenarios = chosen(iter([*fault_scenarios(split, cases), *calm_jobs(split, calm)]), most_machines)
    jobs: list[JobCandidates] = []
    for job in of_jobs(sorted(scenarios, key=lambda one: one.machines), variants.values(), kept):
        jobs.append(job)
        if len(jobs) % 25 == 0:
            print(f"{len(jobs)} jobs, the last of {job.labels.machines} machines", flush=True)
    found = {name: judged(jobs, variant, numbers.healthy, numbers.factors[name]) for name, variant in variants.items()}
    print("\n".join(table_of(found)))
    return as_json(found)


def measure_speed(sizes: list[int], minutes: int = 15) -> dict[str, Any]:
    """One call on stored data, and an increment of a second, of jobs of several sizes; ascending, as memory adds up."""
    figures: dict[str, Any] = {}
    for machines in sizes:
        scenario = draw_scenario("test", 3, fault="PCIe downgrading", machines=machines, duration_s=60 * minutes)
        table = generate(scenario, DETECTED).table
        before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        walls, cpus = [], []
        for _ in range(3 if machines < 5000 else 1):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            judge_machines(table, MinderPolicy())
            walls.append(time.perf_counter() - wall_s)
            cpus.append(time.process_time() - cpu_s)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        steps = increments_s(table)
        figures[str(machines)] = {
            "call_s": min(walls), "call_processor_s": min(cpus), "increment_processor_s": statistics.median(steps),
            "longest_increment_processor_s": max(steps), "peak_mib": peak_mib, "before_mib": before_mib,
        }  # fmt: skip
        print(f"{machines:6d} machines x {len(DETECTED)} metrics x {minutes} min: a call {min(walls):.2f} s "
              f"({min(cpus):.2f} s of processors), an increment {1000 * statistics.median(steps):.0f} ms of them "
              f"(at most {1000 * max(steps):.0f}), memory {peak_mib:.0f} MiB at most ({before_mib:.0f} before)",
              flush=True)  # fmt: skip
    return figures


def increments_s(table: MetricTable, first: int = 100, count: int = 60) -> list[float]:
    """Of processors, for samples that come one by one once habits are known."""
    minder = OnlineMinder(len(table.machines), table.metrics, MinderPolicy(), shipped_numbers())
    scaled = normalise(table.between(0, first + count)).values
    minder.add(scaled[:, :, :first])
    steps = []
    for at in range(first, first + count):
        cpu_s = time.process_time()
        minder.add(scaled[:, :, at : at + 1])
        steps.append(time.process_time() - cpu_s)
    return steps


def main() -> None:
    parser = benchmark_parser(__doc__, "few and small jobs", as_json=True)
    parser.add_argument("parts", nargs="*", default=["variants", "confidence", "speed"], metavar="PART")
    parser.add_argument("--split", default=SPLIT, choices=["develop", "test", "final"], help="of variants")
    parser.add_argument("--cases", type=int, default=150, help="faults")
    parser.add_argument("--calm", type=int, default=60, help="healthy jobs, of variants")
    parser.add_argument("--machines", type=int, default=1500, help="leave out larger jobs")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of candidates, for calibrate and variants")
    parser.add_argument("--sizes", nargs="*", type=int, default=[1500, 12_500], metavar="N", help="machines, of speed")
    parser.add_argument("--numbers", type=Path, default=NUMBERS, metavar="FILE", help="that calibrate writes")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.calm, options.machines = 24, 4, 40
    print(machine())
    figures: dict[str, Any] = {}
    for part in options.parts:
        started_s = time.process_time()
        if part == "calibrate":
            healthy = healthy_jobs({4: 1, 16: 1} if options.quick else SIZES)
            faulty = calibration_faults(options.cases, options.machines)
            calibrate(options.keep, healthy, faulty).write(options.numbers)
        elif part == "variants":
            names = list(dict.fromkeys([MINDER, *options.variants]))
            figures[part] = judge_variants(
                options.split, options.cases, options.calm, options.machines, names, options.keep
            )
        elif part == "confidence":
            figures[part] = judge_confidence(options.cases, options.machines)
        else:
            figures[part] = measure_speed([40] if options.quick else sorted(options.sizes), 6 if options.quick else 15)
        print(f"{part}: {time.process_time() - started_s:.0f} s of processors", flush=True)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
