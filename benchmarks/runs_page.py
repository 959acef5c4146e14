"""Outputs of `phalanx runs` in docs/runs.md, written by running its commands on runs that this script makes.

python benchmarks/runs_page.py             # run every command again and write what it prints
python benchmarks/runs_page.py --check     # change nothing, fail where the page is of older code
python benchmarks/runs_page.py --time      # how long a table of 200 runs with 10 MB of figures each takes
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from doc_outputs import ROOT, written

from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_list import list_runs, note_end

PAGE = ROOT / "docs" / "runs.md"


def make_runs(folder: Path) -> None:
    """Four runs in ``runs``: finished, stopped, broken off and not finite; a table of another program beside them."""
    runs = folder / "runs"
    _run(runs / "base", 256, 3e-4, 2000, 86400 + 3630)
    _run(runs / "wide", 512, 3e-4, 900, 270)
    note_end(runs / "wide", 900, "stopped by SIGTERM")
    _run(runs / "lr" / "3e-3", 256, 3e-3, 340, 7230, is_broken=True)
    _run(runs / "lr" / "1e-3", 256, 1e-3, 1240, 3630)
    (folder / "theirs.csv").write_text(
        "iteration,train/loss,val/loss,consumed tokens\n"
        + "".join(f"{n},{2.5 + 3 / n**0.5:.4f},{2.6 if n == 300 else ''},{n * 16384}\n" for n in range(100, 301, 100))
    )


def _run(path: Path, hidden: int, lr: float, steps: int, age_s: float, is_broken: bool = False) -> None:
    path.mkdir(parents=True)
    config = {
        "run": {"folder": str(Path(*path.parts[path.parts.index("runs") :]))},
        "data": {"sequence_length": 512},
        "model": {"layers": 8, "hidden": hidden},
        "optim": {"lr": lr, "batch_warmup": {"start": 0}},
        "train": {"steps": 2000, "global_batch": 32},
    }
    (path / "config.json").write_text(json.dumps(config))
    with (path / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            is_last_of_broken = is_broken and step == steps
            loss = math.nan if is_last_of_broken else 2.4 + 8 * hidden**-0.5 / step**0.3
            speed = 2.1e7 / hidden
            values = {"loss": loss, "tokens": step * 16384, "tokens_per_s": speed, "step_s": 16384 / speed, "mfu": 0.41}
            file.write(metrics_line("step", step, values))
            if step % 200 == 0:
                file.write(metrics_line("checkpoint", step, {"checkpoint/name": f"step-{step:08d}"}))
                file.write(metrics_line("evaluation", step, {"validation_loss": loss + 0.05}))
    os.utime(path / "metrics.jsonl", (time.time() - age_s,) * 2)


@contextmanager
def running(path: Path) -> Iterator[None]:
    """As if a process trained in `path`."""
    with (path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def page_now() -> str:
    """The page with every block as its command prints it now; the commands run in order, in a folder of their own."""
    with TemporaryDirectory() as folder:
        make_runs(Path(folder))
        with running(Path(folder) / "runs" / "lr" / "1e-3"):
            return re.sub(r"\b\ds ago", "0s ago", written(PAGE.read_text(), Path(folder)))


def measure() -> None:
    """Print how long a table takes that has 200 runs."""
    with TemporaryDirectory() as folder:
        line = metrics_line("step", 5, {"loss": 3.25, "tokens": 512, "tokens_per_s": 1e4, "padding": "x" * 200})
        for number in range(200):
            path = Path(folder) / f"r{number}"
            path.mkdir()
            (path / "config.json").write_text("{}")
            (path / "metrics.jsonl").write_bytes(line * (10_000_000 // len(line)))
        begin = time.perf_counter()
        rows = list_runs(Path(folder))
        print(f"{len(rows)} runs of 10 MB: {time.perf_counter() - begin:.3f} s")


def main() -> None:
    """Write or check the page, or measure."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--quick", action="store_true", help="change nothing, fail where it is old")
    parser.add_argument("--time", action="store_true", help="measure a table of 200 runs")
    given = parser.parse_args()
    if given.time:
        measure()
        return
    now = page_now()
    is_stale = now != PAGE.read_text()
    if is_stale and not given.check:
        PAGE.write_text(now)
    print(f"{'of older code' if given.check else 'written'}: {PAGE.name if is_stale else 'none'}")
    sys.exit(given.check and is_stale)


if __name__ == "__main__":
    main()
