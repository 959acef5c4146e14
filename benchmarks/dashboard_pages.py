"""How long pages of the dashboard take in a real browser: 200 runs of 100,000 steps each.

python benchmarks/dashboard_pages.py                    # makes 4 GB of runs in a folder of its own, and measures
python benchmarks/dashboard_pages.py --folder /big/runs # keeps them there for the next time

A page counts from the request until its figures are drawn. `first` is a dashboard that has never seen the runs (its
cache is empty; large files are shown as samples), `started again` one whose cache an earlier start has filled, `then`
the same page once more. Files may lie in the memory of the system in all cases.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from support.browser import Watched, served, watched, why_no_browser
from support.harness import benchmark_parser, machine, write_json

from phalanx.dashboard.data_source import DataSource
from phalanx.telemetry.loggers import metrics_line

PAGES = {
    "Runs, 10 chosen": "/",
    "Runs, all chosen": "/?on=*&chosen=1",
    "Runs, all chosen, smoothed, over tokens": "/?on=*&chosen=1&span=200&x=tokens",
}


def make_runs(folder: Path, runs: int, steps: int) -> None:
    """Runs whose figures differ, of a few bodies: writing each line of each anew would take half an hour."""
    bodies = [_body(number, steps) for number in range(min(runs, 4))]
    for number in range(runs):
        path = folder / f"sweep-{number // 20}" / f"run-{number:03d}"
        if (path / "metrics.jsonl").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "model": {"layers": 12, "hidden": 768},
            "data": {"sequence_length": 1024},
            "optim": {"lr": 1e-4 * (1 + number)},
            "train": {"steps": steps, "global_batch": 32},
        }
        (path / "config.json").write_text(json.dumps(config))
        (path / "metrics.jsonl").write_bytes(bodies[number % len(bodies)])


def _body(seed: int, steps: int) -> bytes:
    draw = random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        values = {
            "loss": 2 + seed / 20 + 6 / math.sqrt(step + 3) + draw.gauss(0, 0.03),
            "grad_norm": 0.5 + draw.random(),
            "lr": 3e-4 * min(step / 1000, 1),
            "skipped": 0,
            "tokens": step * 32768,
            "tokens_per_s": 1e5 + draw.gauss(0, 1e3),
            "step_s": 0.33,
        }
        lines.append(metrics_line("step", step, values))
        if step % 1000 == 0:
            lines.append(metrics_line("evaluation", step, {"validation_loss": values["loss"] + 0.05}))
    return b"".join(lines)


def seconds_of(browser: Watched, path: str) -> float:
    """From the request to the last figure."""
    begin_s = time.perf_counter()
    browser.open(path)
    taken_s = time.perf_counter() - begin_s
    browser.check()
    return taken_s


@contextmanager
def dashboard(folder: Path, cache: Path) -> Iterator[Watched]:
    """A dashboard that begins, and a browser that has its scripts already."""
    with served(DataSource.of_folder(folder), cache) as address, watched(address) as browser:
        browser.page.goto(address.partition("/?")[0] + "/?chosen=1")
        browser.drawn()
        yield browser


def measure(folder: Path, repeats: int) -> list[dict[str, object]]:
    """A row for each page: seconds of the first look, after a new start, and of looks after that."""
    rows = []
    with TemporaryDirectory() as cache:
        for name, path in PAGES.items():
            with TemporaryDirectory() as empty, dashboard(folder, Path(empty)) as browser:
                first_s = seconds_of(browser, path)
            if not rows:
                fill(folder, Path(cache))
            with dashboard(folder, Path(cache)) as browser:
                again_s = seconds_of(browser, path)
                then_s = [seconds_of(browser, path) for _ in range(repeats)]
            rows.append({"page": name, "first_s": first_s, "again_s": again_s, "then_s": statistics.median(then_s)})
    return rows


def fill(folder: Path, cache: Path) -> None:
    """Read all runs as a dashboard does in the background."""
    from phalanx.dashboard.metrics_store import MetricsStore
    from phalanx.dashboard.run_curves import metrics_paths

    begin_s = time.perf_counter()
    store = MetricsStore(cache)
    paths = metrics_paths(DataSource.of_folder(folder).runs())
    store.read(paths, within_s=0, sample=1)
    store.settle()
    store.close()
    read_bytes = sum(path.stat().st_size for path in paths)
    taken_s = time.perf_counter() - begin_s
    print(f"{read_bytes / 1e9:.2f} GB of figures read in the background in {taken_s:.1f} s", flush=True)


def main() -> None:
    """Make the runs, measure, print."""
    parser = benchmark_parser(__doc__, "3 runs of 200 steps", repeats=5, as_json=True)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="runs are made there, or taken from there")
    given = parser.parse_args()
    if why := why_no_browser():
        print(f"not measured: {why}")
        sys.exit(0 if given.quick else 1)
    runs, steps = (3, 200) if given.quick else (given.runs, given.steps)
    with TemporaryDirectory() as own:
        folder = given.folder or Path(own)
        make_runs(folder, runs, steps)
        print(f"{runs} runs of {steps} steps, {machine()}")
        rows = measure(folder, 1 if given.quick else given.repeats)
    print(f"{'page':42s}  first  started again  then, seconds")
    for row in rows:
        print(f"{row['page']:42s}  {row['first_s']:5.2f}  {row['again_s']:13.2f}  {row['then_s']:4.2f}")
    write_json(given.json, rows)


if __name__ == "__main__":
    main()
