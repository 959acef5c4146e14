"""How often `phalanx detect logs` names the right class and host of generated incidents, and how fast it reads.

python benchmarks/detect_logs.py              100 incidents of each set of messages, 100 healthy jobs
python benchmarks/detect_logs.py --misses     also each miss
python benchmarks/detect_logs.py --sets last  only incidents of this set
python benchmarks/detect_logs.py --mib 1024   only: time and memory of so much logs of 64 ranks, and of a quarter of it
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support.harness import benchmark_parser, machine, write_json
from benchmarks.support.log_incidents import Set, load_messages, write_ended, write_healthy, write_incident
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES, OUTSIDE, class_of
from phalanx.detect.logs.learnt_rules import LabelledIncident, learn_rules, write_rules
from phalanx.detect.logs.log_digest import read_job
from phalanx.detect.logs.log_judge import judge_logs
from phalanx.detect.logs.log_rules import Matcher, load_rules

SETS: tuple[Set, ...] = (
    "written", "held", "fresh", "tuned", "untouched", "blind", "last", "third", "fourth", "fifth", "sixth",
    "outside",
)  # fmt: skip
EACH_ONCE = ("fourth", "fifth", "sixth")
"""Sets of which every message makes one incident, in jobs of up to 64 ranks, with harmless lines of their own."""


def calm_lines(which: Set) -> tuple[str, ...]:
    return tuple(one["line"] for one in load_messages()["calm"] if one["set"] == which)


def incidents(which: Set, count: int, matcher: Matcher, seed: int) -> list[dict[str, Any]]:
    """Every class in turn, messages of `which` set; what was put in and what was found."""
    messages = load_messages()
    of_set = [one for one in messages["message"] if one["set"] == which]
    of_kind = {kind: [one for one in of_set if one["class"] == kind] for kind in FAILURE_CLASSES}
    by_kind = {kind: own for kind, own in of_kind.items() if own}  # classes that the paper's table has not have none
    victims = [one for one in messages["victim"] if one["set"] == which]
    calm = calm_lines(which)
    rows = []
    for number in range(min(count, len(of_set)) if which in EACH_ONCE else count):
        rng = random.Random(seed + number)
        kind = of_set[number]["class"] if which in EACH_ONCE else list(by_kind)[number % len(by_kind)]
        message = of_set[number] if which in EACH_ONCE else rng.choice(by_kind[kind])
        with tempfile.TemporaryDirectory() as name:
            truth = write_incident(seed + number, kind, message, victims, Path(name), class_of(kind).family, calm)
            verdict = judge_logs(read_job([Path(name)], matcher))
        rows.append(_scored(number, truth.kind, truth.host, verdict))
    return rows


def _scored(number: int, kind: str, host: str, verdict: JudgeVerdict) -> dict[str, Any]:
    found = verdict.detections[0] if verdict.detections else None
    hosts = {one for culprit in found.who for one in culprit.hosts} if found else set()
    return {
        "number": number, "class": kind, "host": host, "found": found.what if found else "",
        "found_host": ",".join(sorted(hosts)),
        "class_right": bool(found) and found.what == kind,
        "host_right": bool(found) and hosts == ({host} if host else set()),
        "confidence": found.confidence if found else 0.0, "sentence": verdict.sentence,
    }  # fmt: skip


def learnt(count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """The fresh set again, with rules learnt from other incidents: five labelled ones of each message."""
    messages = load_messages()
    victims = [one for one in messages["victim"] if one["set"] == "fresh"]
    with tempfile.TemporaryDirectory() as name:
        labelled = []
        for number, message in enumerate([one for one in messages["message"] if one["set"] == "fresh"] * 5):
            folder = Path(name) / str(number)
            truth = write_incident(
                seed + 90_000 + number, message["class"], message, victims, folder, class_of(message["class"]).family
            )
            labelled.append(LabelledIncident(folder, truth.kind, truth.host))
        for number in range(10):
            write_healthy(seed + 95_000 + number, Path(name) / f"healthy{number}")
            labelled.append(LabelledIncident(Path(name) / f"healthy{number}", "healthy"))
        rules = learn_rules(labelled)
        write_rules(Path(name) / "rules.toml", rules)
        matcher = Matcher(load_rules([Path(name) / "rules.toml"], of_failed_jobs=True))
    return incidents("fresh", count, matcher, seed), len(rules)


def ended(count: int, matcher: Matcher, seed: int) -> list[dict[str, Any]]:
    """Jobs that a scheduler, an eviction or a signal ended; none must be blamed."""
    messages = load_messages()
    ways = [one for one in messages["message"] if one["set"] == "outside"]
    victims = [one for one in messages["victim"] if one["set"] in ("outside", "fresh")]
    rows = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as name:
            write_ended(seed + number, ways[number % len(ways)], victims, Path(name))
            verdict = judge_logs(read_job([Path(name)], matcher))
        rows.append(_scored(number, OUTSIDE, "", verdict))
    return rows


def healthy(count: int, matcher: Matcher, seed: int, calm: tuple[str, ...] = ()) -> list[str]:
    """What was said of healthy jobs: nothing, if all is well."""
    said = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as name:
            write_healthy(seed + number, Path(name), calm)
            verdict = judge_logs(read_job([Path(name)], matcher))
        said += [f"{seed + number}: {verdict.sentence}"] if verdict.detections else []
    return said


def speed(lines: int, matcher: Matcher) -> dict[str, float]:
    """CPU time of one pass over a large log, and how much memory it took."""
    import tracemalloc

    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as name:
        with (Path(name) / "gpu01_rank0.log").open("w") as file:
            for step in range(lines // 2):
                file.write(
                    f"2026-11-25 10:00:00,123 root - INFO - step: {step}  loss: {rng.random():.4f}  mfu: 40.12%\n"
                )
                file.write(
                    f"2026-11-25 10:00:00,223 - data - INFO - read /data/part-{step % 977}.bin "
                    f"at {rng.randrange(1 << 30)} for worker {step % 8}\n"
                )
        begin = time.process_time()
        digest = read_job([Path(name)], matcher)
        seconds = time.process_time() - begin
        tracemalloc.start()
        read_job([Path(name)], matcher)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {
        "lines": digest.lines,
        "lines_per_s": digest.lines / seconds,
        "templates": digest.templates,
        "peak_mib": peak / 2**20,
    }


def scale(mib: int, ranks: int = 64) -> list[dict[str, float]]:
    """One pass over logs of many ranks, each time in a process of its own: whether memory grows with the lines."""
    rows = []
    for size in (mib // 4, mib):
        with tempfile.TemporaryDirectory() as name:
            lines = _write_large(Path(name), size << 20, ranks)
            done = subprocess.run(
                [sys.executable, __file__, "--read", name], capture_output=True, text=True, check=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
            )  # fmt: skip
            rows.append({"mib": size, "lines": lines} | json.loads(done.stdout))
    return rows


def _write_large(folder: Path, size: int, ranks: int) -> int:
    """Steps, lines of data loading, warnings and debug lines whose words vary without end; a CUDA error last."""
    lines, words = 0, [f"{one}{two}" for one in ("tok", "vec", "map", "q", "lay") for two in "abcdefghij"]
    for rank in range(ranks):
        rng, step, at = random.Random(rank), 0, 0
        with (folder / f"gpu{rank // 8:02d}_rank{rank}.log").open("w", buffering=1 << 20) as file:
            while at < size // ranks:
                step += 1
                clock = f"{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d},{rng.randrange(1000):03d}"
                second = f"2026-11-25 {clock}"
                odd = " ".join(rng.choice(words) for _ in range(6))
                block = (
                    f"{second} root - INFO - step: {step}  loss: {rng.random():.4f}  mfu: 40.12%\n"
                    f"{second} - data - INFO - read /data/part-{step % 977}.bin at {rng.randrange(1 << 30)}\n"
                    f"{second} - cache - DEBUG - {odd} of {rng.randrange(1 << 30):x}\n"
                    f"{second} - data - WARNING - slow read of {rng.random():.3f} s from 10.0.7.{step % 99}, retrying\n"
                )
                at += file.write(block)
                lines += 4
            if rank == 9:
                file.write(f"{second} RuntimeError: CUDA error: an illegal memory access was encountered\n")
    return lines


def read_large(folder: Path) -> dict[str, float | str]:
    """What one pass over these logs took."""
    began, wall = time.process_time(), time.monotonic()
    digest = read_job([folder], Matcher(load_rules(of_failed_jobs=True)))
    verdict = judge_logs(digest)
    seconds = time.process_time() - began
    return {
        "cpu_s": seconds, "wall_s": time.monotonic() - wall, "lines_per_s": digest.lines / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "templates": digest.templates,
        "said": verdict.sentence,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Per class: incidents, right class, right host, both."""
    lines = ["| class | incidents | class right | host right | both |", "|---|---:|---:|---:|---:|"]
    kinds = Counter(row["class"] for row in rows)
    for kind in [*kinds, "all"]:
        own = [row for row in rows if kind in ("all", row["class"])]
        right = [
            sum(row["class_right"] for row in own),
            sum(row["host_right"] for row in own),
            sum(row["class_right"] and row["host_right"] for row in own),
        ]
        lines.append(f"| {kind} | {len(own)} | {right[0]} | {right[1]} | {right[2]} |")
    return lines


def main() -> None:
    parser = benchmark_parser(__doc__, "2 incidents of known messages, 2 ended from outside, 2 healthy", as_json=True)
    parser.add_argument("--misses", action="store_true", help="print each miss")
    parser.add_argument("--seed", type=int, default=2600)
    parser.add_argument("--sets", nargs="+", choices=SETS, help="only the incidents of these sets of messages")
    parser.add_argument("--mib", type=int, default=0, help="only: time and memory for so much of logs")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_large(options.read)))
        return
    if options.mib:
        print(machine(), *scale(options.mib), sep="\n")
        return
    count, calm, lines = (2, 2, 4_000) if options.quick else (100, 100, 400_000)
    matcher = Matcher(load_rules(of_failed_jobs=True))
    print(machine())
    figures: dict[str, Any] = {}
    for which in options.sets or (("written", "outside") if options.quick else SETS):
        if which == "outside":
            rows = ended(count, matcher, options.seed)
        else:
            rows = incidents(which, count, matcher, options.seed)
        figures[which] = rows
        print(f"\n{which}:\n" + "\n".join(table(rows)))
        if which in EACH_ONCE:
            said = healthy(40, matcher, options.seed, calm_lines(which))
            print(f"  40 healthy jobs with harmless lines of {which}: {len(said)} diagnoses", *said[:8], sep="\n    ")
        if options.misses:
            for row in rows:
                if not (row["class_right"] and row["host_right"]):
                    print(f"  {row['number']}: {row['class']} on {row['host'] or 'none'}; {row['sentence'][:230]}")
    if options.sets:
        write_json(options.json, figures)
        return
    rows, rules = ([], 0) if options.quick else learnt(count, options.seed)
    figures["fresh with learnt rules"] = rows
    print(f"\nfresh, with {rules} rules learnt from 5 labelled incidents of each message:\n" + "\n".join(table(rows)))
    if options.misses:
        for row in rows:
            if not (row["class_right"] and row["host_right"]):
                print(f"  {row['number']}: {row['class']} on {row['host'] or 'none'}; {row['sentence'][:230]}")
    said = healthy(calm, matcher, options.seed)
    figures["healthy"] = {"jobs": calm, "diagnoses": len(said), "said": said}
    print(f"\n{calm} healthy jobs: {len(said)} diagnoses", *said[:8], sep="\n  ")
    figures["speed"] = speed(lines, matcher)
    print("\n" + ", ".join(f"{name} {value:,.0f}" for name, value in figures["speed"].items()))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
