"""How soon a slow host is named by its own time, how often a healthy one is, and how fast lines of logs are judged.

    python benchmarks/run_slow_rank.py             # 100 seeds each with and without a slow host; some minutes
    python benchmarks/run_slow_rank.py --seeds 20 --steps 1000
    python benchmarks/run_slow_rank.py --lines     # lines per second of CPU time through the rules

Own times are drawn, not measured: `Noise` says from what. "Delay" is the number of steps from when the host became
slow until it was named; "wrong" counts names of healthy hosts, in all runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from support.harness import benchmark_parser

from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.run.judge.stragglers import SlowConfig, SlowJudge


@dataclass(frozen=True)
class Noise:
    """What makes own times vary; standard deviations are of logarithms.

    Attributes:
        step: of one host from step to step.
        lasting: between healthy hosts, for the whole run.
        drift: of one host over about twenty steps (an autoregression of 0.95 per step).
        common: of all hosts from step to step, such as batches of different lengths.
        tail: share of times with a stall, which is Pareto (1.5) and at most 20 times the step.
        together: share of steps at which all hosts stall, 1.5 times.
        rack: chance per rack and step that it becomes 1.3 times slower for a while, 10 steps on average.
    """

    step: float = 0.04
    lasting: float = 0.01
    drift: float = 0.01
    common: float = 0.05
    tail: float = 0.01
    together: float = 0.01
    rack: float = 0.0005


@dataclass(frozen=True)
class Case:
    """A cluster, its noise, and one host that becomes slow at step `begins` by `ratio`; 1: none does."""

    name: str
    hosts: int = 256
    ratio: float = 1.1
    begins: int = 100
    noise: Noise = Noise()


def own_times(case: Case, seed: int, steps: int) -> Iterator[np.ndarray]:
    """Own times of all hosts, step by step; the slow host is number ``seed % hosts``."""
    noise, hosts, random = case.noise, case.hosts, np.random.default_rng(seed)
    lasting, drift, rack_left = random.normal(0, noise.lasting, hosts), np.zeros(hosts), np.zeros((hosts + 15) // 16)
    for step in range(steps):
        drift = 0.95 * drift + random.normal(0, noise.drift * np.sqrt(1 - 0.95**2), hosts)
        rack_left = np.maximum(rack_left - 1, 0)
        falls = random.random(len(rack_left)) < noise.rack
        rack_left = np.where(falls, random.geometric(0.1, len(rack_left)), rack_left)
        logs = lasting + drift + random.normal(0, noise.step, hosts) + random.normal(0, noise.common)
        logs += np.where(np.repeat(rack_left > 0, 16)[:hosts], np.log(1.3), 0.0)
        logs += np.log(1.5) * (random.random() < noise.together)
        stalls = np.where(random.random(hosts) < noise.tail, np.minimum(random.pareto(1.5, hosts), 19.0), 0.0)
        if step >= case.begins:
            logs[seed % hosts] += np.log(case.ratio)
        yield 0.8 * np.exp(logs) * (1 + stalls)


@dataclass(frozen=True)
class Outcome:
    """Of one run: the delay in steps (None: not named) and the wrong names."""

    delay: int | None
    wrong: int


def run(case: Case, seed: int, steps: int, config: SlowConfig | None = None) -> Outcome:
    names = [f"h{index}" for index in range(case.hosts)]
    judge, delay, wrong = SlowJudge(names, config=config), None, 0
    for step, times in enumerate(own_times(case, seed, steps)):
        for found in judge.observe(step, dict(zip(names, times.tolist(), strict=True))):
            if case.ratio > 1 and step >= case.begins and found.name == names[seed % case.hosts]:
                delay = step - case.begins + 1 if delay is None else delay
            else:
                wrong += 1
    return Outcome(delay, wrong)


QUIET = Noise(step=0.02, drift=0.005, tail=0.002, rack=0.0)
ROUGH = Noise(step=0.10, lasting=0.015, drift=0.02, common=0.2, tail=0.03, together=0.03, rack=0.001)
CASES = [
    Case("1.1x slow"),
    Case("none slow", ratio=1.0),
    Case("1.1x slow, quiet", noise=QUIET),
    Case("none slow, quiet", ratio=1.0, noise=QUIET),
    Case("1.1x slow, rough", noise=ROUGH),
    Case("none slow, rough", ratio=1.0, noise=ROUGH),
    Case("1.3x slow", ratio=1.3),
    Case("1.05x slow", ratio=1.05),
    Case("1.1x slow, 4 hosts", hosts=4),
    Case("none slow, 4 hosts", hosts=4, ratio=1.0),
    Case("1.1x slow, 2 hosts", hosts=2),
    Case("none slow, 2 hosts", hosts=2, ratio=1.0),
    Case("1.1x slow, 1,500 hosts", hosts=1500),
    Case("none slow, 1,500 hosts", hosts=1500, ratio=1.0),
]
ROW = "| {} | {} | {} | {} | {} | {} | {} |"


def report(case: Case, seeds: int, steps: int) -> str:
    outcomes = [run(case, seed, steps) for seed in range(seeds)]
    delays = sorted(outcome.delay for outcome in outcomes if outcome.delay is not None)
    known = f"{len(delays)} of {seeds}" if case.ratio > 1 else ""
    middle = f"{statistics.median(delays):.0f}" if delays else ""
    in_time = f"{sum(delay <= 200 for delay in delays)} of {seeds}" if case.ratio > 1 else ""
    wrong = sum(outcome.wrong for outcome in outcomes)
    return ROW.format(case.name, f"{seeds} × {steps:,}", known, middle, max(delays, default=""), in_time, wrong)


def lines_per_second() -> None:
    matcher = Matcher(load_rules())
    steps = [
        f"[rank{i % 8}] 2026-01-01 12:00:{i % 60:02d} INFO step {i} | loss {2 + i % 7 / 10:.4f} | grad norm 0.513 "
        f"| lr 3.0e-04 | tokens/s {81234 + i} | mfu 0.431"
        for i in range(50_000)
    ]
    kernel = [f"6,{i},{i}000,-;IPv6: ADDRCONF(NETDEV_CHANGE): cali{i:x}: link becomes ready" for i in range(50_000)]
    faulty = ["RuntimeError: CUDA error: an illegal memory access was encountered"] * 50_000
    print(f"{len(matcher.rules)} rules")
    for name, lines, source in (
        ("a line per step of a rank", steps, "output"),
        ("plain text", ["the quick brown fox jumps over the lazy dog, again and again and again"] * 50_000, "output"),
        ("kernel log", kernel, "kernel"),
        ("lines that match", faulty, "output"),
    ):
        begin = time.process_time()
        for line in lines:
            matcher.find(line, source)
        print(f"{name:28} {len(lines) / (time.process_time() - begin):10,.0f} lines per second of CPU time")


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one short run of one case, to see that it works")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--lines", action="store_true", help="measure the rules for lines of logs instead")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.only = 1, 200, CASES[0].name
    if arguments.lines:
        lines_per_second()
        return
    print(ROW.format("case", "runs × steps", "named", "delay, median", "longest", "within 200", "wrong"))
    print(ROW.format(*["---"] * 7))
    for case in CASES:
        if not arguments.only or arguments.only in case.name:
            seeds = max(arguments.seeds // 5, 1) if case.hosts > 1000 else arguments.seeds
            print(report(case, seeds, arguments.steps), flush=True)


if __name__ == "__main__":
    main()
