"""How the files here were made: offline, by wandb itself.

python make_runs.py big FOLDER       # wandb 0.31.0: run-0.31.wandb, of more than one block of 32 KiB
python make_runs.py small FOLDER     # wandb 0.18.7: run-0.18.wandb, of the form that values had until then
"""

import math
import sys

import wandb

IS_BIG = sys.argv[1] == "big"
QUIET = {"console": "off", "disable_git": True, "disable_code": True}
QUIET |= dict.fromkeys(("x_disable_stats", "x_disable_meta") if IS_BIG else ("_disable_stats", "_disable_meta"), True)

run = wandb.init(
    project="pretraining",
    name="wide-512",
    notes="does no better\nfor its size",
    tags=["width", "lr:3e-4"],
    mode="offline",
    dir=sys.argv[2],
    config={"lr": 3e-4, "model": {"hidden": 512, "layers": 8}, "text": "x" * (31_000 if IS_BIG else 10)},
    settings=wandb.Settings(**QUIET),
)
for step in range(10, 310, 10) if IS_BIG else range(10, 60, 10):
    run.log(
        {
            "train/global_step": step,
            "train/loss": 5 - step / 100,
            "train/tokens": step * 512,
            "train/learning_rate": 3e-4,
            "phase": "warm",
        }
    )
    if step % 50 == 0:
        run.log({"train/global_step": step, "val/loss": 4.9 if step < 200 else math.nan})
run.summary["best"] = 4.5
run.finish(exit_code=0)
