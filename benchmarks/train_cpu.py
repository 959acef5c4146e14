"""Training on a CPU: our loop against other people's, bf16 against fp32, and merged against separate projections.

    python benchmarks/train_cpu.py --peers-python PEERS/bin/python      # everything, half an hour
    python benchmarks/train_cpu.py --quick                              # whether it works; figures mean little

Every run is a fresh process; contenders take turns (A B C A B C …), so that a busy machine slows all alike. A run's
figure is the median over its steps after a warm-up, a contender's the median over its runs; ratios are medians of the
ratios within a round. CPU time is user and system time of all threads of the process.

Hugging Face transformers and litgpt are no dependencies of ours. Make them an environment of their own and name its
interpreter; a peer that is not there is left out:

    python -m venv PEERS && PEERS/bin/pip install torch==2.13.0 transformers accelerate litgpt

nanoGPT is no package: --nanogpt DIR times the `train.py` of your checkout beside a loop of the same form written here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders.task import Task
from support.harness import benchmark_parser

from phalanx.core.config import load
from phalanx.model.shapes import flops_per_token, num_parameters
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_numbers import complete_model

HERE = Path(__file__).parent
TINYSHAKESPEARE = HERE.parents[1] / "shared" / "data" / "text" / "tinyshakespeare" / "input.txt"
# What must be importable under the interpreter of the peers.
PEERS = {"huggingface": ("transformers", "accelerate"), "lit": ("litgpt",)}
SYMBOLS = 65
# The 10M-parameter model of the bars: nanoGPT's for characters on a GPU.
TEN_MILLION: dict[str, Any] = {"layers": 6, "heads": 6, "hidden": 384, "length": 256, "batch": 8, "threads": 2}


@dataclass(frozen=True)
class Entry:
    """A line of a table: a contender and its task."""

    label: str
    contender: str
    task: Task
    python: str = sys.executable

    def run(self) -> dict[str, Any]:
        """What the contender prints in a process of its own.

        Raises:
            SystemExit: it failed; with the end of what it said.
        """
        with tempfile.TemporaryDirectory() as folder:
            task = dataclasses.replace(self.task, folder=folder)
            command = [self.python, "-m", "contenders", self.contender, task.to_json()]
            done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{self.label} failed:\n{done.stdout[-500:]}{done.stderr[-1500:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass
class Timed:
    """Milliseconds of a step in every run of an entry: median CPU and wall, and the least CPU of any step."""

    entry: Entry
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    least_ms: list[float] = field(default_factory=list)

    def add(self, stamps: Sequence[tuple[float, float]]) -> None:
        """Take up a run: its last two thirds, in windows of ten steps, because a loop does more at some steps."""
        kept = stamps[len(stamps) // 3 :]
        windows = [(kept[i], kept[i + 10]) for i in range(0, len(kept) - 10, 10)]
        cpu = [(end[0] - begin[0]) * 100 for begin, end in windows]  # seconds of ten steps -> ms of one
        self.cpu_ms.append(statistics.median(cpu))
        self.least_ms.append(min(cpu))
        self.wall_ms.append(statistics.median((end[1] - begin[1]) * 100 for begin, end in windows))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.entry.task.batch * self.entry.task.length


def race(entries: list[Entry], repeats: int) -> list[Timed]:
    """Run all entries in turn, `repeats` times over."""
    timed = [Timed(entry) for entry in entries]
    for number in range(repeats):
        for one in timed:
            print(f"round {number + 1} of {repeats}: {one.entry.label}", file=sys.stderr)
            one.add(one.entry.run()["stamps"])
    return timed


def table(timed: list[Timed]) -> str:
    """Markdown; ratios say how many times the first entry's tokens per second an entry's are."""
    first = timed[0]
    lines = [
        f"| | CPU ms/step | least | CPU us/token | wall ms/step | tokens/s | CPU: {first.entry.label} is | wall |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in timed:
        cpu, wall = statistics.median(one.cpu_ms), statistics.median(one.wall_ms)
        ratios = [ratio(one.cpu_ms, first.cpu_ms), ratio(one.wall_ms, first.wall_ms)]
        lines.append(
            f"| {one.entry.label} | {cpu:.1f} | {min(one.least_ms):.1f} | {cpu * 1e3 / one.tokens:.1f} | {wall:.1f} | "
            f"{one.tokens * 1e3 / wall:,.0f} | {ratios[0]:.2f}x | {ratios[1]:.2f}x |"
        )
    return "\n".join(lines)


def ratio(theirs: list[float], mine: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, mine, strict=True))


def contenders(task: Task, options: argparse.Namespace) -> list[Entry]:
    """Ours first, then every loop that can be run here; says which cannot and what it takes."""
    entries = [Entry("ours", "ours", task), Entry("plain PyTorch loop", "plain", task)]
    if options.nanogpt:
        entries.append(Entry("nanoGPT", "nanogpt", dataclasses.replace(task, nanogpt=str(options.nanogpt.resolve()))))
    for name, label in (("huggingface", "HF Trainer"), ("lit", "litgpt (fit)")):
        missing = [package for package in PEERS[name] if not importable(options.peers_python, package)]
        if missing:
            print(f"{label} is left out: {options.peers_python} lacks {', '.join(missing)} (--help says how)\n")
        else:
            entries.append(Entry(label, name, task, options.peers_python))
    if any(entry.contender == "huggingface" for entry in entries):
        default = dataclasses.replace(task, activation="gelu_new")  # what GPT2Config has where it is not told otherwise
        entries.append(Entry("HF Trainer, its default GELU", "huggingface", default, options.peers_python))
    return entries


def importable(python: str, package: str) -> bool:
    question = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", question]).returncode == 0


def compare_loops(task: Task, options: argparse.Namespace) -> None:
    for threads in options.threads:
        entries = contenders(dataclasses.replace(task, threads=threads), options)
        print(f"## The same GPT, fp32 eager, {threads} thread(s): {task.batch} x {task.length} tokens a step\n")
        print(table(race(entries, options.repeats)) + "\n")


def compare_precisions(task: Task, options: argparse.Namespace) -> None:
    """bf16 against fp32 for 10M parameters, and the share of the rate of matrix products that each reaches."""
    big = dataclasses.replace(task, **TEN_MILLION, steps=max(36, task.steps // 3))
    tasks = {name: dataclasses.replace(big, precision=name) for name in ("bf16", "fp32")}
    entries = [Entry(f"ours, {name}", "ours", one) for name, one in tasks.items()]
    entries += [Entry(f"plain loop, {name}", "plain", one) for name, one in tasks.items()]
    timed = race(entries, options.repeats)
    rates = {name: best_rates(Entry("GEMM", "gemm", one), options.repeats) for name, one in tasks.items()}
    print(f"## bf16 and fp32, {describe(big)}\n")
    print(table(timed) + "\n")
    print("| | model GFLOP/s | GEMM of its shapes | share | GEMM of 1024^3 | share |\n|---|--:|--:|--:|--:|--:|")
    for one in timed:
        rate = one.tokens * model_flops(big) / statistics.median(one.wall_ms) / 1e6
        own, square = (value / 1e9 for value in rates[one.entry.task.precision])
        print(f"| {one.entry.label} | {rate:.0f} | {own:.0f} | {rate / own:.0%} | {square:.0f} | {rate / square:.0%} |")
    print()


def compare_projections(task: Task, options: argparse.Namespace) -> None:
    """The parallel block with merged and with separate projections, in both precisions and two sizes."""
    for size in ({"threads": 2}, TEN_MILLION):
        for precision in ("fp32", "bf16"):
            base = dataclasses.replace(task, **size, precision=precision, steps=max(36, task.steps // 3))
            entries = []
            for name, merged in (("merged", "true"), ("separate", "false")):
                overrides = ("model.block=parallel", f"model.merged_projections={merged}")
                entries.append(Entry(name, "ours", dataclasses.replace(base, overrides=overrides)))
            print(f"## Parallel block, {precision}, {describe(base)}\n")
            print(table(race(entries, options.repeats)) + "\n")


def best_rates(entry: Entry, repeats: int) -> tuple[float, float]:
    runs = [entry.run() for _ in range(repeats)]
    return max(run["own"] for run in runs), max(run["square"] for run in runs)


def model_flops(task: Task) -> float:
    """FLOPs of forward and backward per token, causal attention counted as the half that it is."""
    return flops_per_token(resolved(task), task.length).total


def describe(task: Task) -> str:
    count = num_parameters(resolved(task)) / 1e6
    return f"{count:.1f}M parameters, {task.batch} x {task.length} tokens a step, {task.threads} thread(s)"


def resolved(task: Task) -> Any:
    from contenders.ours import RECIPE, settings

    return complete_model(load(RunConfig, RECIPE, settings(task)).value, SYMBOLS)


def make_text(folder: Path) -> Path:
    """Tinyshakespeare where it is at hand; else the standard library's sources in as many symbols (65), as long."""
    if TINYSHAKESPEARE.exists():
        return TINYSHAKESPEARE
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)[:1_115_394]
    kept = {symbol for symbol, _ in Counter(text).most_common(SYMBOLS - 1)}
    path = folder / "text.txt"
    path.write_text("".join(symbol if symbol in kept else "\x7f" for symbol in text), encoding="utf-8")
    return path


def headline(task: Task) -> str:
    """Machine, versions and text, for whoever reads the figures later."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    return (
        f"{name}, {len(os.sched_getaffinity(0))} cores, {load}; torch {importlib.metadata.version('torch')}, "
        f"Python {platform.python_version()}; text: {Path(task.text).name}\n"
    )


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one short run of each loop", repeats=5)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has transformers and litgpt")
    parser.add_argument("--nanogpt", type=Path, help="folder of a checkout of nanoGPT")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=150, help="steps of a run; the first third warms up")
    parser.add_argument("--only", nargs="+", choices=["loops", "precisions", "projections"])
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.threads = 1, 45, [1]
        options.only = options.only or ["loops"]
    parts = {"loops": compare_loops, "precisions": compare_precisions, "projections": compare_projections}
    with tempfile.TemporaryDirectory() as folder:
        task = Task(text=str(make_text(Path(folder))), folder="", steps=options.steps)
        print(headline(task))
        for name in options.only or parts:
            parts[name](task, options)


if __name__ == "__main__":
    main()
