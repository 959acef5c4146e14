"""A run that is saved in one layout and goes on in another: real runs, as `phalanx train` makes them.

A source trains ten steps in its layout, saves, and goes on for ten. Whoever takes up that checkpoint in another layout
saves it again at once, so that two checkpoints can be compared tensor by tensor, and then goes on for ten steps too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.config import load
from phalanx.data.prepare import prepare
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.telemetry.loggers import MetricsLogger, open_loggers
from phalanx.train.assemble import assemble
from phalanx.train.config import RunConfig
from phalanx.train.loop import train
from phalanx.train.ranks import Ranks, meet
from phalanx.train.reports.display import make_display
from phalanx.train.run_folder import RunFolder, open_for_training
from phalanx.train.session import make_reporter
from phalanx.train.training_run import Run
from support import tiny
from support.open_checkpoint import open_checkpoint
from support.parity.compare import BAR, relative_error

SAVED_STEP, LAST_STEP = 10, 20

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "fs2 zero 3": {"shard": 2, "zero": 3},
    "tp2": {"tensor": 2},
    "pp2 zbv": {"pipeline": 2, "schedule": "zbv"},
    "cp2 ring": {"context": 2},
    "pp2 fs2 tp2": {"pipeline": 2, "shard": 2, "tensor": 2, "zero": 2},
}
QUICK_LAYOUTS = ("single", "pp2 zbv")

Start = Callable[[RunConfig], None]

SETTINGS: dict[str, Any] = tiny.SETTINGS | {
    "model.layers": 4,
    "model.heads": 4,
    "model.vocab_multiple": 64,
    "model.tie_embeddings": True,
    "model.dropout": 0.1,
    "optim.lr": 1e-3,
    "train.steps": LAST_STEP,
    "train.global_batch": 8,
    "train.micro_batch": 1,
    "train.garbage_collect_steps": 0,  # ranks are threads here, and each would look through all that the process holds
    "checkpoint.every_steps": SAVED_STEP,
    "checkpoint.keep_last": 100,
    "checkpoint.mode": "blocking",
}


@dataclass(frozen=True)
class Moved:
    """What came of taking up in layout `loaded` what layout `saved` had saved.

    Attributes:
        different: tensors, and parts of the state, that are not bit for bit what was saved.
        losses, norms: largest relative error over the steps after it, against going on in layout `saved`.
    """

    saved: str
    loaded: str
    different: tuple[str, ...]
    losses: float
    norms: float

    @property
    def passes(self) -> bool:
        return not self.different and max(self.losses, self.norms) <= BAR


def all_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every layout of `names` with every other: who saves, who takes it up."""
    return [(saved, loaded) for loaded in names for saved in names if saved != loaded]


def reshard(folder: Path, pairs: Sequence[tuple[str, str]], start: Start | None = None) -> list[Moved]:
    """What comes of moving a run from one layout to another, for each pair.

    Args:
        start: does one run on the ranks of its layout; as processes by default.

    Raises:
        RuntimeError: ranks failed; they have said why.
    """
    start = start or by_processes
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    prepare(source_config(folder, names[0]).data)
    for name in dict.fromkeys(saved for saved, _ in pairs):
        start(source_config(folder, name))
    for saved, loaded in pairs:
        start(copied_config(folder, saved, loaded))
    return [moved(folder, saved, loaded) for saved, loaded in pairs]


def source_config(folder: Path, name: str) -> RunConfig:
    """Of the run that saves in layout `name`."""
    return _config(folder, name, f"source {name}")


def copied_config(folder: Path, saved: str, loaded: str) -> RunConfig:
    """Of a run in layout `loaded` that finds what `saved` saved."""
    config = _config(folder, loaded, f"{saved} to {loaded}")
    found = _checkpoint(Path(source_config(folder, saved).run.folder))
    shutil.copytree(found, Path(config.run.folder) / "checkpoints" / found.name)
    return config


def moved(folder: Path, saved: str, loaded: str) -> Moved:
    """Compare the two runs."""
    source, copy = folder / f"source {saved}", folder / f"{saved} to {loaded}"
    expected, found = _figures(source), _figures(copy)
    assert len(expected["loss"]) == len(found["loss"]) == LAST_STEP - SAVED_STEP
    different = tuple(_differences(_checkpoint(source), copy / "resaved" / _checkpoint(source).name))
    return Moved(
        saved,
        loaded,
        different,
        relative_error(found["loss"], expected["loss"]),
        relative_error(found["grad_norm"], expected["grad_norm"]),
    )


def by_processes(config: RunConfig) -> None:
    """Ranks started as `phalanx train` starts them."""
    layout = config.parallel.layout
    target, preload = f"{__name__}:process_rank", ["phalanx.train.session", __name__]
    if launch_local(layout.world_size, target, (config,), preload=preload, layout=layout, threads=1):
        raise RuntimeError(f"the ranks of {layout} failed")


def process_rank(worker: Worker, config: RunConfig) -> None:
    """One of the processes."""
    ranks = meet(worker if worker.world_size > 1 else None, config.parallel)
    try:
        one_run(config, ranks)
    finally:
        ranks.close()


_OF_ONE_ATTEMPT = {"checkpoint_costs", "ended"}  # what saving cost, and whether the run ended there


def one_run(config: RunConfig, ranks: Ranks) -> None:
    """Take up what is in the run's folder, save it again beside it, and train to the last step."""
    torch.manual_seed(1000 + ranks.rank)  # what is taken up must not be what was there already
    path = Path(config.run.folder)
    folder = open_for_training(config, path) if ranks.is_first else RunFolder(path)
    ranks.peers.barrier()
    run = assemble(config, folder, lambda _: None, None, ranks)
    if run.progress.step:
        _save_beside(run)
    logger = open_loggers(config.logging, path, run.progress.step) if ranks.is_first else MetricsLogger()
    train(run, make_reporter(run, make_display(Console(quiet=True)), logger))
    logger.close()
    folder.release()


def _save_beside(run: Run) -> None:
    """Save the state as it is, in a folder of its own."""
    folder, tensors, shards = run.folder.path / "resaved", run.state_tensors(), run.state_shards()
    save(folder, run.progress.step, tensors, run.state(), shards=shards, peers=run.ranks.peers)


def _config(folder: Path, name: str, run: str) -> RunConfig:
    settings = SETTINGS | {f"parallel.{axis}": size for axis, size in LAYOUTS[name].items()}
    return load(RunConfig, None, tiny.overrides(folder, folder / run, settings)).value


def _checkpoint(run: Path) -> Path:
    return run / "checkpoints" / f"step-{SAVED_STEP:08d}"


def _figures(run: Path) -> dict[str, list[float]]:
    """Loss and norm of the steps after the checkpoint."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and line["step"] > SAVED_STEP]
    return {key: [step[key] for step in steps] for key in ("loss", "grad_norm")}


def _differences(first: Path, second: Path) -> list[str]:
    """Names of what is not the same in two checkpoints: tensors (weights, optimizer, RNG) and the loader's state."""
    a, b = open_checkpoint(first), open_checkpoint(second)
    mine: Mapping[str, Tensor] = a.read()
    theirs: Mapping[str, Tensor] = b.read()
    names = [name for name in mine.keys() & theirs.keys() if not _same_bits(mine[name], theirs[name])]
    keys = (a.state.keys() | b.state.keys()) - _OF_ONE_ATTEMPT
    state = [key for key in keys if a.state.get(key) != b.state.get(key)]
    return sorted([*(mine.keys() ^ theirs.keys()), *names, *state])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
