"""Judges of monitoring data on 150 jobs with a fault and 200 healthy hours, of a split that nobody tuned on.

    python benchmarks/detect_machines.py                                    # phalanx detect machines, final split
    python benchmarks/detect_machines.py --judge MODULE:FUNCTION            # yours: (MetricTable) -> JudgeVerdict
    python benchmarks/detect_machines.py --split develop --faults 60 --healthy-hours 20
    python benchmarks/detect_machines.py --log judged.jsonl                 # go on later; several may share a file
    python benchmarks/detect_machines.py --first-fault 2000 --healthy-hours 0    # faults that nobody has looked at
    python benchmarks/detect_machines.py --quick

Classes have the shares of Minder's evaluation set, jobs 4 to 1,500 machines, tables 15 minutes; healthy ones an hour.
What is found, missed and raised without reason: precision, recall and F1 by class, false alarms per healthy hour, the
time between the earliest moment that continuity allows and the alarm, which class was guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.harness import benchmark_parser, machine, write_json

from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.minder.following import FollowedJob
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.monitoring.detection_scores import DetectionScore, FaultOutcome, score
from phalanx.detect.monitoring.job_scenarios import Scenario, fault_scenarios, healthy_scenarios
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_generator import CaseLabels, generate
from phalanx.detect.monitoring.metric_table import MetricTable

Judge = Callable[[MetricTable], JudgeVerdict]
Row = dict[str, Any]

JUDGES: Mapping[str, str] = {"machines": "phalanx.detect.minder.machine_judge:judge_machines"}
"""Ours, by name: what `--judge` may be besides ``MODULE:FUNCTION``."""


def judge_named(name: str) -> Judge:
    """The function that a name or ``MODULE:FUNCTION`` stands for."""
    module, _, function = JUDGES.get(name, name).partition(":")
    found: Judge = getattr(importlib.import_module(module), function)
    return found


def scenarios(
    split: str, faults: int, healthy_hours: int, most_machines: int, first_fault: int = 0, first_healthy: int = 100_000
) -> Iterator[Scenario]:
    """All cases; larger jobs are cut off in the quick form.

    Args:
        first_fault: number of the first scenario with a fault.
        first_healthy: the same of the first healthy one.
    """
    healthy = healthy_scenarios(split, healthy_hours, first=first_healthy)
    for one in (*fault_scenarios(split, faults, first=first_fault), *healthy):
        if one.machines <= most_machines:
            yield one


def judged(
    judge: Judge, cases: Iterator[Scenario], took_s: list[tuple[int, float]]
) -> Iterator[tuple[JudgeVerdict, CaseLabels]]:
    """Verdicts, as they come; `took_s` gets machines and seconds of each call."""
    for scenario in cases:
        case = generate(scenario, DETECTED)
        start_s = time.perf_counter()
        verdict = judge(case.table)
        took_s.append((scenario.machines, time.perf_counter() - start_s))
        yield verdict, case.labels


def results(judge: Judge, cases: Iterable[Scenario], log: Path | None, *, is_replayed: bool) -> Iterator[Row]:
    """A row of plain values for each table; those that the log holds are not judged again.

    Args:
        log: gets a line of JSON after each table.
        is_replayed: also time the second that raises each right alarm.
    """
    known = {row["case"]: row for row in read_log(log)}
    for scenario in cases:
        if scenario.name in known:
            yield known[scenario.name]
            continue
        case = generate(scenario, DETECTED)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        verdict = judge(case.table)
        took_s, took_cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        found = score([(verdict, case.labels)])
        row = Row(
            case=scenario.name,
            machines=scenario.machines,
            took_s=round(took_s, 3),
            took_cpu_s=round(took_cpu_s, 3),
            score={**dataclasses.asdict(found)},
            alarms=alarms_of(verdict, case.labels),
        )
        if is_replayed and found.found:
            row["increment_s"] = alarm_increment_s(case.table, row["alarms"])
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def read_log(log: Path | None) -> list[Row]:
    """Rows of a file, if there is one; a line that was cut off does not count."""
    rows: list[Row] = []
    if log is not None and log.exists():
        for line in log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def alarms_of(verdict: JudgeVerdict, labels: CaseLabels) -> list[dict[str, Any]]:
    """What was said of machines, whether it was right, and how sure the judge was."""
    faulty = {host for fault in labels.faults for host in fault.machines}
    return [
        {
            "hosts": [culprit.name for culprit in one.who],
            "is_right": bool(faulty & {culprit.name for culprit in one.who}),
            "advice": one.advice,
            "what": one.what,
            "confidence": one.confidence,
            "since_s": None if one.since.unix_s is None else one.since.unix_s - labels.start_unix_s,
            "raised_s": float(one.figures.get("raised_unix_s", 0)) - labels.start_unix_s,
            **{name: one.figures[name] for name in ("metric", "score", "fault") if name in one.figures},
        }
        for one in verdict.detections
    ]


def alarm_increment_s(table: MetricTable, alarms: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds that `--follow` computes when the sample comes that raises the first right alarm."""
    at = min(round(one["raised_s"]) for one in alarms if one["is_right"] and one["advice"] != "watch")
    followed = FollowedJob(table.between(0, at - 3), MinderPolicy())
    followed.begin()
    for end in range(at - 3, min(at + 3, table.samples)):
        start_s = time.perf_counter()
        found = followed.add(table.between(max(0, end - 1), end + 1))
        if found:
            return time.perf_counter() - start_s
    return None


def score_of(rows: Iterable[Row]) -> DetectionScore:
    """Of all tables together."""
    return DetectionScore.joined(
        DetectionScore(
            tuple(FaultOutcome(**one) for one in row["score"]["outcomes"]),
            row["score"]["healthy_hours"],
            row["score"]["healthy_alarms"],
            row["score"]["abstained"],
        )
        for row in rows
    )


def table_of(found: DetectionScore) -> list[str]:
    """Lines of Markdown."""
    lines = ["| class | cases | found | false alarms | precision | recall | F1 |", "|---|--:|--:|--:|--:|--:|--:|"]
    for row in found.by_class():
        lines.append(
            f"| {row['fault']} | {row['cases']} | {row['found']} | {row['false_alarms']} | {row['precision']:.3f} | "
            f"{row['recall']:.3f} | {row['f1']:.3f} |"
        )
    return lines


def confusion_of(found: DetectionScore) -> list[str]:
    """Lines of Markdown: which class was guessed of each."""
    rows = found.confusion()
    guesses = list(dict.fromkeys(name for row in rows for name in row if name != "fault"))
    lines = [f"| class | {' | '.join(guesses)} |", f"|---|{'--:|' * len(guesses)}"]
    lines += [f"| {row['fault']} | {' | '.join(str(row.get(name, 0)) for name in guesses)} |" for row in rows]
    return lines


def confidence_table(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: what was said, and how often that was right."""
    lines = ["| confidence | alarms | said | right |", "|---|--:|--:|--:|"]
    for low, high in itertools.pairwise((0.0, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 1.01)):
        of_bin = [one for one in alarms if low <= one["confidence"] < high]
        if of_bin:
            said = statistics.mean(one["confidence"] for one in of_bin)
            right = sum(one["is_right"] for one in of_bin)
            lines.append(f"| {low:g} to {min(high, 1):g} | {len(of_bin)} | {said:.3f} | {right} of {len(of_bin)} |")
    return lines


def report(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Print and return what was measured of a judge."""
    found = score_of(rows)
    per_hour = found.alarms_per_healthy_hour
    figures = found.as_json() | {"judge": name, "longest_call_s": round(max(row["took_s"] for row in rows), 2)}
    print(f"\n{name}: precision {found.precision:.3f}, recall {found.recall:.3f}, F1 {found.f1:.3f}")
    if per_hour is not None:
        sizes = sorted(row["machines"] for row in rows if row["score"]["healthy_hours"])
        print(
            f"healthy: {found.healthy_alarms} alarms in {found.healthy_hours:.0f} hours ({per_hour:.3f} an hour), of "
            f"{sizes[0]} to {sizes[-1]} machines, median {statistics.median(sizes):.0f}, {sum(sizes):,} machine hours"
        )
    for since, late in (("true onset", found.late_s()), ("first sample that shows it", found.late_shown_s())):
        if late is not None:
            name = "late_s" if since == "true onset" else "late_shown_s"
            seconds = [one for one in (getattr(outcome, name) for outcome in found.outcomes) if one is not None]
            spread = f"median {late[0]:.1f} s, 90 % {late[1]:.1f}, largest {late[2]:.1f}"
            within = sum(one <= 1 for one in seconds)
            print(f"alarm after {since} and continuity: {spread}; within 1 s: {within} of {len(seconds)}")
    increments = [row["increment_s"] for row in rows if row.get("increment_s") is not None]
    if increments:
        print(
            f"the second that raises the alarm takes: median {1000 * statistics.median(increments):.0f} ms, "
            f"longest {1000 * max(increments):.0f} ms, of {len(increments)}"
        )
    if found.guessed is not None:
        print(f"class guessed right: {found.guessed:.0%} of those found")
    print(
        f"longest call: {figures['longest_call_s']} s, all {sum(row['took_cpu_s'] for row in rows):.0f} s of "
        f"processors; nothing said about {found.abstained} tables\n"
    )
    alarms = [one for row in rows for one in row["alarms"] if one["advice"] != "watch"]
    print("\n".join([*table_of(found), "", *confusion_of(found), "", *confidence_table(alarms)]))
    missed = [one for one in found.outcomes if not one.is_found or one.false_alarms]
    print("\nmissed, or machines blamed that are healthy:")
    for one in missed:
        kind = f"{one.false_alarms} false" if one.false_alarms else "missed"
        print(f"  {one.case}: {one.machines} machines, severity {one.severity:.2f}, {kind}")
    for row in rows:
        for one in row["alarms"]:
            if row["score"]["healthy_alarms"] and one["advice"] != "watch":
                print(f"  {row['case']}: {row['machines']} machines, {one}")
    figures["outcomes"] = [dataclasses.asdict(one) for one in found.outcomes]
    return figures


def main() -> None:
    quick = "those of 12 faults and 4 healthy hours that have at most 200 machines"
    parser = benchmark_parser(__doc__, quick, as_json=True)
    parser.add_argument("--judge", action="append", metavar="NAME", help=f"{', '.join(JUDGES)} or MODULE:FUNCTION")
    parser.add_argument("--split", default="final", choices=["develop", "test", "final"], help="(default final)")
    parser.add_argument("--faults", type=int, default=150, metavar="N", help="tables with a fault (default 150)")
    parser.add_argument("--healthy-hours", type=int, default=200, metavar="N", help="(default 200)")
    parser.add_argument("--first-fault", type=int, default=0, metavar="K", help="number of the first of them")
    parser.add_argument("--first-healthy", type=int, default=100_000, metavar="K", help="the same of healthy ones")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="judge every Nth table, from the Ith on")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append each table; go on where it ends")
    parser.add_argument("--only-report", action="store_true", help="of the log, without judging")
    parser.add_argument("--replay", action="store_true", help="also time the second that raises each right alarm")
    options = parser.parse_args()
    faults, hours, most = (12, 4, 200) if options.quick else (options.faults, options.healthy_hours, 1 << 30)
    print(f"{machine()}; split {options.split}, {faults} faults, {hours} healthy hours")
    first, every = map(int, options.share.split("/"))
    figures = []
    for name in options.judge or list(JUDGES):
        drawn = scenarios(options.split, faults, hours, most, options.first_fault, options.first_healthy)
        cases = itertools.islice(drawn, first - 1, None, every)
        rows = (
            read_log(options.log)
            if options.only_report
            else list(results(judge_named(name), cases, options.log, is_replayed=options.replay))
        )
        figures.append(report(name, rows))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
