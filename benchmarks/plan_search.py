"""Time of one prediction, and of whole searches, on this machine.

A prediction is timed for layouts as people run them, again and again; and for random layouts of 175B that are predicted
for the first time, in processor time: one after another in one process, which remembers what they share; and each as if
it were the first of its process, all that the planner remembers being cleared before. A search includes everything:
enumerating, scoring, exact best, front, sensitivities. The bars of the issue: a prediction under 2 ms, 175B on 12,288
GPUs under 10 s on 2 cores with at least 300,000 layouts left by the divisibility rules. Example:

    python benchmarks/plan_search.py --rounds 3
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from support.harness import benchmark_parser, in_turns, timer, write_json

from phalanx.plan.hardware import Cluster, load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.frontier import CostModel
from phalanx.plan.search.search import search
from phalanx.plan.stages import Known
from phalanx.plan.types import Job, Model, Strategy

GPT_175B = Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048)
GPT_22B = Model(layers=48, hidden=6144, heads=64, vocab_rows=51200, max_sequence=2048)
LLAMA_70B = Model(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    mlp_width=28672,
    gated=True,
    norm="rms",
    position="rotary",
    bias="none",
    dropout=False,
    attention_dropout=False,
    tie_embeddings=False,
    vocab_rows=128_256,
    max_sequence=8192,
)

LAYOUTS: dict[str, tuple[int, Strategy]] = {
    "8 x 8, 6 chunks, 12,288": (
        6144,
        Strategy(pipeline=8, shard=192, tensor=8, chunks=6, schedule="interleaved_1f1b", zero=2),
    ),
    "8 x 8, 6 chunks, 256": (
        768,
        Strategy(pipeline=8, shard=4, tensor=8, chunks=6, schedule="interleaved_1f1b", zero=2),
    ),
    "16 x 8, 1f1b, 1,024": (1536, Strategy(pipeline=16, shard=8, tensor=8)),
    "data parallel alone, 512": (512, Strategy(shard=512, zero=3, recompute="full")),
}
SEARCHES: dict[str, tuple[Job, int, list[str]]] = {
    "22B on 64": (Job(GPT_22B, 2048, 512), 64, []),
    "70B on 2,048": (Job(LLAMA_70B, 8192, 1024), 2048, []),
    "175B on 12,288, batch 1,536": (Job(GPT_175B, 2048, 1536), 12_288, []),
    "175B on 12,288, batch 3,072": (Job(GPT_175B, 2048, 3072), 12_288, []),
    "175B on 12,288, batch 6,144": (Job(GPT_175B, 2048, 6144), 12_288, []),
    "the same without context": (Job(GPT_175B, 2048, 6144), 12_288, ["context=1"]),
}


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one round, and only the smallest search", as_json=True)
    parser.add_argument("--cluster", default="megascale", help="a cluster's name or file")
    parser.add_argument("--rounds", type=int, default=3, help="searches of each kind; the median is shown")
    parser.add_argument("--repeats", type=int, default=50, help="predictions of each layout; the median is shown")
    options = parser.parse_args()
    rounds, repeats, count = (1, 5, 40) if options.quick else (options.rounds, options.repeats, 200)
    searches = dict(list(SEARCHES.items())[:1]) if options.quick else SEARCHES
    figures = {
        "predictions": [_prediction(name, options.cluster, repeats) for name in LAYOUTS],
        "first_predictions": [_first(options.cluster, count, alone=alone) for alone in (False, True)],
        "searches": [_search(name, options.cluster, rounds) for name in searches],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(f"peak memory of this process: {figures['peak_memory_bytes'] / 1e6:,.0f} MB")
    write_json(options.json, figures)


def _prediction(name: str, cluster_name: str, repeats: int) -> dict[str, Any]:
    batch, strategy = LAYOUTS[name]
    job, cluster = Job(GPT_175B, 2048, batch), load_cluster(cluster_name, int(strategy.world_size))
    seconds = _median_s(lambda: predict(job, strategy, cluster), repeats)
    step_s = predict(job, strategy, cluster).step_s
    print(f"predict  {name:32} {seconds * 1e3:8.2f} ms   (a step of {step_s:.2f} s)")
    return {"layout": name, "seconds": seconds, "step_s": step_s}


def _first(cluster_name: str, count: int, *, alone: bool) -> dict[str, Any]:
    random, cluster, seconds = Random(1), load_cluster(cluster_name, 8), []
    predict(Job(GPT_22B, 2048, 512), Strategy(shard=8, zero=3), cluster)  # what every process has to load and to import
    for _ in range(count):
        job, strategy = _random_layout(random)
        if alone:
            cluster = load_cluster(cluster_name, 8)  # which remembers its products
            for forget in _memories():
                forget()
        spread = replace(cluster, devices=int(strategy.world_size))
        begun = time.process_time()
        predict(job, strategy, spread)
        seconds.append(time.process_time() - begun)
    median, late = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
    name = "each alone" if alone else "one after another"
    print(f"first    {name:32} {median * 1e3:8.2f} ms   ({late * 1e3:.2f} ms or less for 95 % of {count} layouts)")
    return {"layouts": count, "alone": alone, "median_s": median, "percentile_95_s": late, "most_s": max(seconds)}


def _random_layout(random: Random) -> tuple[Job, Strategy]:
    """Any that fits 175B: up to 32 pipeline ranks, up to 8 rounds of micro-batches."""
    pipeline, tensor = random.choice((1, 2, 4, 8, 16, 32)), random.choice((1, 2, 4, 8))
    chunks = random.choice([n for n in (1, 2, 3, 6) if pipeline > 1 or n == 1])
    chunks = chunks if pipeline * chunks <= GPT_175B.layers else 1
    shard, rounds = random.choice((2, 8, 48, 192)), random.randint(1, 8)
    strategy = Strategy(
        pipeline=pipeline,
        shard=shard,
        tensor=tensor,
        chunks=chunks,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        zero=random.choice((1, 2)),
        recompute=random.choice(("none", "attention", "full")),
    )
    return Job(GPT_175B, 2048, shard * rounds * pipeline), strategy


def _memories() -> list[Callable[[], None]]:
    """What clears each memory of the planner and of what it calls."""
    modules = [module for name, module in sys.modules.items() if name.startswith("phalanx.")]
    kept = [value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")]
    return [value.cache_clear for value in kept]


def _search(name: str, cluster_name: str, rounds: int) -> dict[str, Any]:
    job, devices, words = SEARCHES[name]
    cluster = load_cluster(cluster_name, devices)
    costs = costs_of(job, cluster)
    found = [search(job, SearchTarget.of(cluster), costs, parse(words)) for _ in range(rounds)]
    seconds, one = statistics.median(each.seconds for each in found), found[0]
    print(
        f"search   {name:32} {seconds:8.2f} s    {one.candidates:,} layouts, {one.fitting:,} fit, "
        f"{one.predicted:,} predicted, best {one.best[0].step_s:.3f} s{'' if one.proven else ', not proven'}"
    )
    return {
        "search": name,
        "seconds": seconds,
        "candidates": one.candidates,
        "fitting": one.fitting,
        "predicted": one.predicted,
        "best_step_s": one.best[0].step_s,
        "proven": one.proven,
    }


def costs_of(job: Job, cluster: Cluster) -> CostModel:
    """The planner's own cost model."""
    known: Known = {}
    return CostModel(
        score=lambda strategy: score(job, strategy, cluster),
        predict=lambda strategy: predict(job, strategy, cluster, known),
    )


def _median_s(run: Callable[[], object], repeats: int) -> float:
    # The first call is not counted: what predictions have in common is remembered in any search, too.
    return statistics.median(in_turns({"": timer(run)}, repeats)[""])


if __name__ == "__main__":
    main()
