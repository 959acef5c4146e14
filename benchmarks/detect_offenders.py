"""How well `phalanx detect offenders` foretells who fails again, and how often it blames bad luck.

    python benchmarks/detect_offenders.py        a year of real faults, 200 simulated fleets without offenders, 100 with

Of the real year (InfiniteHBD, 400 servers) the judge sees the first part only; the rest tells whether it was right.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support.harness import benchmark_parser, write_json
from phalanx.detect.incident_history import DAY_S, HostIncident, read_histories
from phalanx.detect.offenders import FleetHistory, HostRate, OffenderPolicy, judge_offenders, rate_hosts

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT.parent / "shared" / "data" / "faults" / "infinitehbd-fault-trace" / "fault_trace.json"
HOSTS, DAYS = 400, 349.0
POLICY = OffenderPolicy()


def foretold(incidents: Sequence[HostIncident], split_days: float) -> list[dict[str, Any]]:
    """Of hosts that were named by what came before: how many failed again after it, against all hosts."""
    split_s = split_days * DAY_S
    before = tuple(one for one in incidents if one.unix_s < split_s)
    after = Counter(one.host for one in incidents if one.unix_s >= split_s)
    rates = rate_hosts(FleetHistory(before, HOSTS, 0.0, split_s), POLICY)
    naive = Counter(one.host for one in before)
    chosen = {
        "excluded (sure 0.9)": [rate.host for rate in rates if rate.sure >= POLICY.sure and rate.count >= 3],
        "excluded or to be checked (0.5)": [rate.host for rate in rates if rate.sure >= 0.5 and rate.count >= 3],
        "10 surest": _first(rates, 10),
        "20 surest": _first(rates, 20),
        "10 with most incidents": [host for host, _ in naive.most_common(10)],
        "20 with most incidents": [host for host, _ in naive.most_common(20)],
        "any incident before": list(naive),
    }
    usual = sum(after.values()) / HOSTS
    hit = len(after) / HOSTS
    return [
        {
            "who": name,
            "hosts": len(hosts),
            "again": sum(host in after for host in hosts),
            "again_of_all": hit,
            "incidents_each": sum(after[host] for host in hosts) / len(hosts) if hosts else float("nan"),
            "lift": sum(after[host] for host in hosts) / len(hosts) / usual if hosts else float("nan"),
            "share_of_incidents": sum(after[host] for host in hosts) / max(sum(after.values()), 1),
        }
        for name, hosts in chosen.items()
    ]


def _first(rates: Sequence[HostRate], count: int) -> list[str]:
    return [rate.host for rate in rates[:count]]


def simulated(
    fleets: int, seed: int, *, shape: float | None, offenders: int = 0, times: tuple[float, float] = (6, 20)
) -> dict[str, float]:
    """Fleets of 400 hosts for a year with the real fleet's rate; the offenders' rates are so many times it."""
    per_day = 584 / HOSTS / DAYS
    wrong = right = found = 0
    for number in range(fleets):
        rng = random.Random(seed + number)
        incidents = []
        for host in range(HOSTS):
            rate = per_day * (rng.gammavariate(shape, 1 / shape) if shape else 1.0)
            rate *= rng.uniform(*times) if host < offenders else 1.0
            at = 0.0
            while (at := at + rng.expovariate(rate)) < DAYS:
                incidents.append(HostIncident(f"h{host}", at * DAY_S, rng.choice(("gpu", "nic", "fan", "unknown"))))
        verdict = judge_offenders(FleetHistory(tuple(incidents), HOSTS, 0.0, DAYS * DAY_S))
        blamed = [one.who[0].name for one in verdict.detections if one.advice == "exclude"]
        is_bad = [int(name[1:]) < offenders for name in blamed]
        found += sum(is_bad)
        wrong += len(is_bad) - sum(is_bad)
        right += bool(is_bad) and all(is_bad)
    return {
        "fleets": fleets,
        "excluded": found + wrong,
        "wrongly": wrong,
        "wrongly_per_fleet_year": wrong / fleets,
        "recall": found / (offenders * fleets) if offenders else float("nan"),
        "precision": found / max(found + wrong, 1),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, "2 fleets of each kind", as_json=True)
    parser.add_argument("--seed", type=int, default=2600)
    options = parser.parse_args()
    fleets = 2 if options.quick else 200
    figures: dict[str, Any] = {}
    if TRACE.exists():
        incidents = read_histories([TRACE])
        verdict = judge_offenders(FleetHistory(tuple(incidents), HOSTS))
        print(f"the whole year ({verdict.looked_at}):")
        for found in verdict.detections:
            print(f"  {found.advice}: {found.sentence}; {found.why[1]}")
        for split in (DAYS / 2, DAYS * 2 / 3):
            figures[f"split at {split:.0f} days"] = rows = foretold(incidents, split)
            print(f"\nnamed by the first {split:.0f} days, and what came after:")
            print("| who | hosts | failed again | of all hosts | incidents each | lift | share of all incidents |")
            print("|---|---:|---:|---:|---:|---:|---:|")
            for row in rows:
                print(
                    f"| {row['who']} | {row['hosts']} | {row['again']} | {row['again_of_all']:.0%} "
                    f"| {row['incidents_each']:.2f} | {row['lift']:.1f} | {row['share_of_incidents']:.0%} |"
                )
    else:
        print("no real year: ../shared/data/faults is not there")
    print("\n| simulated fleets of 400 hosts, a year | fleets | excluded | wrongly | a fleet and year | recall |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, kind in {
        "equal hosts, no offender": {"shape": None},
        "hosts differ (gamma, shape 5), no offender": {"shape": 5.0},
        "hosts differ (gamma, shape 1), no offender": {"shape": 1.0},
        "equal hosts, 5 offenders of 6 to 20 times": {"shape": None, "offenders": 5},
        "hosts differ (shape 5), 5 offenders of 6 to 20 times": {"shape": 5.0, "offenders": 5},
        "equal hosts, 5 offenders of 3 to 5 times": {"shape": None, "offenders": 5, "times": (3, 5)},
    }.items():
        row = simulated(fleets if "no offender" in name else fleets // 2 + 1, options.seed, **kind)  # type: ignore[arg-type]
        figures[name] = row
        print(
            f"| {name} | {row['fleets']:.0f} | {row['excluded']:.0f} | {row['wrongly']:.0f} "
            f"| {row['wrongly_per_fleet_year']:.2f} | {row['recall']:.0%} |"
        )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
