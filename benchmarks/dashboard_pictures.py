"""Pictures of the dashboard's pages of runs for docs/dashboard.md, taken in a real browser.

python benchmarks/dashboard_pictures.py            # writes docs/images/dashboard-*.png
python benchmarks/dashboard_pictures.py --quick    # takes them, and writes nothing

The runs are made by this script; their curves are no measurements.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from contextlib import chdir
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from support.browser import served, watched, why_no_browser
from support.harness import benchmark_parser

from phalanx.dashboard.data_source import DataSource
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.prepare import prepare
from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_list import keep_note, keep_tags, note_end
from phalanx.telemetry.run_samples import keep_sample

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PICTURES = (
    ("dashboard-runs", "/?span=50&column=loss", "light", 900),
    ("dashboard-run", "/run?run=lr/3e-3&span=50", "dark", 1150),
    ("dashboard-batch", "/run/batch?run=lr/3e-3&step=1204", "light", 620),
    ("dashboard-logs", "/logs?run=lr/3e-3", "light", 640),
)
_STEPS = 2000
_SPIKE = 1204
_RUNS = (("base", 3e-4, 256, 2000, 86_000), ("wide", 3e-4, 512, 900, 260), ("lr/1e-3", 1e-3, 256, 1240, 4000))
_SUBJECTS = ("the tide", "a lighthouse", "an old clock", "the baker", "a small boat", "the winter")
_DEEDS = ("turned slowly", "remembered the sea", "kept its promise", "was painted blue", "waited for spring")


def make_runs(folder: Path) -> Path:
    """Four runs in ``runs`` below `folder`, one of which broke off after its loss rose."""
    config = _prepare(folder)
    for name, lr, hidden, steps, age_s in _RUNS:
        _run(folder / "runs" / name, config, lr, hidden, steps, age_s)
    broken = _run(folder / "runs" / "lr" / "3e-3", config, 3e-3, 256, 1300, 700, spike=_SPIKE)
    note_end(broken, 1300, "UserError: 20 steps in a row were bad")
    keep_note(broken, "higher than base by ten; the spike comes with a broken file")
    keep_tags(broken, ["lr-sweep"], [])
    keep_tags(folder / "runs" / "base", ["lr-sweep", "reference"], [])
    for step in (400, 800, 1200):
        keep_sample(broken, step, "The lighthouse", _continuation(step))
    _log(broken)
    return folder / "runs"


def _prepare(folder: Path) -> DataConfig:
    draw = random.Random(1)
    documents = [
        " ".join(f"{draw.choice(_SUBJECTS).capitalize()} {draw.choice(_DEEDS)}." for _ in range(draw.randint(2, 9)))
        for _ in range(4000)
    ]
    (folder / "stories.txt").write_text("\n".join(documents))
    config = DataConfig(
        sequence_length=256,
        sources=(SourceConfig(kind="text", name="stories", path=("stories.txt",), document_separator="\n"),),
        tokenizer=TokenizerConfig(kind="bytes"),
        validation_fraction=0.0,
    )
    with chdir(folder):
        prepare(config)
    return config


def _run(path: Path, data: DataConfig, lr: float, hidden: int, steps: int, age_s: float, spike: int = 0) -> Path:
    path.mkdir(parents=True)
    draw = random.Random(str(path.name))
    settings = {
        "data": data.model_dump(mode="json"),
        "model": {"layers": 8, "hidden": hidden},
        "optim": {"lr": lr, "batch_warmup": {"start": 0}},
        "train": {"steps": _STEPS, "global_batch": 32},
    }
    above = path.parents[path.parts[::-1].index("runs")]
    start = {"started": "2026-11-25T18:00:00Z", "host": "gpu-07", "directory": str(above)}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "environment.json").write_text(json.dumps([start]))
    with (path / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            rise = 2.5 * math.exp(-(step - spike) / 60) if spike and step >= spike else 0.0
            loss = 1.2 + (4.2 - hidden / 800) * (step + 3) ** (-0.28 - 20 * min(lr, 1e-3)) + rise + draw.gauss(0, 0.03)
            values = {
                "loss": loss,
                "lr": lr * min(step / 100, 1) * (0.55 + 0.45 * math.cos(math.pi * step / _STEPS)),
                "grad_norm": 0.4 + abs(draw.gauss(0, 0.1)) + rise,
                "skipped": int(spike <= step < spike + 3 and spike > 0),
                "tokens": step * 32 * 256,
                "tokens_per_s": 2.1e7 / hidden * (1 + draw.gauss(0, 0.01)),
                "step_s": 32 * 256 * hidden / 2.1e7,
                "mfu": 0.41 + draw.gauss(0, 0.004),
            }
            file.write(metrics_line("step", step, values))
            if step % 200 == 0:
                file.write(metrics_line("evaluation", step, {"validation_loss": loss + 0.06}))
                file.write(metrics_line("checkpoint", step, {"checkpoint/name": f"step-{step:08d}"}))
    os.utime(path / "metrics.jsonl", (time.time() - age_s,) * 2)
    return path


def _continuation(step: int) -> str:
    draw = random.Random(step)
    words = " ".join(f"{draw.choice(_DEEDS)}. {draw.choice(_SUBJECTS).capitalize()}" for _ in range(3))
    return f" {words} waited."


def _log(path: Path) -> None:
    (path / "logs").mkdir()
    lines = [
        ("INFO", f"step {step}/{_STEPS}  loss {1.7 + 2.4 * (step >= 1210):.4f}  lr 1.2e-03")
        for step in range(1090, 1300, 10)
    ]
    lines.insert(12, ("WARNING", f"step {_SPIKE}: the update was left out: loss 4.4012 against 1.9021 before"))
    lines += [
        ("ERROR", "Traceback (most recent call last):"),
        ("ERROR", '  File "phalanx/train/loop.py", line 102, in _make_steps'),
        ("ERROR", "    run.judge.raise_if_hopeless()"),
        ("ERROR", "ended: UserError: 20 steps in a row were bad"),
    ]
    with (path / "logs" / "train.log").open("w") as file:
        for number, (level, text) in enumerate(lines):
            moment = datetime.fromtimestamp(time.time() - 900 + number * 8, UTC).isoformat(timespec="milliseconds")[:-6]
            file.write(f"{moment}Z {level} [rank 0 start 1] {text}\n")


def take(runs: Path, images: Path) -> list[Path]:
    """Take all pictures."""
    taken = []
    with served(DataSource.of_folder(runs)) as address:
        for name, path, scheme, height in PICTURES:
            with watched(address, color_scheme=scheme, viewport={"width": 1280, "height": height}) as browser:
                browser.open(path)
                browser.check()
                taken.append(images / f"{name}.png")
                browser.page.screenshot(path=str(taken[-1]))
    return taken


def main() -> None:
    """Make the runs and take the pictures."""
    given = benchmark_parser(__doc__, "take them, and write nothing").parse_args()
    if why := why_no_browser():
        print(f"no pictures: {why}")
        sys.exit(0 if given.quick else 1)
    with TemporaryDirectory() as own:
        runs = make_runs(Path(own))
        for picture in take(runs, Path(own) if given.quick else IMAGES):
            print(f"{picture.name}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
