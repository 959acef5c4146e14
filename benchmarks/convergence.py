"""Loss curves side by side on the same text, as MegaScale 6.2 does: blocks, windows, optimizers, fp8 at equal tokens.

    python benchmarks/convergence.py --folder /tmp/convergence            # every comparison, a few minutes each
    python benchmarks/convergence.py --only optimizers --tokens 500000
    python benchmarks/convergence.py --only precision                     # a GPU's 8-bit numbers, emulated on a CPU

Every variant reads the same samples in the same order from the same seed; each optimizer is given several learning
rates and its best one is compared. Prints a table of held-out bits per byte over training.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser

ROOT = Path(__file__).parents[1]
BASE = (
    "model.layers=4",
    "model.hidden=128",
    "model.heads=4",
    "optim.muon={}",
    "optim.weight_decay=0.1",
    "optim.schedule.warmup_steps=30",
    "optim.schedule.min_ratio=0.1",
    "train.steps=0",
    "train.global_batch=8",
    "checkpoint.every_steps=0",
    "logging.every_steps=100",
    "evaluate.tokens=40000",
)


@dataclass(frozen=True)
class Variant:
    """A named change of the base config, tried with each of some learning rates."""

    name: str
    overrides: tuple[str, ...]
    lrs: tuple[float, ...]
    global_batch: int = 8


ADAMW = ("optim.name=adamw",)
COMPARISONS: dict[str, tuple[Variant, ...]] = {
    "architecture": (
        Variant("serial block, full attention", ADAMW, (4e-3,)),
        Variant("parallel block, full attention", (*ADAMW, "model.block=parallel"), (4e-3,)),
        Variant(
            "parallel block, window 64",
            (*ADAMW, "model.block=parallel", 'model.attention=["window","window","full"]', "model.window=64"),
            (4e-3,),
        ),
    ),
    "optimizers": (
        Variant("AdamW", ADAMW, (2e-3, 4e-3, 8e-3)),
        Variant("CAME", ("optim.name=came", "optim.weight_decay=0.01"), (1.5e-4, 2.5e-4, 5e-4)),
        Variant("AdamW, batch x4", ADAMW, (2e-3, 4e-3, 8e-3), 32),
        Variant("LAMB, batch x4", ("optim.name=lamb", "optim.weight_decay=0.01"), (2e-2, 4e-2, 8e-2), 32),
        Variant("Muon", ("optim.name=muon",), (2e-3, 4e-3)),
    ),
    "precision": tuple(
        Variant(
            name + f", seed {seed}" * bool(seed), (*ADAMW, "model.layers=6", f"train.seed={seed}", *changes), (4e-3,)
        )
        for name, changes in {
            "bf16": ("train.precision=bf16",),
            "fp8, first and last block bf16": ("train.precision=fp8",),
            "fp8 in all blocks": (
                "train.precision=fp8",
                "train.bf16_layers_at_start=0",
                "train.bf16_layers_at_end=0",
            ),
        }.items()
        for seed in (0, 1)
    ),
}


@dataclass(frozen=True)
class Curve:
    """Held-out bits per byte after some numbers of tokens."""

    lr: float
    points: tuple[tuple[int, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


def run(variant: Variant, lr: float, tokens: int, folder: Path, threads: int) -> Curve:
    """Train one variant at one learning rate; a finished run in `folder` is read, not repeated."""
    place = folder / f"{variant.name.replace(' ', '-').replace(',', '')}-{lr:g}-{tokens}"
    steps = tokens // (variant.global_batch * 256)
    overrides = [
        *BASE,
        *variant.overrides,
        f"optim.lr={lr}",
        f"train.tokens={tokens}",
        f"train.global_batch={variant.global_batch}",
        f"evaluate.every_steps={steps // 4}",
        f"train.threads={threads}",
        f"run.folder={place}",
        f"data.folder={folder / 'prepared'}",
    ]
    if variant.global_batch > 8:
        overrides.append("optim.schedule.warmup_steps=10")
    command = [sys.executable, "-m", "phalanx", "train", str(ROOT / "configs" / "python-stdlib.toml"), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    per_step = variant.global_batch * 256
    found = [(e["step"] * per_step, e["validation_bits_per_byte"]) for e in lines if e["kind"] == "evaluation"]
    return Curve(lr, tuple(found))


def compare(name: str, tokens: int, folder: Path, threads: int, console: Console) -> None:
    """Run every variant of a comparison and print its table."""
    curves: dict[str, list[Curve]] = {}
    for variant in COMPARISONS[name]:
        curves[variant.name] = [run(variant, lr, tokens, folder, threads) for lr in variant.lrs]
    table = Table(title=f"{name}: held-out bits per byte over training, {tokens:,} tokens", title_justify="left")
    table.add_column("variant")
    table.add_column("best rate (tried)")
    for share in ("25 %", "50 %", "75 %", "100 %"):
        table.add_column(share, justify="right")
    for label, tried in curves.items():
        best = min(tried, key=lambda curve: curve.last)
        rates = ", ".join(f"{curve.lr:g}: {curve.last:.3f}" for curve in tried)
        cells = [f"{value:.4f}" for _, value in (*best.points[:3], best.points[-1])]
        table.add_row(label, f"{best.lr:g} ({rates})", *cells)
    console.print(table)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a few steps, to see that it works")
    parser.add_argument("--only", choices=list(COMPARISONS))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens per run")
    parser.add_argument("--folder", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    tokens = 40_960 if arguments.quick else arguments.tokens
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else list(COMPARISONS):
        compare(name, tokens, arguments.folder.resolve(), arguments.threads, Console(width=140))


if __name__ == "__main__":
    main()
