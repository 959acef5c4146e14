"""How long pages of ranks take in a real browser; how soon they show what goes wrong says `dashboard_live.py`.

python benchmarks/dashboard_ranks.py            # a finished run of 8 ranks and one of 12,288
python benchmarks/dashboard_ranks.py --folder /big/ranks

A page counts from the request until its figures are drawn: `first` in a dashboard that has just started, `then` the
same page once more. `cpu` is what the dashboard's process computed for the first, in seconds of one core: on a machine
that is busy with other things it says more than the clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.browser import Watched, served, watched, why_no_browser
from support.harness import benchmark_parser, machine, write_json
from support.traced_runs import add_reports, large_run, traced_run

from phalanx.dashboard.data_source import DataSource

PAGES = {
    "Machines": "/machines?run={run}",
    "a host": "/machines/host?run={run}&rank=5",
    "Timeline": "/timeline?run={run}",
    "Parallelism": "/parallelism?run={run}",
    "Incidents": "/incidents?run={run}",
    "Plan": "/plan?run={run}",
}


def seconds_of(browser: Watched, path: str) -> tuple[float, float]:
    """From the request to the last figure, by the clock and of this process."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    browser.open(path)
    taken_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    browser.check()
    return taken_s, cpu_s


def measure_pages(folder: Path, repeats: int) -> list[dict[str, object]]:
    """A row for each run and page."""
    rows = []
    for run in ("small", "large"):
        for name, path in PAGES.items():
            first = []
            for _ in range(min(repeats, 3)):
                with served(DataSource.of_folder(folder)) as address, watched(address) as browser:
                    browser.open("/incidents?run=empty")  # the browser has scripts and styles
                    first.append(seconds_of(browser, path.format(run=run)))
                    then = [seconds_of(browser, path.format(run=run))[0] for _ in range(repeats)]
            first_s, cpu_s = (statistics.median(each) for each in zip(*first, strict=True))
            found = {"first_s": first_s, "cpu_s": cpu_s, "then_s": statistics.median(then)}
            rows.append({"run": run, "page": name, **found})
            each = f"first {first_s:.2f} s (cpu {cpu_s:.2f}), then {found['then_s']:.2f} s"
            print(f"{run:6s} {name:12s} {each}", flush=True)
    return rows


def main() -> None:
    """Make the runs, measure, print."""
    parser = benchmark_parser(__doc__, "128 ranks in the place of 12,288, once", repeats=3, as_json=True)
    parser.add_argument("--folder", type=Path, help="runs are made there, or taken from there")
    given = parser.parse_args()
    if why := why_no_browser():
        print(f"not measured: {why}")
        sys.exit(0 if given.quick else 1)
    repeats = 1 if given.quick else given.repeats
    with TemporaryDirectory() as own:
        folder = given.folder or Path(own)
        if not (folder / "small").exists():
            add_reports(traced_run(folder / "small"))
            (folder / "empty").mkdir()
            (folder / "empty" / "metrics.jsonl").touch()
            large_run(folder / "large", ranks=128 if given.quick else 12_288, spans_of=(100,), slow=(77,))
        print(machine())
        rows = measure_pages(folder, repeats)
    write_json(given.json, {"pages": rows})


if __name__ == "__main__":
    main()
