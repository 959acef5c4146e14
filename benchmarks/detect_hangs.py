"""How well `phalanx detect hang` names who holds up a job: real incidents, generated dumps, real processes.

    python benchmarks/detect_hangs.py                      # all of it, some minutes
    python benchmarks/detect_hangs.py --part generated     # one of incidents, generated, scale, processes
    python benchmarks/detect_hangs.py --quick              # whether it works

Right is: all guilty ranks are named, and nobody else. Seeds are fixed. What is drawn and does not hang (its fault hits
after the end) is left out and drawn again.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from support.hang_cases import (
    FAMILIES,
    LARGE,
    LAYOUTS,
    draw,
    dump_at_rest,
    judged,
    ranks_named,
    ranks_possible,
)
from support.harness import benchmark_parser, machine, write_json

from phalanx.core.layout import Layout
from phalanx.detect.hangs.dump_files import DumpedJob, dump_files, read_dumped_job
from phalanx.detect.hangs.hang_judge import HangContext, judge_hang
from phalanx.detect.hangs.rank_places import RankPlaces

SHARED = Path(__file__).parents[2] / "shared/data/traces/flight-recorder"
INCIDENTS = {"gpu_error_1st": {12, 14}, "lock_gil_1st": {9, 14}}
PARTS = ("incidents", "generated", "scale", "processes")
OUTCOMES = ("exact", "some of them", "in a group", "nobody", "an innocent")


def outcome(case_guilty: frozenset[int], named: frozenset[int], possible: frozenset[int]) -> str:
    """One of `OUTCOMES`; a healthy job of which nobody is named is `exact`."""
    if named - case_guilty:
        return "an innocent"
    if named == case_guilty and not (possible and not case_guilty):
        return "exact"
    if named:
        return "some of them"
    return "in a group" if possible & case_guilty else "nobody"


def incidents() -> list[dict[str, Any]]:
    """The two real incidents at hand."""
    rows = []
    for name, guilty in INCIDENTS.items() if SHARED.exists() else ():
        began_s = time.perf_counter()
        job = read_dumped_job(dump_files([str(SHARED / name)]))
        verdict = judge_hang(HangContext(RankPlaces(job.ranks, job.groups), job.records, job.texts))
        took_s = time.perf_counter() - began_s
        named = ranks_named(verdict)
        rows.append(
            {
                "incident": name,
                "guilty": sorted(guilty),
                "named": sorted(named),
                "right": named == guilty,
                "seconds": round(took_s, 3),
                "sentence": verdict.sentence,
            }
        )
    return rows


def generated(cases: int, layouts: Sequence[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """By family: how often who was named; and by confidence how often that was right."""
    rows = []
    for family in FAMILIES:
        counts: Counter[str] = Counter()
        slowest_s, seed, confident = 0.0, 0, []
        while sum(counts.values()) < cases and seed < 20 * cases:
            case = draw(family, seed, layouts)
            seed += 1
            if case is None:
                continue
            began_s = time.perf_counter()
            verdict = judged(case)
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
            counts[outcome(case.guilty, ranks_named(verdict), ranks_possible(verdict))] += 1
            confident += [(found.confidence, set(ranks_of(found)) <= case.guilty) for found in verdict.detections]
        claims = [is_right for _, is_right in confident]
        rows.append(
            {"family": family, "cases": sum(counts.values())}
            | {name: counts[name] for name in OUTCOMES}
            | {
                "claimed": round(statistics.mean([c for c, _ in confident]), 3) if confident else None,
                "held": round(statistics.mean(claims), 3) if claims else None,
                "slowest_s": round(slowest_s, 3),
            }
        )
    return rows


def ranks_of(found: Any) -> list[int]:
    """Ranks that one detection accuses."""
    return [rank for who in found.who if who.kind == "rank" for rank in who.ranks]


def scale(layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """Seconds per verdict, from dumps in memory, by number of ranks."""
    rows = []
    for layout in layouts:
        guilty = layout.world_size // 2 + 1
        job, dumps_s, entries = DumpedJob(), 0.0, 0
        for rank in range(layout.world_size):
            dump = dump_at_rest(layout, rank, guilty)
            entries += len(dump["entries"])
            began_s = time.process_time()
            job.add(rank, dump)
            dumps_s += time.process_time() - began_s
        began_s = time.process_time()
        verdict = judge_hang(HangContext(RankPlaces(job.ranks, job.groups), job.records, job.texts))
        judged_s = time.process_time() - began_s
        rows.append(
            {
                "ranks": layout.world_size,
                "layout": str(layout),
                "entries": entries,
                "right": ranks_named(verdict) == {guilty},
                "records_s": round(dumps_s, 2),
                "judged_s": round(judged_s, 2),
            }
        )
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """As a table that Markdown takes."""
    if not rows:
        return
    table = Table(title=title, box=None)
    for name in rows[0]:
        table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(width=200).print(table)


def main() -> None:
    """See above."""
    parser = benchmark_parser(__doc__, "few cases of each kind, and two of real processes", as_json=True)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this (default all)")
    parser.add_argument("--cases", type=int, default=60, help="generated cases of each family (default 60)")
    options = parser.parse_args()
    parts = options.part or PARTS
    print(machine())
    figures: dict[str, Any] = defaultdict(list)
    if "incidents" in parts:
        figures["incidents"] = incidents()
        show("real incidents", figures["incidents"])
    if "generated" in parts:
        few = (4, LAYOUTS[:6]) if options.quick else (options.cases, LAYOUTS)
        figures["generated"] = generated(*few)
        show("generated dumps, 2 to 128 ranks", figures["generated"])
        if not options.quick:
            figures["generated large"] = generated(max(1, options.cases // 20), LARGE)
            show("generated dumps, 512 and 1,024 ranks", figures["generated large"])
    if "scale" in parts:
        data = (2, 16) if options.quick else (2, 16, 64, 192)
        figures["scale"] = scale([Layout(pipeline=8, replicate=count, tensor=8) for count in data])
        show("seconds per verdict", figures["scale"])
    if "processes" in parts:
        from support.hang_processes import run_cases

        figures["processes"] = run_cases(quick=options.quick)
        show("real processes", figures["processes"])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
