"""Training steps on one CUDA device beside those of peers: time, tokens per second, MFU and memory.

    python benchmarks/train_gpu.py                                            # ours alone, compiled
    python benchmarks/train_gpu.py --peers --nanogpt DIR --text FILE          # beside nanoGPT, transformers, Liger, …
    python benchmarks/train_gpu.py --shapes llama-8b-4-layers --ours bf16 fp8 eager --json out.json

A step is forward, backward, clipped gradients and AdamW, bf16 products over fp32 weights, on random tokens that are on
the device already. Every contender runs in a process of its own, in turn, --rounds times; a figure is the median over
rounds of the median over steps, after a warm-up, and a ratio the median of the ratios within rounds. MFU is told twice:
with attention counted as causal (half of the square; embeddings out, the head in), and as PaLM's formula has it (six
times all parameters, embeddings in, and the whole square); recomputation counts in neither. Both are over the bf16 peak
of the data sheet, for fp8 too. --text adds the trainer itself: `phalanx train` on that file, checkpoints on.

Peers that cannot be imported under --peers-python are left out, and named. Without a CUDA device it says so and ends;
`--device cpu --shapes tiny tiny-llama` runs the same code on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.task import SHAPES, Task
from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser, write_json

from phalanx.core import units

HERE = Path(__file__).parent
# What must be importable under the interpreter of the peers.
NEEDS = {"huggingface": "transformers", "liger": "liger_kernel", "torchtitan": "torchtitan"}
OURS = {
    "bf16": {"compiled": True},
    "fp8": {"compiled": True, "precision": "fp8"},
    "eager": {"compiled": False},
}


@dataclass
class Contender:
    """A line of the table.

    Attributes:
        rounds: what each of its processes said; None where that failed, as `problem` says.
    """

    label: str
    name: str
    task: Task
    python: str = sys.executable
    rounds: list[dict[str, Any] | None] = field(default_factory=list)
    problem: str = ""

    def run(self) -> None:
        """Once more, in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            task = dataclasses.replace(self.task, folder=folder)
            command = [self.python, "-m", "gpu", self.name, task.to_json()]
            done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        said = done.stdout.strip().splitlines()
        if done.returncode or not said:
            self.problem = next(
                (line for line in reversed(done.stderr.splitlines()) if "Error" in line), "nothing was said"
            )
            self.rounds.append(None)
        else:
            self.rounds.append(json.loads(said[-1]))

    def median(self, what: str) -> float:
        """Over the rounds that ended well."""
        return statistics.median(found[what] for found in self.rounds if found is not None)

    def ratio(self, to: Contender) -> float | None:
        """How many times as fast as this one another is, round by round."""
        pairs = [(a, b) for a, b in zip(self.rounds, to.rounds, strict=True) if a is not None and b is not None]
        return statistics.median(a["step_s"] / b["step_s"] for a, b in pairs) if pairs else None


def contenders(arguments: argparse.Namespace, shape: str) -> Iterator[Contender]:
    """Those that can train `shape` here; the first is ours, to which the others are compared."""
    base = Task(shape, arguments.device, 3 if arguments.quick else arguments.steps)
    for label in arguments.ours:
        task = dataclasses.replace(base, **OURS[label])
        if arguments.no_compile:
            task = dataclasses.replace(task, compiled=False)
        yield Contender(f"ours, {label}", "ours.step", task)
    if arguments.text:
        text = dataclasses.replace(base, source=str(arguments.text.resolve()), compiled=not arguments.no_compile)
        yield Contender("ours, the trainer", "ours.trainer", text)
    if not arguments.peers:
        return
    sizes = SHAPES[shape]
    base = dataclasses.replace(base, compiled=not arguments.no_compile)
    if sizes.state_bits != 32:
        return
    if sizes.gpt and arguments.nanogpt:
        source = str(arguments.nanogpt.resolve())
        yield Contender("nanoGPT", "peers.nanogpt", dataclasses.replace(base, source=source), arguments.peers_python)
    names = ("huggingface",) if sizes.gpt else tuple(NEEDS)
    for name in names:
        if _has(arguments.peers_python, NEEDS[name]):
            yield Contender(name, f"peers.{name}", base, arguments.peers_python)
        else:
            print(f"{name} is left out: {NEEDS[name]} cannot be imported by {arguments.peers_python}")


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def measure(arguments: argparse.Namespace, shape: str) -> dict[str, Any]:
    """A table of one shape, and its figures."""
    about = Contender("products", "ours.products", Task(shape, arguments.device))
    about.run()
    if about.problem:
        raise SystemExit(f"the device could not be measured: {about.problem}")
    facts = about.rounds[0]
    assert facts is not None
    entries = list(contenders(arguments, shape))
    for _ in range(arguments.rounds):
        for entry in entries:
            entry.run()
    sizes = SHAPES[shape]
    title = f"{shape}, {units.count(facts['parameters'])} parameters, {sizes.batch} x {sizes.length} tokens; "
    title += f"{facts['device']}; large product: {facts['product_flops_per_s'] / 1e12:.0f} TFLOP/s"
    table = Table(title=title, title_justify="left")
    for column in ("", "step", "tokens/s", "MFU", "MFU, PaLM", "of products", "memory", "first step", "ours is"):
        table.add_column(column, justify="left" if not column else "right")
    found = [_figures(entry, entries[0], facts) for entry in entries]
    for figures in found:
        table.add_row(*_cells(figures))
    Console(width=150).print(table)
    return {"shape": shape, **facts, "contenders": found}


def _figures(entry: Contender, first: Contender, facts: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {"label": entry.label, "problem": entry.problem}
    if all(found is None for found in entry.rounds):
        return figures
    sizes, step_s = entry.task.sizes, entry.median("step_s")
    tokens_per_s = sizes.batch * sizes.length / step_s
    flops_per_s, peak = tokens_per_s * facts["flops_per_token"], facts["peak_flops_per_s"]
    return figures | {
        "step_s": step_s,
        "tokens_per_step": sizes.batch * sizes.length,
        "tokens_per_s": tokens_per_s,
        "mfu": None if peak is None else flops_per_s / peak,
        "palm_mfu": None if peak is None else tokens_per_s * facts["palm_flops_per_token"] / peak,
        "product_share": flops_per_s / facts["product_flops_per_s"],
        "peak_bytes": entry.median("peak_bytes"),
        "first_step_s": entry.median("first_step_s"),
        "ours_is": entry.ratio(first),
    }


def _cells(figures: dict[str, Any]) -> list[str]:
    if "step_s" not in figures:
        return [figures["label"], f"failed: {figures['problem'][:90]}"]
    shares = ["n/a" if figures[name] is None else f"{figures[name]:.1%}" for name in ("mfu", "palm_mfu")]
    return [
        figures["label"],
        f"{figures['step_s'] * 1e3:,.1f} ms",
        f"{figures['tokens_per_s']:,.0f}",
        *shares,
        f"{figures['product_share']:.1%}",
        units.size(int(figures["peak_bytes"])),
        units.duration(figures["first_step_s"]) if figures["first_step_s"] else "",
        "" if figures["ours_is"] is None else f"{figures['ours_is']:.2f}x",
    ]


def main() -> None:
    parser = benchmark_parser(__doc__, quick="few steps", as_json=True)
    usual = ["gpt2-124m", "llama-1.3b", "llama-8b-4-layers", "llama-8b"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=usual)
    parser.add_argument("--ours", nargs="+", choices=list(OURS), default=["bf16"])
    parser.add_argument("--no-compile", action="store_true", help="run everything as it is written")
    parser.add_argument("--peers", action="store_true", help="peers too")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has them (implies --peers)")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT (implies --peers)")
    parser.add_argument("--text", type=Path, help="text file for the trainer itself")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    arguments.peers |= arguments.peers_python != sys.executable or arguments.nanogpt is not None
    if arguments.device == "cuda" and not _has_gpu():
        print("no CUDA device is visible: nothing was measured (--device cpu --shapes tiny runs the code on a CPU)")
        return
    results = [measure(arguments, shape) for shape in arguments.shapes]
    write_json(arguments.json, results)


def _has_gpu() -> bool:
    """Asked of another process: this one is not to hold memory of the device."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    main()
