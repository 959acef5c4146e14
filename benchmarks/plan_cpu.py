"""Predicted against measured: step times of our own CPU runs, after `phalanx plan calibrate`.

    python benchmarks/plan_cpu.py                            # calibrates first; a quarter of an hour on two cores
    python benchmarks/plan_cpu.py --cluster this.toml        # with a file that `phalanx plan calibrate` wrote
    python benchmarks/plan_cpu.py --rows shard tensor --parts
    python benchmarks/plan_cpu.py --quick                    # whether it works; figures mean little

Each row is a run of the very training loop of `phalanx train` in processes of its own, on made-up tokens; its figure is
the median over its steps after a warm-up. Rows take turns (``--repeats``), so that a busy machine slows all alike. The
bar is 15 % with no more processes than cores, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.harness import benchmark_parser, write_json

from phalanx.api.planning import plan_of
from phalanx.core.config import load
from phalanx.kernels.linear import cpu_has_fast_bf16
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.types import Prediction
from phalanx.train.config import RunConfig

HERE = Path(__file__).parent
TOKENS = 1 << 21
WORDS = 256
BAR = 0.15
COMMON = (
    "data.tokenizer.kind=none",
    "data.validation_fraction=0.0",
    "model.vocab_multiple=64",
    "train.device=cpu",
    "train.precision=fp32",
    "checkpoint.every_steps=0",
    "evaluate.every_steps=0",
)


@dataclass
class Row:
    """One run: what is trained, how it is spread, and what came of it.

    Attributes:
        steps: after two that warm up.
        measured_s: a step's median of each repeat.
    """

    name: str
    overrides: tuple[str, ...]
    ranks: int = 1
    steps: int = 8
    measured_s: list[float] = field(default_factory=list)
    prediction: Prediction | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        assert self.prediction is not None
        return self.prediction.step_s / statistics.median(self.measured_s) - 1


def model(layers: int, hidden: int, heads: int, length: int, batch: int, words: int = WORDS) -> tuple[str, ...]:
    """Settings of a model and its batch."""
    return (
        f"model.layers={layers}",
        f"model.hidden={hidden}",
        f"model.heads={heads}",
        f"data.sequence_length={length}",
        f"train.global_batch={batch}",
        f"data.tokenizer.vocab_size={words}",
    )


SMALL, MIDDLE = model(4, 128, 4, 128, 16), model(6, 384, 6, 256, 8)
GPT = ("model.norm=layer", "model.activation=gelu", "model.bias=all", "model.position=learned")
ROWS = (
    Row("1M", SMALL, steps=40),
    Row("5M, 1,024 words", model(6, 256, 4, 256, 8, 1024), steps=20),
    Row("11M", (*MIDDLE, "train.micro_batch=8")),
    Row("11M, GPT-2's block", (*MIDDLE, *GPT, "train.micro_batch=8")),
    Row("11M, parallel block", (*MIDDLE, "model.block=parallel", "train.micro_batch=8")),
    Row("11M, 4 micro-batches", (*MIDDLE, "train.micro_batch=2")),
    Row("11M, 1,024 tokens", model(6, 384, 6, 1024, 2)),
    Row("11M, windows of 128", (*model(6, 384, 6, 1024, 2), 'model.attention=["window","full"]', "model.window=128")),
    Row("11M, selective recompute", (*MIDDLE, "train.micro_batch=8", "train.recompute=selective")),
    Row("11M, full recompute", (*MIDDLE, "train.micro_batch=8", "train.recompute=full")),
    Row("11M, CAME", (*MIDDLE, "train.micro_batch=8", "optim.name=came")),
    Row("11M, LAMB", (*MIDDLE, "train.micro_batch=8", "optim.name=lamb")),
    Row("11M, Muon", (*MIDDLE, "train.micro_batch=8", "optim.name=muon")),
    Row("11M, bf16", (*MIDDLE, "train.micro_batch=8", "train.precision=bf16")),
    Row("11M, bf16, Muon", (*MIDDLE, "train.micro_batch=8", "train.precision=bf16", "optim.name=muon")),
    Row("40M, 8,192 words", model(6, 640, 10, 512, 2, 8192), steps=6),
    Row("60M", model(8, 768, 12, 512, 2, 1024), steps=6),
    Row("11M, replicate 2", (*MIDDLE, "parallel.replicate=2"), 2),
    Row("11M, shard 2", (*MIDDLE, "parallel.shard=2"), 2),
    Row("11M, shard 2, zero 3", (*MIDDLE, "parallel.shard=2", "parallel.zero=3"), 2),
    Row("11M, tensor 2", (*MIDDLE, "parallel.tensor=2"), 2),
    Row("11M, context 2", (*MIDDLE, "parallel.context=2"), 2),
    Row("11M, pipeline 2", (*MIDDLE, "parallel.pipeline=2", "train.micro_batch=2"), 2),
    Row("5M, shard 2", (*model(6, 256, 4, 256, 8, 1024), "parallel.shard=2"), 2, steps=20),
)


def write_config(folder: Path) -> Path:
    """A config whose text are random tokens."""
    tokens = array("H", random.Random(0).choices(range(WORDS), k=TOKENS))
    (folder / "train.bin").write_bytes(tokens.tobytes())
    path = folder / "run.toml"
    source = f'kind = "nanogpt"\npath = {json.dumps(str(folder / "train.bin"))}\n'
    path.write_text(f"[data]\nfolder = {json.dumps(str(folder / 'prepared'))}\n\n[[data.sources]]\n{source}\n[train]\n")
    return path


def overrides_of(row: Row, folder: Path, steps: int, threads: int) -> list[str]:
    own = (f"train.steps={steps}", f"train.threads={threads}", f"run.folder={folder / 'run'}", "run.resume=never")
    return [*COMMON, *row.overrides, *own]


def measure(row: Row, config: Path, options: argparse.Namespace) -> float:
    """Seconds of a step, the median after two that warm up.

    Raises:
        SystemExit: the run failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stamps.json"
        steps = 3 + (2 if options.quick else row.steps)
        settings = overrides_of(row, Path(folder), steps, options.threads if row.ranks == 1 else 0)
        command = [sys.executable, "-m", "support.plan_steps", str(out), str(config), *settings]
        environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
        done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{row.name} failed:\n{done.stdout[-500:]}{done.stderr[-1500:]}")
        column = 1 if options.clock == "cpu" else 0
        ends = [stamp[column] for stamp in json.loads(out.read_text())][2:]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def predicted(row: Row, config: Path, cluster: Path, threads: int) -> Prediction:
    settings = overrides_of(row, Path("unused"), 10, threads if row.ranks == 1 else 0)
    loaded = load(RunConfig, config, settings).value
    machine = load_cluster(cluster, row.ranks)
    plan = plan_of(loaded, machine)
    return predict(plan.job, plan.strategy, machine)


def calibrate(folder: Path, quick: bool) -> Path:
    """What `phalanx plan calibrate` writes."""
    path = folder / "this.toml"
    command = [sys.executable, "-m", "phalanx", "plan", "calibrate", "--output", str(path)]
    subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=subprocess.DEVNULL)
    return path


def table(rows: Sequence[Row]) -> str:
    lines = ["| run | ranks | measured ms | predicted ms | error |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        assert row.prediction is not None
        measured = statistics.median(row.measured_s)
        predicted_s = row.prediction.step_s
        lines.append(
            f"| {row.name} | {row.ranks} | {measured * 1e3:,.1f} | {predicted_s * 1e3:,.1f} | {row.error:+.1%} |"
        )
    errors = [abs(row.error) for row in rows]
    over = sum(error > BAR for error in errors)
    lines.append(
        f"\nmean {statistics.fmean(errors):.1%}, largest {max(errors):.1%}, {over} of {len(rows)} over {BAR:.0%}"
    )
    return "\n".join(lines)


def parts_table(row: Row) -> str:
    """What the prediction is made of, the longest first."""
    assert row.prediction is not None
    ordered = sorted(row.prediction.parts, key=lambda part: -part.seconds)
    return f"\n{row.name}\n" + "\n".join(f"  {part.seconds * 1e3:9.2f} ms  {part.path}" for part in ordered)


def main() -> None:
    parser = benchmark_parser(
        __doc__, quick="few steps, once, two rows unless --rows names others", repeats=2, as_json=True
    )
    parser.add_argument("--cluster", type=Path, help="file that `phalanx plan calibrate` wrote; default: write one now")
    parser.add_argument("--rows", nargs="+", default=[], help="only rows whose name contains one of these")
    parser.add_argument("--threads", type=int, default=0, help="of runs with one rank; 0: one for each core")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--parts", action="store_true", help="also what each prediction is made of")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.rows = 1, options.rows or ["1M", "11M, shard 2, zero"]
    rows = [row for row in ROWS if not options.rows or any(name in row.name for name in options.rows)]
    if not cpu_has_fast_bf16():
        rows = [row for row in rows if "bf16" not in row.name]
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder))
        cluster = options.cluster or calibrate(Path(folder), options.quick)
        for row in rows:
            row.prediction = predicted(row, config, cluster, options.threads)
        for turn in range(options.repeats):
            for row in rows:
                row.measured_s.append(measure(row, config, options))
                print(f"turn {turn + 1}: {row.name} {row.measured_s[-1] * 1e3:,.1f} ms", file=sys.stderr)
            load = f"load {os.getloadavg()[0]:.1f} after turn {turn + 1} of {options.repeats}"
            print(f"{load}\n\n{table(rows)}\n", flush=True)
    if options.parts:
        print("\n".join(parts_table(row) for row in rows))
    figures = [{"run": r.name, "measured_s": r.measured_s, "predicted_s": r.prediction.step_s} for r in rows]  # type: ignore[union-attr]
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
