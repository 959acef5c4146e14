"""What it costs to be several processes on one host: tokens/s of two ranks with a core each, against one process with
two threads. The same model, text and batch through `phalanx train`; contenders take turns, medians over all steps.

    python benchmarks/parallel_host.py                       # 10M parameters, 4,096 tokens a step, fp32
    python benchmarks/parallel_host.py --repeats 5 --steps 12
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser

ROOT = Path(__file__).parents[1]
SHAPE = ("model.layers=6", "model.hidden=384", "model.heads=6", "model.mlp_hidden=1024", "train.global_batch=16")
TINY = ("model.layers=2", "model.hidden=64", "model.heads=2", "train.global_batch=4")
COMMON = (
    "data.sequence_length=256",
    "data.validation_fraction=0.0",
    "data.tokenizer.kind=bytes",
    "model.vocab_multiple=64",
    "optim.name=adamw",
    "optim.lr=1e-3",
    "optim.muon={}",
    "optim.schedule.warmup_steps=0",
    "train.precision=fp32",
    "train.device=cpu",
    "checkpoint.every_steps=0",
    "evaluate.every_steps=0",
    "evaluate.sample_prompt=",
    "logging.every_steps=1",
)
WARMUP_STEPS = 3


@dataclass(frozen=True)
class Contender:
    """A layout of two ranks, and the share of one process's speed that it is to reach."""

    name: str
    overrides: tuple[str, ...]
    bar: float | None = None


CONTENDERS = (
    Contender("one process, 2 threads", ()),
    Contender("parallel.replicate=2", ("parallel.replicate=2",), 0.9),
    Contender("parallel.shard=2 (ZeRO-1)", ("parallel.shard=2",), 0.9),
    Contender("parallel.shard=2, zero=3", ("parallel.shard=2", "parallel.zero=3")),
    Contender("parallel.tensor=2", ("parallel.tensor=2",), 0.75),
    Contender("parallel.tensor=2, parallel block", ("parallel.tensor=2", "model.block=parallel")),
    Contender("parallel.context=2", ("parallel.context=2",)),
    Contender("parallel.pipeline=2", ("parallel.pipeline=2", "train.micro_batch=2")),
)


def tokens_per_s(contender: Contender, shape: tuple[str, ...], steps: int, folder: Path) -> list[float]:
    """Tokens/s of every step but the first few."""
    run = folder / "run"
    subprocess.run(["rm", "-rf", str(run)], check=True)
    overrides = (*shape, *COMMON, *contender.overrides, f"train.steps={steps + WARMUP_STEPS}")
    places = (f"run.folder={run}", f"data.folder={folder / 'prepared'}")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(ROOT / "configs" / "python-stdlib.toml"),
        *overrides,
        *places,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contender.name}: {done.stderr or done.stdout}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["tokens_per_s"] for line in lines if line["kind"] == "step"][WARMUP_STEPS:]


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a tiny model and few steps, to see that it works", repeats=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--only", nargs="*", default=[], help="part of the names of contenders")
    arguments = parser.parse_args()
    shape, steps = (TINY, 2) if arguments.quick else (SHAPE, arguments.steps)
    repeats = 1 if arguments.quick else arguments.repeats
    chosen = [c for c in CONTENDERS[1:] if not arguments.only or any(part in c.name for part in arguments.only)]
    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(repeats):
            reference = tokens_per_s(CONTENDERS[0], shape, steps, Path(name))
            rates.setdefault(CONTENDERS[0].name, []).extend(reference)
            for contender in chosen:
                found = tokens_per_s(contender, shape, steps, Path(name))
                rates.setdefault(contender.name, []).extend(found)
                ratios.setdefault(contender.name, []).append(statistics.median(found) / statistics.median(reference))
    show(chosen, rates, ratios)


def show(chosen: list[Contender], rates: dict[str, list[float]], ratios: dict[str, list[float]]) -> None:
    """A table of medians."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(title=f"two ranks on one host (load {load})", title_justify="left")
    for column in ("layout", "tokens/s", "of one process", "each pair of runs", "bar"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for contender in (CONTENDERS[0], *chosen):
        pairs = ratios.get(contender.name, [])
        table.add_row(
            contender.name,
            f"{statistics.median(rates[contender.name]):,.0f}",
            f"{statistics.median(pairs):.2f}" if pairs else "",
            " ".join(f"{ratio:.2f}" for ratio in pairs),
            "" if contender.bar is None else f"{contender.bar:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
