"""What recording spans costs a training run: per step, per span, and on disk.

    python benchmarks/span_overhead.py                # ten million parameters, two processes
    python benchmarks/span_overhead.py --quick        # whether it works; figures mean little

One real run of `phalanx train`, in whose steps recording is switched on and off in turns (on off off on …, both ranks
alike), so that a machine that is busy for a while is busy for both. A pair is two steps that follow one another; the
figure is the median over all pairs. Noise of a busy machine is larger than what is looked for, so the cost is also
worked out from its parts: spans of a step times what one takes, and the CPU time of the process that writes them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from support import tiny
from support.harness import benchmark_parser, machine, write_json

from phalanx.core.config import load
from phalanx.data.batch import Batch
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.parallel.engine import Engine
from phalanx.telemetry.spans import Passes, Recorder
from phalanx.telemetry.writer_place import PROGRAM
from phalanx.train import session
from phalanx.train.config import RunConfig
from phalanx.train.training_run import Run

RANKS = 2
WARM_UP = 8
_TURNS = (True, False, False, True)

TEN_MILLION: dict[str, Any] = {
    "model.layers": 6,
    "model.hidden": 384,
    "model.heads": 6,
    "model.vocab_multiple": 64,
    "data.sequence_length": 128,
    "train.global_batch": 4,
    "train.micro_batch": 1,
}
COMMON: dict[str, Any] = {
    "parallel.shard": RANKS,
    "telemetry.spans": True,
    "checkpoint.every_steps": 0,
    "evaluate.final_tokens": 64,
    "logging.every_steps": 20,
}


class Turns:
    """Switches recording of one rank on and off, and times its steps."""

    def __init__(self, run: Run) -> None:
        assert run.ranks.mesh is not None and run.ranks.spans.recorder is not None
        self._run, self._recorder = run, run.ranks.spans.recorder
        self._noted = run.ranks.waits.begun, run.ranks.waits.recorded
        self.is_on = True
        self.steps: list[dict[str, Any]] = []
        self._began: tuple[float, float] | None = None

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; asking for one ends the step before."""
        number = 0
        while True:
            now = time.perf_counter(), time.process_time()
            if self._began is not None and number > WARM_UP:
                wall_s, cpu_s = (b - a for a, b in zip(self._began, now, strict=True))
                self.steps.append({"on": self.is_on, "wall_s": wall_s, "cpu_s": cpu_s})
            self._switch(_TURNS[number % len(_TURNS)])
            number += 1
            self._began = time.perf_counter(), time.process_time()
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _switch(self, on: bool) -> None:
        """As if the run had been started with or without: no object that records stays where it is off."""
        recorder: Recorder | None = self._recorder if on else None
        ranks, trainer = self._run.ranks, self._run.trainer
        assert ranks.mesh is not None and isinstance(trainer, Engine)
        ranks.spans.recorder = recorder
        ranks.waits.begun, ranks.waits.recorded = self._noted if on else (None, None)
        ranks.mesh._recorder = recorder
        for group in ranks.mesh._groups.values():
            group._recorder = recorder
        for runner in trainer._runners.values():
            runner._passes = Passes.of(recorder, 0)
        self.is_on = on


def rank(worker: Worker, config: RunConfig, out: Path) -> None:
    """One of the two."""
    original = Run.batches

    @contextmanager
    def batches(run: Run) -> Iterator[Iterator[Batch]]:
        with original(run) as stream:
            turns, began_s, before_s = Turns(run), time.perf_counter(), writer_cpu_s()
            yield turns.over(stream)
            figures = {
                "steps": turns.steps,
                "took_s": time.perf_counter() - began_s,
                "writer_cpu_s": writer_cpu_s() - before_s,
            }
            (out / f"rank-{worker.rank}.json").write_text(json.dumps(figures))

    Run.batches = batches  # type: ignore[method-assign]
    session.run_rank(worker, config, Path("overhead.toml"), Console(quiet=True))


def writer_cpu_s() -> float:
    """CPU time of the processes of this user that write spans; on a machine with one run, of that of this run."""
    found = 0.0
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and any(PROGRAM in part for part in process.cmdline()):
                used = process.cpu_times()
                found += used.user + used.system
        except (psutil.Error, OSError):
            continue
    return found


def ns_per_span(folder: Path) -> dict[str, float]:
    """Nanoseconds of one span: `Recorder.record`, a `with` block around nothing, and reading a clock twice."""
    recorder = Recorder.open(folder / "0.ring", rank=0)
    kind, count = recorder.type("forward"), 20_000

    def record() -> None:
        for _ in range(count):
            recorder.record(kind, 1, 2, micro_batch=3)

    def block() -> None:
        for _ in range(count):
            with recorder.span(kind, micro_batch=3):
                pass

    def empty() -> None:
        for _ in range(count):
            pass

    found = {}
    for name, run in {"record": record, "with": block, "loop": empty}.items():
        each = []
        for _ in range(25):
            began_ns = time.perf_counter_ns()
            run()
            each.append((time.perf_counter_ns() - began_ns) / count)
        found[name] = min(each)  # what it takes where nothing interrupts it
    return {"record_ns": found["record"] - found["loop"], "with_ns": found["with"] - found["loop"]}


def pairs(steps: list[dict[str, Any]], name: str) -> list[float]:
    """What recording adds, as a share of the step without: one figure for each two steps in a row."""
    found = []
    for first, second in zip(steps[::2], steps[1::2], strict=False):
        if first["on"] != second["on"]:
            on, off = (first, second) if first["on"] else (second, first)
            found.append(on[name] / off[name] - 1)
    return found


def disk(run: Path, spanned_s: float) -> dict[str, float]:
    """Bytes that are kept for good by rank and step, and of all spans by rank and minute."""
    from phalanx.telemetry.queries import Trace  # here: with its libraries ranks could not be forked

    folder = run / "telemetry"
    sizes = {
        table: sum(path.stat().st_size for path in (folder / table).rglob("*.parquet"))
        for table in ("phases", "steps", "spans")
    }
    trace = Trace.open(run)
    rank_steps = trace.sql("select count(distinct (rank, step)) n from steps")["n"][0].as_py()
    spans = trace.sql("select count(*) n from spans")["n"][0].as_py()
    return {
        "spans_per_rank_step": spans / rank_steps,
        "kept_bytes_per_rank_step": (sizes["phases"] + sizes["steps"]) / rank_steps,
        "bytes_per_span": sizes["spans"] / spans,
        # Half of the steps are recorded; a rank that records all makes twice as many in a minute.
        "bytes_per_rank_minute": 2 * sizes["spans"] / RANKS / (spanned_s / 60),
    }


def measure(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """All figures of one run."""
    tiny.write_corpus(folder, documents=2000)
    config = load(RunConfig, None, tiny.overrides(folder, folder / "run", tiny.SETTINGS | COMMON | settings)).value
    status = launch_local(RANKS, "span_overhead:rank", (config, folder), preload=("phalanx.train.session",))
    if status:
        sys.exit(f"the run failed ({status})")
    ranks = [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(RANKS)]
    steps_s = [step["wall_s"] for each in ranks for step in each["steps"] if not step["on"]]
    found: dict[str, Any] = {"step_s": statistics.median(steps_s)}
    for name in ("wall_s", "cpu_s"):
        shares = [share for each in ranks for share in pairs(each["steps"], name)]
        low, middle, high = statistics.quantiles(shares, n=4)
        error = 1.2533 * (high - low) / 1.349 / len(shares) ** 0.5
        found |= {f"overhead_{name}": middle, f"error_{name}": error, "pairs": len(shares)}
    took_s = ranks[0]["took_s"]
    found |= ns_per_span(folder) | disk(folder / "run", took_s)
    # A collective is two spans by `record`, and one object; others are `with` blocks: all are taken for the dearer.
    found["overhead_worked_out"] = found["spans_per_rank_step"] * found["with_ns"] * 1e-9 / found["step_s"]
    # It takes cores from the ranks at most: where one is free, nothing.
    cores = len(os.sched_getaffinity(0))
    found["writer_share_of_cores"] = ranks[0]["writer_cpu_s"] / took_s / cores
    return found


def shown(found: dict[str, Any]) -> str:
    """A table."""
    return "\n".join(
        [
            f"step without spans                {found['step_s'] * 1e3:8.1f} ms, {found['pairs']} pairs",
            f"overhead, wall time               {found['overhead_wall_s']:8.2%} ± {found['error_wall_s']:.2%}",
            f"overhead, CPU time                {found['overhead_cpu_s']:8.2%} ± {found['error_cpu_s']:.2%}",
            f"overhead, spans times their cost  {found['overhead_worked_out']:8.3%}",
            f"the writer, of all cores          {found['writer_share_of_cores']:8.3%}",
            f"record                            {found['record_ns']:8.0f} ns",
            f"with block                        {found['with_ns']:8.0f} ns",
            f"spans of a rank and step          {found['spans_per_rank_step']:8.1f}",
            f"kept for good                     {found['kept_bytes_per_rank_step']:8.0f} bytes a rank and step",
            f"in full detail                    {found['bytes_per_rank_minute'] / 1e6:8.2f} MB a minute and rank"
            f" ({found['bytes_per_span']:.1f} bytes a span)",
        ]
    )


def main() -> None:
    """Measure, and print a table."""
    parser = benchmark_parser(__doc__, "a tiny model and a few steps", as_json=True)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default 400)")
    given = parser.parse_args()
    settings = {} if given.quick else TEN_MILLION
    steps = 24 if given.quick else given.steps
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), settings | {"train.steps": steps + WARM_UP})
    print(f"{machine()}, {RANKS} ranks, {steps} steps")
    print(shown(found))
    write_json(given.json, found)


if __name__ == "__main__":
    main()
