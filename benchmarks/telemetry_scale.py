"""Telemetry of very many ranks: how fast it is written, how large it is, how soon questions are answered.

python benchmarks/telemetry_scale.py                     # 12,288 ranks x 1,000 steps x 50 spans, 614 M
python benchmarks/telemetry_scale.py --scale 0.1         # a tenth of the steps
python benchmarks/telemetry_scale.py --folder RUN --keep # where to, and leave it there

Spans are put into rings of ranks in this host's memory, as ranks leave them; the writer of a host (`HostWriter`) takes
them out, streams them, and makes Parquet and sums of them. Only that is timed, in two processes, each host after host;
what makes the spans is not. Questions are asked by a fresh process each, after the pages of the run's files have been
dropped from the page cache (`posix_fadvise`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from support.harness import benchmark_parser, machine, write_json

from phalanx.telemetry import spans as rings
from phalanx.telemetry.part_merging import merge_small_parts
from phalanx.telemetry.span_writer import HostWriter, WriterSettings
from phalanx.telemetry.spans import RECORD_DTYPE, Recorder

RANKS_OF_HOST = 8
SPANS_OF_STEP = 50
STEPS_OF_PART = 100
"""A part is closed once a minute; here the steps are short."""

STEP_NS = 600_000_000
SLOW_HOST = 700

_ASK = """
import json, resource, sys, time
begin = time.perf_counter()
from pathlib import Path
from phalanx.telemetry.queries import Trace
from phalanx.figures.rank_heatmap import rank_heatmap
imported = time.perf_counter()
what, run, first, last, rank = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
trace = Trace.open(run)
if what == "heat map":
    told = rank_heatmap(trace.rank_averages(first, last))["layout"]["title"]["text"]
elif what == "one rank's step":
    told = f"{len(trace.timeline(first, first, ranks=[rank]))} spans"
elif what == "slow ranks":
    from phalanx.telemetry.slow_ranks import find_slow_ranks
    told = find_slow_ranks(trace, first, last).verdict
else:
    from phalanx.figures.pages.run_report import write_report
    told = write_report(run, run / "report.html", first, last).sentence
ended = time.perf_counter()
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"told": told, "asked_s": ended - imported, "import_s": imported - begin,
                  "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}))
"""


def main() -> None:
    """Write, ask, and print a table."""
    parser = benchmark_parser(__doc__, "16 hosts and 30 steps", as_json=True)
    parser.add_argument("--hosts", type=int, default=1536, help="of 8 ranks each (default 1536)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the steps")
    parser.add_argument("--part", type=int, default=STEPS_OF_PART, help="steps of a part (default 100)")
    parser.add_argument("--processes", type=int, default=2, help="that write (default 2)")
    parser.add_argument("--folder", type=Path, help="the run (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="do not delete it; one that is there is only asked")
    parser.add_argument("--report", action="store_true", help="also write the report of the 100 steps")
    given = parser.parse_args()
    hosts = 16 if given.quick else given.hosts
    steps = 30 if given.quick else max(10, round(given.steps * given.scale))
    run = given.folder or Path(tempfile.mkdtemp(prefix="telemetry-scale-"))
    print(machine())
    figures: dict[str, Any] = {"hosts": hosts, "ranks": hosts * RANKS_OF_HOST, "steps": steps}
    try:
        if not (run / "telemetry" / "steps").is_dir():
            figures["written"] = write(run, hosts, steps, given.processes, given.part)
        figures["bytes"] = sizes(run)
        figures["asked"] = ask_all(run, hosts, steps, report=given.report or given.quick)
        show(figures)
        write_json(given.json, figures)
    finally:
        if not given.keep:
            shutil.rmtree(run, ignore_errors=True)


def write(run: Path, hosts: int, steps: int, processes: int, of_part: int) -> dict[str, float]:
    """All spans, by so many processes at once."""
    shares = np.array_split(np.arange(hosts), processes)
    began_s = time.perf_counter()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        of_each = [run] * processes, [share.tolist() for share in shares], [steps] * processes, [of_part] * processes
        found = list(pool.map(write_hosts, *of_each))
    spans = hosts * RANKS_OF_HOST * steps * SPANS_OF_STEP
    return {
        "spans": spans,
        "cpu_s": sum(one["cpu_s"] for one in found),
        # Of the slower process; what lies between its turns of writing is the making of spans, which is not counted.
        "wall_s": max(one["wall_s"] for one in found),
        "all_s": time.perf_counter() - began_s,
        "peak_bytes": max(one["peak_bytes"] for one in found),
    }


def write_hosts(run: Path, hosts: list[int], steps: int, of_part: int) -> dict[str, float]:
    """The spans of some hosts, one after the other; seconds that their writers took."""
    import resource

    cpu_s = wall_s = 0.0
    settings = WriterSettings(part_s=float("inf"), part_rows=1 << 60)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for host in hosts:
            own = Path(folder) / str(host)
            ranks = range(host * RANKS_OF_HOST, (host + 1) * RANKS_OF_HOST)
            filled = [FilledRing(own / f"{rank}.ring", rank, len(hosts)) for rank in ranks]
            writer = HostWriter(own, run / "telemetry", f"host{host:04}", settings)
            for first in range(0, steps, of_part):
                last = min(first + of_part, steps)
                for ring in filled:
                    ring.fill(first, last, 1.1 if host == SLOW_HOST else 1.0)
                before_cpu_s, before_s = time.process_time(), time.perf_counter()
                taken = writer.tick()
                writer.close_part()
                merge_small_parts(run / "telemetry", f"host{host:04}")  # as it does when a minute is over
                cpu_s, wall_s = cpu_s + time.process_time() - before_cpu_s, wall_s + time.perf_counter() - before_s
                assert taken == (last - first) * SPANS_OF_STEP * RANKS_OF_HOST, taken
            for ring in filled:
                ring.close()
            shutil.rmtree(own)
    return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


class FilledRing:
    """A ring that is filled with whole steps at once, as its rank would have left it."""

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self.recorder = Recorder.open(path, rank=rank)
        self._records = np.frombuffer(self.recorder._memory, RECORD_DTYPE, rings.RING_RECORDS, rings._RECORDS_AT)
        self._rng = np.random.default_rng(rank)
        self._template = self._step(rank)
        self._written = 0

    def close(self) -> None:
        """Let go of the memory."""
        del self._records
        self.recorder.close()

    def _step(self, rank: int) -> np.ndarray:
        """One step from 0 ns: data, 8 micro-batches of forward and backward with a collective and a wait each,
        messages of a pipeline, gradients, the optimizer, the step."""
        recorder = self.recorder
        first = rank - rank % RANKS_OF_HOST
        members = range(first, first + RANKS_OF_HOST)
        forward, backward = recorder.type("forward", "chunk 0", chunk=0), recorder.type("backward", "chunk 0", chunk=0)
        reduce = recorder.type("collective", "all_reduce", group="tensor", ranks=members)
        wait = recorder.type("wait", "all_reduce", group="tensor", ranks=members)
        scatter = recorder.type("collective", "reduce_scatter", group="shard")
        others = [recorder.type(kind, kind) for kind in ("data", "optimizer", "step")]
        rows = [(0, 5, others[0], -1)]
        for batch in range(8):
            at = 5 + 65 * batch
            rows += [(at, at + 20, forward, batch), (at + 16, at + 20, reduce, batch), (at + 18, at + 20, wait, batch)]
            rows += [(at + 22, at + 60, backward, batch), (at + 52, at + 60, reduce, batch)]
        rows += [(525 + n, 527 + n, scatter, -1) for n in range(SPANS_OF_STEP - len(rows) - 2)]
        rows += [(560, 590, others[1], -1), (0, 598, others[2], -1)]
        assert len(rows) == SPANS_OF_STEP
        step = np.zeros(SPANS_OF_STEP, RECORD_DTYPE)
        step["start_ns"] = [row[0] * 10**6 for row in rows]
        step["end_ns"] = [row[1] * 10**6 for row in rows]
        step["type"] = [row[2].number for row in rows]
        step["micro_batch"] = [row[3] for row in rows]
        step["bytes"] = np.where(np.isin(step["type"], [reduce.number, scatter.number]), 1 << 20, 0)
        step["peer"] = -1
        return step[np.argsort(step["end_ns"], kind="stable")]  # a span is recorded when it ends

    def fill(self, first: int, last: int, factor: float) -> None:
        """Put in steps `first` to `last` (not included); passes take `factor` times as long."""
        count = (last - first) * SPANS_OF_STEP
        records = np.tile(self._template, last - first)
        steps = np.repeat(np.arange(first, last), SPANS_OF_STEP)
        begin = steps * STEP_NS
        jitter = self._rng.integers(0, 200_000, count)
        length = records["end_ns"] - records["start_ns"]
        is_pass = length >= 20_000_000
        length = np.where(is_pass & (length < 100_000_000), (length * factor).astype(np.int64), length)
        records["step"] = steps
        records["start_ns"] += begin + jitter
        records["end_ns"] = records["start_ns"] + length
        records["sequence"] = np.arange(self._written + 1, self._written + count + 1)
        self._records[np.arange(self._written, self._written + count) % rings.RING_RECORDS] = records
        self._written += count


def sizes(run: Path) -> dict[str, int]:
    """Bytes of each table, and how many files it has."""
    found = {}
    for table in ("spans", "phases", "steps"):
        files = [entry.stat().st_size for entry in (run / "telemetry" / table).rglob("*.parquet")]
        found[table], found[f"{table} files"] = sum(files), len(files)
    return found


def ask_all(run: Path, hosts: int, steps: int, *, report: bool) -> dict[str, dict[str, Any]]:
    """Each question in a process of its own, with what it took."""
    first = steps // 2
    last = min(first + 99, steps - 1)
    rank = min(SLOW_HOST, hosts - 1) * RANKS_OF_HOST
    asked = {}
    for what in ("heat map", "one rank's step", "slow ranks", *(["report"] if report else [])):
        forget_pages(run)
        arguments = [what, str(run), str(first), str(last), str(rank)]
        began_s = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", _ASK, *arguments], capture_output=True, text=True, check=True)
        asked[what] = {**json.loads(done.stdout.splitlines()[-1]), "process_s": time.perf_counter() - began_s}
    return asked


def forget_pages(run: Path) -> None:
    """Drop the run's files from the page cache, so that they are read from the disk."""
    os.sync()
    for path in (run / "telemetry").rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def show(figures: dict[str, Any]) -> None:
    """The table of docs/benchmarks/telemetry.md."""
    sized = figures["bytes"]
    print(f"{figures['ranks']:,} ranks, {figures['steps']:,} steps, {SPANS_OF_STEP} spans a step")
    if written := figures.get("written"):
        spans, wall_s, cpu_s = written["spans"], written["wall_s"], written["cpu_s"]
        print(f"written          {spans / 1e6:.1f} M spans, {spans / wall_s / 1e6:.2f} M spans/s ({wall_s:.1f} s)")
        print(f"                 {cpu_s / spans * 1e6:.2f} us of CPU and {sized['spans'] / spans:.1f} bytes a span")
        print(f"                 {written['peak_bytes'] / 1e6:.0f} MB of memory at most in a process")
    rank_steps = figures["ranks"] * figures["steps"]
    kept = sized["phases"] + sized["steps"]
    print(f"on disk          spans {sized['spans'] / 1e9:.2f} GB, kept for good {kept / 1e9:.2f} GB"
          f" ({kept / rank_steps:.0f} bytes a rank and step)")  # fmt: skip
    for what, one in figures["asked"].items():
        print(f"{what:16} {one['asked_s']:.2f} s (import {one['import_s']:.2f}, process {one['process_s']:.2f}, CPU"
              f" {one['cpu_s']:.2f}), {one['peak_bytes'] / 1e6:.0f} MB: {one['told']}")  # fmt: skip


if __name__ == "__main__":
    main()
