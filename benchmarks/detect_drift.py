"""How much drift of step times is found, how soon, what is blamed, and how often a healthy run is; the same of losses.

    python benchmarks/detect_drift.py                   # all; some ten minutes on one core
    python benchmarks/detect_drift.py --seeds 1         # fewer runs
    python benchmarks/detect_drift.py --only loss
    python benchmarks/detect_drift.py --runs runs/*     # verdicts on runs that are there

Runs are made by `support/drifting_runs.py` (400 steps of 8 ranks, evaluations and checkpoints among them) and judged
from their files, as `phalanx detect drift` does. Curves of losses are those of `support/loss_curves.py`.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.drifting_runs import Drift, DriftingRun, Noise
from support.harness import benchmark_parser, write_json
from support.loss_curves import HealthyCurve, Trouble, with_trouble

from phalanx.detect.drift import drift_judge, loss_judge
from phalanx.detect.drift.drift_judge import DriftPolicy, judge
from phalanx.detect.drift.step_series import StepSeries, read_series

NOISES = {
    "quiet": Noise(0.004, 0.002, 0.0, 0.005),
    "usual": Noise(),
    "noisy": Noise(0.04, 0.02, 0.01, 0.03),
}
ONSET, STEPS = 160, 400
PLACES: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "data": ("data", None),
    "forward": ("forward", None),
    "backward": ("backward", None),
    "optimizer": ("optimizer", None),
    "outside spans": ("outside spans", None),
    "bytes": ("bytes", None),
    "skew": ("skew", None),
    "one rank": ("forward", (3,)),
    "one host": ("backward", (4, 5)),
}
"""What drifts: the part, and on which ranks."""
SEVERAL = {"forward": 140, "optimizer": 260}
"""Parts that jump in one run, and from which step on."""
TROUBLES: dict[Trouble, str] = {
    "bad batch": "loss spike",
    "bad update": "loss spike",
    "divergence": "divergence",
    "slow divergence": "divergence",
    "odd gradient": "gradient spike",
    "not finite": "not finite",
}


def main() -> None:
    parser = benchmark_parser(__doc__, "one seed of a few drifts and curves", as_json=True)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case (default 3)")
    parser.add_argument("--healthy", type=int, default=300, help="healthy runs (default 300)")
    tables = ["drift", "several", "healthy", "delay", "speed", "loss"]
    parser.add_argument("--only", choices=tables, help="one of the tables")
    parser.add_argument("--runs", type=Path, nargs="*", help="judge these instead")
    args = parser.parse_args()
    if args.runs:
        judge_runs(args.runs)
        return
    seeds, healthy = (1, 6) if args.quick else (args.seeds, args.healthy)
    growths = (0.1,) if args.quick else (0.02, 0.05, 0.1, 0.2, 0.3)
    noises = ("usual",) if args.quick else tuple(NOISES)
    figures: dict[str, Any] = {}
    if args.only in (None, "drift"):
        figures["drift"] = sweep(growths, noises, seeds)
    if args.only in (None, "several"):
        figures["several"] = several((0.1,) if args.quick else (0.05, 0.1, 0.2), noises, 2 if args.quick else 10)
    if args.only in (None, "healthy"):
        figures["healthy"] = healthy_runs(healthy, noises)
    if args.only in (None, "delay"):
        figures["delay"] = delays((0.1, 0.3) if args.quick else growths[1:], noises, seeds)
    if args.only in (None, "speed"):
        figures["speed"] = speed(*((8, 400) if args.quick else (256, 2000)))
    if args.only in (None, "loss"):
        figures["loss"] = losses(2 if args.quick else 40, 6 if args.quick else 600)
    write_json(args.json, figures)


def made(run: DriftingRun, *, spans: bool = True) -> StepSeries:
    """A run as its files say it."""
    with tempfile.TemporaryDirectory() as folder:
        return read_series(run.write(Path(folder) / "run", spans=spans))


def cases(growths: Sequence[float], noises: Sequence[str], seeds: int) -> Iterator[tuple[str, DriftingRun]]:
    """Each place, growth, shape and noise."""
    for place, growth, shape, noise, seed in itertools.product(
        PLACES, growths, ("jump", "creep"), noises, range(seeds)
    ):
        part, ranks = PLACES[place]
        drift = Drift(part, growth, shape, ONSET, ranks)  # type: ignore[arg-type]
        yield place, DriftingRun(8, STEPS, drift, NOISES[noise], 50, 40, seed=seed)


def sweep(growths: Sequence[float], noises: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """How many drifts are found by growth and noise, whether the cause is right, and what is taken for what."""
    rows = []
    confused: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for place, run in cases(growths, noises, seeds):
        assert run.drift is not None
        series = made(run)
        found = judge(series, DriftPolicy()).detections
        alone = judge(replace(series, parts={}, waits={}, latest={}), DriftPolicy()).detections
        named = _named(found[0].figures, found[0].who) if found else "nothing"
        confused[place][named] += 1
        noise = next(name for name, one in NOISES.items() if one == run.noise)
        row = {"place": place, "growth": run.drift.growth, "shape": run.drift.shape, "noise": noise, "named": named}
        row |= {"found": bool(found), "right": named == place, "without_spans": bool(alone), "told": len(found)}
        if found:
            row |= {"onset_off": abs((found[0].since.step or 0) - ONSET), "said_shape": found[0].figures["shape"]}
        rows.append(row)
    print(f"\nDrifts of {STEPS} steps of 8 ranks since step {ONSET}: found / cause right, of so many")
    print(f"{'growth':>8} {'shape':>6}", *(f"{noise:>18}" for noise in noises))
    for growth, shape in itertools.product(growths, ("jump", "creep")):
        cells = []
        for noise in noises:
            chosen = [r for r in rows if (r["growth"], r["shape"], r["noise"]) == (growth, shape, noise)]
            found_, right = sum(r["found"] for r in chosen), sum(r["right"] for r in chosen)
            cells.append(f"{found_:>5} / {right} of {len(chosen)}")
        print(f"{growth:>8.0%} {shape:>6}", *(f"{cell:>18}" for cell in cells))
    names = [*PLACES, "nothing", *sorted({n for c in confused.values() for n in c} - {*PLACES, "nothing"})]
    print("\nWhat drifted (rows) and what was named")
    print(f"{'':>14}", *(f"{name[:8]:>9}" for name in names))
    for place in PLACES:
        print(f"{place:>14}", *(f"{confused[place][name] or '.':>9}" for name in names))
    off = [row["onset_off"] for row in rows if row["found"] and row["shape"] == "jump"]
    creeps = [row["onset_off"] for row in rows if row["found"] and row["shape"] == "creep"]
    shapes = [row["said_shape"] == row["shape"] for row in rows if row["found"]]
    print(f"\nonset off by, median: jumps {statistics.median(off):.0f} steps, creeps {statistics.median(creeps):.0f}")
    print(f"shape right in {sum(shapes)} of {len(shapes)}")
    print(f"told as more than one: {sum(r['told'] > 1 for r in rows)}")
    print(f"step seconds alone (no spans) find {sum(r['without_spans'] for r in rows)} of {len(rows)}")
    return rows


def several(growths: Sequence[float], noises: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Two jumps of other parts in one run: whether both are told, each with its own onset, and its own cause."""
    rows = []
    for growth, noise, seed in itertools.product(growths, noises, range(seeds)):
        jumps = [Drift(part, growth, "jump", onset) for part, onset in SEVERAL.items()]
        run = DriftingRun(8, STEPS, jumps[0], NOISES[noise], 50, 40, seed=seed, more=tuple(jumps[1:]))
        found = judge(made(run), DriftPolicy()).detections
        near = {
            part: [one for one in found if abs((one.since.step or 0) - onset) <= 5] for part, onset in SEVERAL.items()
        }
        is_right = [_named(ones[0].figures, ones[0].who) == part for part, ones in near.items() if ones]
        row = {"growth": growth, "noise": noise, "told": len(found), "onsets": len(is_right), "causes": sum(is_right)}
        rows.append(row)
    print(f"\nTwo jumps ({' and '.join(f'{part} at {at}' for part, at in SEVERAL.items())}): both onsets / both causes")
    print(f"{'growth':>8}", *(f"{noise:>18}" for noise in noises))
    for growth in growths:
        cells = []
        for noise in noises:
            chosen = [row for row in rows if (row["growth"], row["noise"]) == (growth, noise)]
            both = [sum(row[name] == len(SEVERAL) for row in chosen) for name in ("onsets", "causes")]
            cells.append(f"{both[0]:>5} / {both[1]} of {len(chosen)}")
        print(f"{growth:>8.0%}", *(f"{cell:>18}" for cell in cells))
    odd = sum(row["told"] > len(SEVERAL) for row in rows)
    one = sum(row["told"] == 1 for row in rows)
    print(f"told as more than two: {odd} of {len(rows)}; as one: {one}; as none: {sum(not r['told'] for r in rows)}")
    return rows


def _named(figures: Any, who: Sequence[Any]) -> str:
    """As in `PLACES`."""
    if figures.get("cause") == "ranks":
        ranks = tuple(sorted(rank for one in who for rank in one.ranks))
        return {(3,): "one rank", (4, 5): "one host"}.get(ranks, "other ranks")
    if figures.get("cause") in ("bytes", "skew"):
        return str(figures["cause"])
    for start, place in (("waiting for bytes", "bytes"), ("launch skew", "skew")):
        if str(figures.get("part")).startswith(start):
            return place
    return str(figures.get("part") or "unknown")


def healthy_runs(count: int, noises: Sequence[str]) -> dict[str, int]:
    """False alarms: evaluations, checkpoints, a restart, stalls and noise that lasts."""
    alarms: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for seed in range(count):
        noise = noises[seed % len(noises)]
        steps, restart = (150, 400, 1000)[seed % 3], 90 if seed % 2 else 0
        run = DriftingRun(8, steps, None, NOISES[noise], 50, 40, restart, seed + 1000)
        verdict = judge(made(run), DriftPolicy())
        total[noise] += 1
        alarms[noise] += bool(verdict.detections)
        if verdict.detections:
            print("  false alarm:", run.steps, noise, seed, verdict.sentence)
    print(f"\nHealthy runs with a false alarm: {dict(alarms)} of {dict(total)}")
    return {**{f"alarms_{name}": alarms[name] for name in noises}, **{f"runs_{name}": total[name] for name in noises}}


def delays(growths: Sequence[float], noises: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Steps after a jump until it is found, looking every five steps."""
    rows = []
    print("\nSteps from a jump until it is found, median (none: it was not, within 240)")
    print(f"{'growth':>8}", *(f"{noise:>12}" for noise in noises))
    for growth in growths:
        cells = []
        for noise in noises:
            after = []
            for seed in range(max(seeds, 2)):
                run = DriftingRun(8, STEPS, Drift("backward", growth, "jump", ONSET), NOISES[noise], 50, 40, seed=seed)
                series = made(run)
                looks = range(ONSET + 5, STEPS + 1, 5)
                after.append(next((k - ONSET for k in looks if _is_found(series, k)), None))
            known = [one for one in after if one is not None]
            are_all = len(known) == len(after)
            cells.append(f"{statistics.median(known):.0f}" if are_all else f"{len(known)} of {len(after)}")
            rows.append({"growth": growth, "noise": noise, "after_steps": after})
        print(f"{growth:>8.0%}", *(f"{cell:>12}" for cell in cells))
    return rows


def _is_found(series: StepSeries, steps: int) -> bool:
    names = ("step", "start", "step_s", "end_unix_s", "tokens", "mfu")
    arrays = {name: getattr(series, name)[:steps] for name in names}
    return bool(judge(StepSeries(series.run, **arrays, events=series.events), DriftPolicy()).detections)


def speed(ranks: int, steps: int) -> dict[str, float]:
    """Seconds to read and judge a large run."""
    with tempfile.TemporaryDirectory() as folder:
        run = DriftingRun(ranks, steps, Drift("backward", 0.05, onset=steps // 2)).write(Path(folder) / "run")
        began_s = time.perf_counter()
        series = read_series(run)
        read_s = time.perf_counter() - began_s
        found = judge(series, DriftPolicy()).detections
        judged_s = time.perf_counter() - began_s - read_s
    print(f"\n{ranks} ranks x {steps} steps: read in {read_s:.2f} s, judged in {judged_s:.2f} s ({len(found)} found)")
    return {"ranks": ranks, "steps": steps, "read_s": read_s, "judge_s": judged_s}


def losses(seeds: int, healthy: int) -> dict[str, Any]:
    """Trouble by class and size, and false alarms in healthy curves."""
    policy = loss_judge.LossPolicy()
    alarms: collections.Counter[str] = collections.Counter()
    steps_seen = 0
    for seed in range(healthy):
        steps, tail = (200, 1000, 4000)[seed % 3], ("normal", "skewed", "heavy")[seed // 3 % 3]
        noise, bump = (0.005, 0.02, 0.08)[seed // 9 % 3], (0.0, 0.4)[seed % 2]
        curve = HealthyCurve(steps, noise, tail, min(100, steps // 4), bump, seed=seed).curve()  # type: ignore[arg-type]
        steps_seen += steps
        for one in loss_judge.judge(curve, policy).detections:
            alarms[one.what] += 1
            print("  false alarm:", seed, tail, noise, one.sentence)
    print(f"\n{healthy} healthy curves, {steps_seen:,} steps: {sum(alarms.values())} false alarms {dict(alarms)}")
    sizes = (0.1, 0.3, 1.0, 3.0)
    print(f"\nTrouble in 1,000 steps (noise 0.02 nats): class right / batch right, of {seeds}")
    print(f"{'':>16}", *(f"{size:>12} nats" for size in sizes))
    rows = []
    for trouble, what in TROUBLES.items():
        cells = []
        for size in sizes:
            right = batch = 0
            for seed in range(seeds):
                step = 300 + 15 * seed
                curve = with_trouble(HealthyCurve(seed=seed + 5000).curve(), trouble, step, size)
                found = loss_judge.judge(curve, policy).detections
                right += bool(found) and found[0].what == what
                batch += bool(found) and found[0].figures["batch_step"] == step
            cells.append(f"{right:>3} / {batch}")
            rows.append({"trouble": trouble, "size": size, "class_right": right, "batch_right": batch, "of": seeds})
        print(f"{trouble:>16}", *(f"{cell:>17}" for cell in cells))
    curve = HealthyCurve(100_000).curve()
    began_s = time.perf_counter()
    loss_judge.judge(curve, policy)
    print(f"100,000 steps judged in {time.perf_counter() - began_s:.2f} s")
    return {"false_alarms": dict(alarms), "healthy": healthy, "trouble": rows}


def judge_runs(runs: Sequence[Path]) -> None:
    """What both judges say of runs that are there."""
    for run in runs:
        for name, ask in (("drift", drift_judge.judge_run), ("loss", loss_judge.judge_run)):
            try:
                print(f"{run} {name}: {ask(run).sentence}")
            except ValueError as error:
                print(f"{run} {name}: {error}")


if __name__ == "__main__":
    main()
