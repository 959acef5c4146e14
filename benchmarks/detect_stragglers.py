"""Stragglers: the published what-if beside ours, made-up jobs of which it is known who is slow, and what judging costs.

    python benchmarks/detect_stragglers.py                    # all; the sweep takes some minutes
    python benchmarks/detect_stragglers.py --only published   # ByteDance's trace, where it is at hand
    python benchmarks/detect_stragglers.py --only sweep --jobs 4000
    python benchmarks/detect_stragglers.py --only evidence --jobs 600
    python benchmarks/detect_stragglers.py --only cost --ranks 1024

Sweep: layouts, schedules, noise, and what is wrong are drawn by seed. A name is right if the rank is one of those that
were made slow; the share of names that are right is shown by confidence, on seeds that its numbers were not chosen on.
Evidence: the same with a fifth of the evidence that a name needs, so that wrong names are seen too.
"""

from __future__ import annotations

import json
import resource
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc
from support.harness import benchmark_parser, machine, write_json
from support.straggler_traces import BEGIN_NS, MadeUpJob, groups_of, make_spans, write_made_up_run

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.stragglers.span_columns import SpanColumns
from phalanx.detect.stragglers.straggler_facts import gather_facts
from phalanx.detect.stragglers.straggler_judge import StragglerPolicy, judge_stragglers
from phalanx.detect.stragglers.straggler_run import judge_run, run_facts
from phalanx.detect.stragglers.straggler_watch import StragglerWatch
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.trace_imports.importing import import_traces

TRACE = Path(__file__).resolve().parents[2] / "shared/data/traces/straggler-analysis"
PUBLISHED_NAMES = {
    "forward": "forward-compute", "backward": "backward-compute", "forward messages": "forward-pp-comm",
    "backward messages": "backward-pp-comm",
}  # fmt: skip
TRUTHS = ("healthy", "slow rank", "slow host", "unbalanced stage", "uneven lengths", "slow loading", "several slow")
FACTORS = (1.05, 1.1, 1.2, 1.5, 2.0, 3.0)
NOISES = (0.005, 0.02, 0.05, 0.1)
LAYOUTS = (
    {"columns": 2, "stages": 4}, {"columns": 4, "stages": 4}, {"columns": 8, "stages": 1}, {"columns": 8, "stages": 2},
    {"columns": 3, "stages": 2, "tensor": 2}, {"columns": 2, "stages": 2, "tensor": 4},
    {"columns": 4, "stages": 4, "chunks": 2, "schedule": "interleaved_1f1b"},
    {"columns": 4, "stages": 2, "chunks": 2, "schedule": "zbv"},
    {"columns": 4, "stages": 2, "chunks": 2, "schedule": "interleaved_zero_bubble"},
    {"columns": 16, "stages": 2}, {"columns": 1, "stages": 4}, {"columns": 1, "stages": 2, "tensor": 4},
    {"columns": 32, "stages": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    truth: str
    job: MadeUpJob
    factor: float = 0.0
    since: int = 1

    @property
    def guilty(self) -> set[int]:
        return set(self.job.slow) | set(self.job.late)


def draw_case(seed: int) -> Case:
    """A job with something wrong, or nothing."""
    rng = np.random.default_rng([seed, 11])
    layout: dict[str, Any] = dict(LAYOUTS[int(rng.integers(len(LAYOUTS)))])
    noise, steps = float(rng.choice(NOISES)), int(rng.choice([10, 20, 40]))
    job = MadeUpJob(
        **layout, noise=noise, steps=steps, seed=seed, micro_batches=int(rng.choice([4, 8, 16])),
        lasting=float(rng.choice([0.002, 0.005, 0.01])), tail=float(rng.choice([0.0, 0.02, 0.1])),
        ranks_per_host=layout.get("tensor", 1) * int(rng.choice([1, 1, 2])),
    )  # fmt: skip
    truth = TRUTHS[int(rng.choice(len(TRUTHS), p=[0.25, 0.25, 0.1, 0.12, 0.12, 0.06, 0.1]))]
    factor, since = float(rng.choice(FACTORS)), int(rng.choice([1, 1, steps // 2]))
    ranks = rng.permutation(job.ranks)
    if truth == "slow rank":
        return Case(truth, replace(job, slow={int(ranks[0]): (factor, since)}), factor, since)
    if truth == "several slow":
        count = int(rng.integers(2, 4)) if job.columns * job.tensor > 4 else 2
        return Case(truth, replace(job, slow={int(one): (factor, since) for one in ranks[:count]}), factor, since)
    if truth == "slow host":
        host = int(ranks[0]) // job.ranks_per_host
        own = [rank for rank in range(job.ranks) if rank // job.ranks_per_host == host]
        return Case(truth, replace(job, slow=dict.fromkeys(own, (factor, since))), factor, since)
    if truth == "unbalanced stage" and job.stages > 1:
        heavy = float(rng.choice([1.15, 1.3, 1.6, 2.07]))
        return Case(truth, replace(job, heavy={int(rng.integers(job.stages)): heavy}), heavy)
    if truth == "uneven lengths" and job.columns * job.stages > 1:
        spread = float(rng.choice([0.1, 0.2, 0.3, 0.5]))
        return Case(truth, replace(job, lengths=spread), spread)
    if truth == "slow loading":
        late = float(rng.choice([0.03, 0.1, 0.3])) * job.micro_batches / 4
        return Case(truth, replace(job, late={int(ranks[0]): late}), late)
    return Case("healthy", job)


def judge_case(case: Case, policy: StragglerPolicy | None = None) -> JudgeVerdict:
    facts = gather_facts(SpanColumns.of(make_spans(case.job)), groups_of(case.job))
    return judge_stragglers(facts, policy or StragglerPolicy())


def said(case: Case, verdict: JudgeVerdict) -> str:
    """The verdict as a word of the confusion table."""
    blamed = set(verdict.blamed_ranks)
    if blamed - case.guilty:
        return "WRONG NAME"
    if blamed:
        return "named" if blamed == case.guilty else "some named"
    if verdict.detections:
        return verdict.detections[0].what
    return "abstains" if verdict.abstains else "nothing"


def sweep(jobs: int, first_seed: int = 0, policy: StragglerPolicy | None = None) -> dict[str, Any]:
    table: dict[str, Counter[str]] = defaultdict(Counter)
    by_factor: dict[tuple[str, float], Counter[str]] = defaultdict(Counter)
    names: list[dict[str, Any]] = []
    onsets: list[int] = []
    for seed in range(first_seed, first_seed + jobs):
        case = draw_case(seed)
        verdict = judge_case(case, policy)
        word = said(case, verdict)
        table[case.truth][word] += 1
        if case.truth in ("slow rank", "slow host", "several slow"):
            peers = "alone" if case.job.columns * case.job.tensor == 1 else "with peers"
            by_factor[peers, case.factor][word] += 1
        for found in verdict.detections:
            if not found.blamed_ranks:
                continue
            is_right = set(found.blamed_ranks) <= case.guilty
            step = found.since.step
            if is_right and case.job.slow and step is not None:
                onsets.append(abs(step - case.since))
            names.append(
                {"seed": seed, "truth": case.truth, "what": found.what, "confidence": found.confidence,
                 "right": is_right, "noise": case.job.noise, "advice": found.advice, **found.figures}
            )  # fmt: skip
    return {
        "jobs": jobs,
        "table": {truth: dict(words) for truth, words in table.items()},
        "by_factor": {f"{peers} {factor}": dict(words) for (peers, factor), words in sorted(by_factor.items())},
        "names": names,
        "onset_steps": {str(q): float(np.quantile(onsets, q)) for q in (0.5, 0.9, 0.99)} if onsets else {},
    }


def show_sweep(found: dict[str, Any]) -> None:
    words = sorted({word for row in found["table"].values() for word in row})
    print(f"\n### {found['jobs']} made-up jobs\n\n| what is wrong | jobs | " + " | ".join(words) + " |")
    print("|---|" + "---|" * (len(words) + 1))
    for truth in TRUTHS:
        row = found["table"].get(truth, {})
        print(f"| {truth} | {sum(row.values())} | " + " | ".join(str(row.get(word, "")) for word in words) + " |")
    print("\n| slow by, peers in the stage | jobs | all named | some named | not named | wrong name |\n|" + "---|" * 6)
    for key, row in found["by_factor"].items():
        named, some, wrong = row.get("named", 0), row.get("some named", 0), row.get("WRONG NAME", 0)
        total = sum(row.values())
        peers, _, factor = key.rpartition(" ")
        print(f"| {factor}x, {peers} | {total} | {named} | {some} | {total - named - some - wrong} | {wrong} |")
    print("\n| confidence | names | right |\n|---|---|---|")
    for low, high in ((0.5, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 0.98), (0.98, 1.01)):
        own = [one for one in found["names"] if low <= one["confidence"] < high]
        share = f"{np.mean([one['right'] for one in own]):.1%}" if own else ""
        print(f"| {low} to {min(high, 1.0)} | {len(own)} | {share} |")
    evicted = [one for one in found["names"] if one["advice"] == "evict"]
    print(f"\neviction advised {len(evicted)} times, right {sum(one['right'] for one in evicted)}")
    print(f"onset is off by steps (quantiles): {found['onset_steps']}")
    for one in [one for one in found["names"] if not one["right"]][:10]:
        print(f"  wrong: {json.dumps(one)}")


def show_evidence(found: dict[str, Any]) -> None:
    """Names by evidence (1: what a name needs) and by how much passes of a rank vary; and the confidence in them."""
    heads = [f"noise {noise:.1%}" for noise in NOISES]
    print(f"\n### {found['jobs']} made-up jobs\n\n| evidence | " + " | ".join([*heads, "all", "right", "said"]) + " |")
    print("|---" * (len(heads) + 4) + "|")
    for low, high in pairwise((0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 1e9)):
        own = [one for one in found["names"] if low <= one.get("strength", -1.0) < high]
        cells = [[one["right"] for one in own if one["noise"] == noise] for noise in NOISES]
        cells.append([one["right"] for one in own])
        shown = [f"{sum(cell)} of {len(cell)}" if cell else "" for cell in cells]
        right = f"{sum(cells[-1]) / len(own):.0%}" if own else ""
        said = f"{np.mean([one['confidence'] for one in own]):.2f}" if own else ""
        print(f"| {low:g} to {high:g} |".replace("to 1e+09", "and more") + f" {' | '.join(shown)} | {right} | {said} |")


def published() -> dict[str, Any] | None:
    """Ours beside the published figures of ByteDance's trace AR."""
    if not TRACE.exists():
        return None
    theirs = json.loads((TRACE / "result-AR.json").read_text())
    with TemporaryDirectory() as folder:
        run = Path(folder) / "AR"
        import_traces([TRACE / "trace-AR.parquet"], run)
        began_s = time.process_time()
        verdict = judge_run(run)
        took_s = time.process_time() - began_s
        facts = run_facts(Trace.open(run), 0, 1 << 40)
    assert facts is not None
    what_if = facts.what_if
    stages, columns = what_if.part_slowdowns(what_if.by_stage_s), what_if.part_slowdowns(what_if.by_column_s)
    rows = [
        ("slowdown S", what_if.slowdown, theirs["blocking_slowdown"]),
        ("launch slowdown", what_if.launch_slowdown, theirs["launch_slowdown"]),
        ("step as recorded, s", what_if.recorded_s.mean(), np.mean(list(theirs["step_t_base"].values()))),
        ("step without delays, s", what_if.replayed_s.mean(), np.mean(list(theirs["step_t_nodelay"].values()))),
        ("ideal step, s", what_if.ideal_s.mean(), np.mean(list(theirs["step_t_noblk"].values()))),
    ]
    rows += [(f"S of stage {at}", stages[at], theirs["blocking_decompose_by_stage"][str(at)]) for at in range(4)]
    rows += [(f"S of dp rank {at}", columns[at], theirs["blocking_decompose_by_dp_rank"][str(at)]) for at in range(4)]
    by_operation = dict(zip(what_if.operations, what_if.part_slowdowns(what_if.by_operation_s), strict=True))
    for name, ours in by_operation.items():
        known = PUBLISHED_NAMES.get(name, name.rpartition(" (")[0] or name.split()[-1])
        rows.append((f"S of {known}", ours, theirs["blocking_decompose_by_optype"][known]))
    for name, ours in (("mw", facts.mw[0]), ("ms", facts.ms[0])):
        published_one = json.loads((TRACE / f"{name}-AR.json").read_text())
        rows.append((f"M_{name[1].upper()}", ours, published_one[name.capitalize()]))
    print(f"\n### ByteDance's trace AR: {verdict.sentence} ({took_s:.2f} s of a core)\n")
    print("| figure | ours | published | apart |\n|---|---|---|---|")
    for name, ours, other in rows:
        apart = f"{ours / other - 1:+.2%}" if abs(other) > 0.1 else f"{ours - other:+.4f}"
        print(f"| {name} | {ours:.4f} | {other:.4f} | {apart} |")
    return {"rows": [(name, float(a), float(b)) for name, a, b in rows], "took_s": took_s}


def cost(ranks: int, steps: int = 12) -> dict[str, Any]:
    """Seconds and memory of judging a run of many ranks at once, and of following it."""
    columns = max(1, ranks // 32)
    job = MadeUpJob(columns=columns, stages=4, tensor=8, micro_batches=16, steps=steps, slow={9: (1.2, 1)})
    with TemporaryDirectory() as folder:
        run, began_ns = Path(folder), BEGIN_NS
        looks, spans_of, watch = list[float](), list[int](), None
        for piece in range(3):
            spans = make_spans(job, first_step=1 + piece * steps // 3, begin_ns=began_ns, steps=steps // 3)
            began_ns = pc.max(spans["end_ns"]).as_py() + 10**6
            write_made_up_run(run, job, spans, piece + 1)
            spans_of.append(len(spans))
            del spans
            watch = watch or StragglerWatch(run)
            began_s = time.process_time()
            watch.look()
            looks.append(time.process_time() - began_s)
        began_s = time.process_time()
        whole = judge_run(run)
        whole_s = time.process_time() - began_s
    assert watch is not None
    kept = sum(getattr(watch._facts, name).nbytes for name in ("own_s", "passes", "data_s", "waited_s"))
    figures = {
        "ranks": job.ranks, "workers": job.columns * job.stages, "steps": steps, "spans": sum(spans_of),
        "spans_of_step": spans_of[0] // (steps // 3), "judge_s": whole_s, "judged": whole.looked_at,
        "look_s_per_step": looks[-1] / (steps // 3), "kept_bytes_per_step": kept / steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "named": list(watch.verdict.blamed_ranks),
    }  # fmt: skip
    print(f"\n### {figures['ranks']} ranks ({figures['workers']} workers), {figures['spans_of_step']:,} spans a step\n")
    print(f"judged at once: {whole.looked_at}: {whole_s:.1f} s of a core;")
    print(f"followed: {figures['look_s_per_step']:.2f} s of a core for each step,")
    print(f"{figures['kept_bytes_per_step']:,.0f} bytes kept a step; peak of the process")
    print(f"{figures['peak_bytes'] / 2**30:.2f} GiB, with the maker of the spans; named: {figures['named']}")
    return figures


def main() -> None:
    parser = benchmark_parser(__doc__, "12 jobs, 64 ranks", as_json=True)
    parser.add_argument("--only", choices=("published", "sweep", "evidence", "cost"))
    parser.add_argument("--jobs", type=int, default=2000, help="of the sweep")
    parser.add_argument("--first-seed", type=int, default=100_000, help="of the sweep; numbers were chosen below")
    parser.add_argument("--ranks", type=int, default=1024, help="of the cost")
    given = parser.parse_args()
    print(machine())
    figures: dict[str, Any] = {}
    if given.only in (None, "published"):
        figures["published"] = published()
    if given.only in (None, "sweep"):
        figures["sweep"] = sweep(12 if given.quick else given.jobs, given.first_seed)
        show_sweep(figures["sweep"])
    if given.only in (None, "evidence"):
        little = StragglerPolicy(evidence=0.2)
        figures["evidence"] = sweep(12 if given.quick else given.jobs, given.first_seed, little)
        show_evidence(figures["evidence"])
    if given.only in (None, "cost"):
        figures["cost"] = cost(64 if given.quick else given.ranks, 6 if given.quick else 12)
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
