"""nanoGPT itself: the `train.py` of a checkout that the user names, in eager mode, with its recipe for a CPU."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
from pathlib import Path

from contenders.task import Task, characters


def run(task: Task) -> None:
    """Run its script in a folder of links to its sources, so that the checkout itself stays as it is."""
    here = Path(task.folder).resolve() / "nanogpt"
    data = here / "data" / "text"
    data.mkdir(parents=True)
    for source in Path(task.nanogpt).resolve().glob("*.py"):
        (here / source.name).symlink_to(source)
    ids, vocabulary = characters(task)
    for name in ("train.bin", "val.bin"):
        ids.tofile(data / name)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
    options = {
        "dataset": "text",
        "out_dir": "out",
        "device": "cpu",
        "compile": False,
        "dtype": "bfloat16" if task.precision == "bf16" else "float32",
        "eval_interval": 10**9,
        "eval_iters": 1,
        "log_interval": 10,
        "block_size": task.length,
        "batch_size": task.batch,
        "gradient_accumulation_steps": 1,
        "n_layer": task.layers,
        "n_head": task.heads,
        "n_embd": task.hidden,
        "dropout": 0.0,
        "bias": False,
        "learning_rate": 1e-3,
        "max_iters": task.steps - 1,
        "lr_decay_iters": task.steps,
        "beta2": 0.99,
        "weight_decay": 0.1,
    }
    os.chdir(here)
    sys.path.insert(0, str(here))
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_path("train.py", run_name="__main__")
