"""How fast, tight and right the planner's pipelines are: exact steps, bounds, waiting; against a trace of a real job.

Examples:

    python benchmarks/plan_pipeline.py
    python benchmarks/plan_pipeline.py --timeline timeline-AR.json.gz

The timeline is that of ByteDance's github.com/ByteDance-Seed/StragglerAnalysis, folder data (Chrome trace events).
"""

from __future__ import annotations

import collections
import gzip
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.harness import benchmark_parser

from phalanx.parallel.config import Schedule
from phalanx.plan.overheads import Spread, waiting
from phalanx.plan.pipeline import grid
from phalanx.plan.pipeline.bounds import StagePasses, lower_bound
from phalanx.plan.pipeline.step_time import StageCosts, evaluate

STEPS: list[tuple[Schedule, int, int, int]] = [
    ("1f1b", 8, 1, 192),
    ("1f1b", 64, 1, 2000),
    ("interleaved_1f1b", 8, 6, 32),
    ("interleaved_1f1b", 8, 6, 192),
    ("interleaved_1f1b", 35, 3, 350),
    ("interleaved_zero_bubble", 8, 2, 192),
    ("zbv", 8, 2, 192),
]
CHUNKS: dict[Schedule, int] = {"1f1b": 1, "interleaved_1f1b": 6, "interleaved_zero_bubble": 2, "zbv": 2}


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """CPU time, the least of some runs."""
    best = math.inf
    for _ in range(repeats):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return 1e3 * best


def model(stages: int, head: float, *, blocking: bool = False) -> StageCosts:
    """Equal stages but for the last one's loss head; messages of a twentieth of a forward pass."""
    forward = np.ones(stages)
    forward[-1] += head
    return StageCosts(forward, 2 * forward, forward, forward, np.full(stages - 1, 0.05), blocking)


def uneven(stages: int) -> StageCosts:
    """Stages that differ by up to a tenth, whose rounds take long to become alike."""
    parts = np.random.default_rng(0).uniform(1, 1.1, (4, stages))
    return StageCosts(*parts, np.full(stages - 1, 0.05))


def exact(repeats: int) -> None:
    """Time of exact steps."""
    print("one step, CPU ms                                     actions    first    a model  uneven stages")
    for schedule, ranks, chunks, count in STEPS:
        stages = ranks * chunks
        parts = 3 if schedule in ("interleaved_zero_bubble", "zbv") else 2
        costs = [model(stages, 0.2), uneven(stages)]
        grid._make_grid.cache_clear()
        first = milliseconds(lambda: evaluate(schedule, ranks, chunks, count, costs[0]), 1)  # noqa: B023
        later = [milliseconds(lambda: evaluate(schedule, ranks, chunks, count, each), repeats) for each in costs]  # noqa: B023
        name = f"{schedule}, {ranks} ranks, {chunks} chunks, {count} micro-batches"
        print(f"{name:58}{parts * stages * count:8,}{first:9.2f}{later[0]:9.2f}{later[1]:9.2f}")


def bounds(layouts: int, repeats: int) -> None:
    """Time of bounds of many layouts, and how far they are below exact steps of models."""
    random = np.random.default_rng(0)
    ranks = random.integers(1, 65, layouts)
    counts = ranks * random.integers(1, 200, layouts)
    seconds = random.uniform(0.1, 1, layouts)
    print(f"\nbounds of {layouts:,} layouts                   ms    below the exact step, mean and most")
    for schedule, chunks in CHUNKS.items():
        middle, last = StagePasses(seconds, 2 * seconds), StagePasses(1.2 * seconds, 2.4 * seconds)
        took = milliseconds(
            lambda: lower_bound(schedule, ranks, chunks, counts, middle, middle, last, 0.05 * seconds),  # noqa: B023
            repeats,
        )
        gaps = [gap(schedule, rank, chunks, rounds * rank) for rank in (2, 4, 8, 12) for rounds in (2, 4, 16)]
        print(f"{schedule:40}{took:8.0f}{100 * np.mean(gaps):12.2f} %{100 * max(gaps):8.2f} %")


def gap(schedule: Schedule, ranks: int, chunks: int, count: int) -> float:
    """How far the bound is below the exact step, over messages that are hidden and that block."""
    stages, gaps = ranks * chunks, []
    split = schedule in ("interleaved_zero_bubble", "zbv")
    middle = StagePasses(1.0, 1.0, 1.0) if split else StagePasses(1.0, 2.0)
    for head in (0.0, 0.2, 1.0):
        more = 1 + head
        last = StagePasses(more, more, more) if split else StagePasses(more, 2 * more)
        for blocking in (False, True):
            span = evaluate(schedule, ranks, chunks, count, model(stages, head, blocking=blocking)).span_s
            low = lower_bound(schedule, ranks, chunks, count, middle, middle, last, 0.05, blocking=blocking)
            gaps.append(1 - float(low) / span)
    return max(gaps)


def slow_ranks(repeats: int) -> None:
    """Time of the expected wait for the slowest rank."""
    spread = Spread(0.01, 0.01, 0.005, 0.1)

    def one() -> object:
        return waiting(spread, "interleaved_1f1b", 8, 6, 32, 192, 12_288, 8, 5.0)

    print(
        f"\nwaiting for the slowest rank, ms: first {milliseconds(one, 1):.1f}, later {milliseconds(one, repeats):.3f}"
    )


Times = dict[tuple[str, int, int], np.ndarray]
"""Seconds by what, data-parallel rank and stage: arrays of (begin or duration, step, micro-batch)."""


def read_timeline(path: Path) -> tuple[Times, float]:
    """The passes of a trace, and the median time of a message."""
    events = json.loads(gzip.decompress(path.read_bytes()))
    stages = {
        (event["pid"], event["tid"]): int(event["args"]["name"].split()[2].rstrip(","))
        for event in events
        if event.get("name") == "thread_name"
    }
    found = collections.defaultdict(list)
    for event in events:
        if event.get("name") in ("forward-compute", "backward-compute"):
            key = (event["name"][0], event["pid"], stages[event["pid"], event["tid"]])
            found[key].append((event["args"]["step"], event["args"]["mb_id"], event["ts"] / 1e6, event["dur"] / 1e6))
    sends = [event["dur"] / 1e6 for event in events if event.get("name") in ("forward-send", "backward-send")]
    steps = len({step for step, *_ in next(iter(found.values()))})
    times = {key: np.array(sorted(rows))[:, 2:].reshape(steps, -1, 2).transpose(2, 0, 1) for key, rows in found.items()}
    return times, float(np.median(sends))


def against_trace(path: Path) -> None:
    """Measured time of each pipeline's passes, from the first to the last, beside that of `evaluate`."""
    times, send = read_timeline(path)
    groups, stages = (1 + max(key[place] for key in times) for place in (1, 2))
    count = times["f", 0, 0].shape[2]
    print(
        f"{groups} pipelines of {stages} stages, {count} micro-batches, messages of {1e3 * send:.2f} ms; mean step, s"
    )
    print("pipeline   forward, s                    backward, s                   measured   hidden sends  blocking")
    for group in range(groups):
        rows = [np.stack([times[what, group, stage] for stage in range(stages)]) for what in "fb"]
        forward, backward = (row[:, 1].mean(axis=(1, 2)) for row in rows)
        begins, ends = rows[0][:, 0].min(axis=(0, 2)), rows[1].sum(axis=1).max(axis=(0, 2))
        measured = float((ends - begins).mean())
        spans = [
            evaluate("1f1b", stages, 1, count, StageCosts(forward, backward, *2 * [backward], sends, blocking)).span_s
            for sends in [np.full(stages - 1, send)]
            for blocking in (False, True)
        ]
        errors = "".join(f"{span:8.3f} {100 * (span / measured - 1):+5.2f} %" for span in spans)
        print(f"{group:8}   {forward.round(4)!s:30}{backward.round(4)!s:30}{measured:8.3f}{errors}")
    spreads(times, groups, stages)


def spreads(times: Times, groups: int, stages: int) -> None:
    """How unequal ranks and passes are, leaving out the last stage, which has the loss head, and any slow rank."""
    pairs = np.array([[times["f", g, s][1] + times["b", g, s][1] for s in range(stages - 1)] for g in range(groups)])
    means = pairs.mean(axis=(2, 3))
    healthy = means < 1.2 * np.median(means)
    own = pairs / means[:, :, None, None]
    shared = own.mean(axis=1, keepdims=True)
    beyond = np.sqrt((stages - 1) / (stages - 2)) * (own - shared)[healthy.all(axis=1)].std()
    lasting = means[healthy].std() / means[healthy].mean()
    print(f"\n{healthy.sum()} healthy ranks: from rank to rank {100 * lasting:.2f} %")
    print(f"from pass to pass {100 * own[healthy].std():.2f} %, of it not shared by all stages {100 * beyond:.2f} %")


def main() -> None:
    """Print tables."""
    parser = benchmark_parser(__doc__, quick="fewer repeats and layouts")
    parser.add_argument("--timeline", type=Path, help="compare with this trace, and do nothing else")
    given = parser.parse_args()
    quick = given.quick
    if given.timeline:
        against_trace(given.timeline)
        return
    exact(3 if quick else 50)
    bounds(30_000 if quick else 300_000, 1 if quick else 5)
    slow_ranks(3 if quick else 50)


if __name__ == "__main__":
    main()
