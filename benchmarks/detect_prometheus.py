"""From 200 simulated exporters through a real Prometheus to a verdict.

    python benchmarks/detect_prometheus.py               # backfilled 15 minutes, then exporters that are scraped live
    python benchmarks/detect_prometheus.py --judge MODULE:FUNCTION --machines 50
    python benchmarks/detect_prometheus.py --quick       # 12 machines, backfilled

Each machine's exporter is a listening socket of its own, scraped every second. Live, the server is asked every ten
seconds for the last 15 minutes, until the judge names a machine; what is told is the time from the fault's onset until
then, four minutes of which are continuity. Needs Debian's package prometheus.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detect_machines import JUDGES, Judge, judge_named
from support.harness import benchmark_parser, machine, write_json
from support.prometheus_server import NEEDS, backfill, has_prometheus, prometheus

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.job_scenarios import Scenario, draw_scenario
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_generator import GeneratedCase, generate
from phalanx.detect.monitoring.prometheus_source import PrometheusServer, read_prometheus
from phalanx.detect.monitoring.simulated_exporters import SimulatedExporters, write_scrape_config

_PAUSE_S = 10.0


def first_lasting(fault: str, machines: int) -> Scenario:
    """A job of the test split, of one generation of GPUs, whose fault begins early and lasts to the table's end."""
    for number in range(1_000_000):
        found = draw_scenario("test", number, fault=fault, machines=machines)
        one = found.fault
        if one and one.end_s > 900 and one.start_s < 130 and one.severity > 0.4 and len(found.generations) == 1:
            return found
    raise AssertionError


def told(judge: Judge, case: GeneratedCase, table: Any) -> dict[str, Any]:
    """What the judge says of a table that came from the server."""
    start_s = time.perf_counter()
    verdict = judge(table)
    return {
        "blamed": list(verdict.blamed_hosts),
        "sentences": [one.sentence for one in verdict.detections],
        "is_right": set(verdict.blamed_hosts) == set(case.labels.faults[0].machines),
        "judge_s": round(time.perf_counter() - start_s, 2),
    }


def from_blocks(judge: Judge, case: GeneratedCase, folder: Path) -> dict[str, Any]:
    """Fifteen minutes that lie in the server already."""
    backfill(case.table, folder)
    write_scrape_config({}, folder / "prometheus.json")
    with prometheus(folder, folder / "prometheus.json") as url:
        end_s = case.table.start_s + case.table.samples - 1
        start_s = time.perf_counter()
        table = read_prometheus(PrometheusServer(url), end_s=end_s, metrics=DETECTED, machines=case.table.machines)
        read_s = round(time.perf_counter() - start_s, 2)
    return {"form": "backfilled", "read_s": read_s, **told(judge, case, table)}


def live(judge: Judge, case: GeneratedCase, folder: Path) -> dict[str, Any]:
    """Scraped as time goes by."""
    with SimulatedExporters(case.table) as exporters:
        write_scrape_config(exporters.targets, folder / "prometheus.json")
        with prometheus(folder, folder / "prometheus.json") as url:
            exporters.restart()
            began_s = time.time()
            onset_s = case.labels.faults[0].start_unix_s - case.labels.start_unix_s
            faulty, wrong = set(case.labels.faults[0].machines), dict[str, str]()
            for found in _looks(judge, case, url, began_s):
                others = [one for one in found["blamed"] if one not in faulty]
                wrong |= dict.fromkeys(others, "; ".join(found["sentences"]))
                if faulty & set(found["blamed"]):
                    after_s = round(time.time() - began_s - onset_s, 1)
                    return {"form": "live", "after_onset_s": after_s, "blamed_before": wrong, **found}
    return {"form": "live", "blamed": [], "is_right": False, "blamed_before": wrong}


def _looks(judge: Judge, case: GeneratedCase, url: str, began_s: float) -> Iterator[dict[str, Any]]:
    while (gone_s := time.time() - began_s) < case.table.samples - 5:
        time.sleep(_PAUSE_S)
        start_s = time.perf_counter()
        minutes = max(1.0, min(15.0, gone_s / 60))
        try:
            table = read_prometheus(
                PrometheusServer(url), minutes=minutes, metrics=DETECTED, machines=case.table.machines
            )
        except UserError:  # nothing was scraped yet
            continue
        yield {"read_s": round(time.perf_counter() - start_s, 2), **told(judge, case, table)}


def main() -> None:
    parser = benchmark_parser(__doc__, "12 machines, backfilled", as_json=True)
    names = f"{', '.join(JUDGES)} or MODULE:FUNCTION"
    parser.add_argument("--judge", default=next(iter(JUDGES), None), metavar="NAME", help=names)
    parser.add_argument("--machines", type=int, default=200, metavar="N", help="exporters (default 200)")
    parser.add_argument("--fault", default="ECC error", metavar="CLASS", help="(default ECC error)")
    parser.add_argument("--form", choices=["backfilled", "live"], help="only this (default both)")
    options = parser.parse_args()
    if not has_prometheus():
        print(f"nothing was measured: it {NEEDS}")
        return
    judge = judge_named(options.judge)
    case = generate(first_lasting(options.fault, 12 if options.quick else options.machines), DETECTED)
    print(f"{machine()}; {case.labels.machines} exporters, {case.labels.faults[0].machines} is faulty", flush=True)
    figures = []
    forms = {"backfilled": from_blocks, "live": live}
    for form in [forms[options.form or "backfilled"]] if options.quick or options.form else forms.values():
        with tempfile.TemporaryDirectory() as folder:
            figures.append(form(judge, case, Path(folder)))
        print(figures[-1], flush=True)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
