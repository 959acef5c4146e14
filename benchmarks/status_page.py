"""Outputs of `phalanx status` and `phalanx logs` in docs/status.md, by running them on runs that this script makes.

python benchmarks/status_page.py             # run every command again and write what it prints
python benchmarks/status_page.py --check     # change nothing, fail where the page is of older code
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from tempfile import TemporaryDirectory

from doc_outputs import ROOT, written
from runs_page import make_runs

from phalanx.core.progress import ProgressWriter
from phalanx.telemetry.run_log import RunLog, log_path
from phalanx.telemetry.run_presence import announce, presences

PAGE = ROOT / "docs" / "status.md"
_AGE = re.compile(r"\b\ds ago")
_CLOCK = re.compile(r"^\d\d-\d\d \d\d:\d\d:\d\d", flags=re.MULTILINE)


def make(folder: Path) -> None:
    """The runs of docs/runs.md: one trains in this process, another was killed."""
    make_runs(folder)
    wide, base = folder / "runs" / "wide", folder / "runs" / "lr" / "3e-3"
    (wide / "ended.json").unlink()
    page = folder / "page"
    announce(wide, rank=0, world_size=1, start=3, page=page)
    writer = ProgressWriter(page, 3)
    writer.phase("step")
    writer.step(904)
    log = RunLog(log_path(wide, 0, 1, ""), 0, 3, file_bytes=1 << 20, files=2)
    log.note("started: host node-7, pid 4711, phalanx 0.1.0, torch 2.13.0: phalanx train wide.toml")
    log.feed("torch/nested.py:12: UserWarning: nested tensors are in prototype stage\n")
    for step in (880, 890, 900):
        log.note(f"step {step}/2000  loss 2.4459  lr 3.00e-04  grad norm 0.412  tokens/s 41,016  left 6m10s")
    log.close()
    (wide / "checkpoints" / "step-00000800").mkdir(parents=True)
    announce(base, rank=0, world_size=1, start=1, page=None)
    (presence,) = presences(base)
    gone = dataclasses.replace(presence, pid=4242, started_ticks=1)
    (base / "processes" / "rank-0.json").write_text(json.dumps(dataclasses.asdict(gone)))
    for run, age_s in ((wide, 2), (base, 7200)):
        os.utime(run / "metrics.jsonl", (time.time() - age_s,) * 2)


def page_now() -> str:
    """The page with every block as its command prints it now; what differs from run to run is as on node-7."""
    with TemporaryDirectory() as folder:
        make(Path(folder))
        text = written(PAGE.read_text(), Path(folder))
    text = text.replace(f"pid {os.getpid()}", "pid 4711").replace(f" on {socket.gethostname()}", " on node-7")
    return _CLOCK.sub("11-25 19:16:46", _AGE.sub("2s ago", text))


def main() -> None:
    """Write or check the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--quick", action="store_true", help="change nothing, fail where it is old")
    given = parser.parse_args()
    now = page_now()
    is_stale = now != PAGE.read_text()
    if is_stale and not given.check:
        PAGE.write_text(now)
    print(f"{'of older code' if given.check else 'written'}: {PAGE.name if is_stale else 'none'}")
    sys.exit(given.check and is_stale)


if __name__ == "__main__":
    main()
