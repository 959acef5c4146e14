"""Load a config and train it from Python: `load_config` and `train`. Torch is imported when training begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from phalanx.api.planning import pairs
from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import wanted_ranks
from phalanx.train.start import train_here

if TYPE_CHECKING:
    from phalanx.train.reports.callbacks import Callback
    from phalanx.train.run_progress import TrainResult


def load_config(path: Path | str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run: a TOML file (None: all defaults) and ``key=value`` pairs that change single settings.

    Raises:
        UserError: the file cannot be read, or a setting is unknown or impossible.
    """
    if not isinstance(path, str | Path | None):
        raise UserError("is not a path", cure="give a TOML file, or None", field="path", value=str(path))
    return load(RunConfig, None if path is None else Path(path), pairs(overrides, "overrides")).value


def train(
    config: RunConfig | Path | str,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train in this process as ``phalanx train`` does, or go on with the run where it stood.

    Args:
        config: a TOML file, or what `load_config` gave, with `run.folder` set.
        overrides: ``key=value`` pairs, with a file.
        callbacks: called on rank 0 as the run goes on (`phalanx.Callback`).
        quiet: print nothing.

    Raises:
        UserError: a setting is impossible; or several ranks are wanted, and this process is not one of them.
        CallbackError: a callback failed; the run was stopped with a checkpoint.
    """
    for callback in callbacks:
        methods = ("on_step", "on_evaluate", "on_checkpoint")
        lacks = [name for name in methods if not callable(getattr(callback, name, None))]
        if isinstance(callback, type) or lacks:
            why = "is a class" if isinstance(callback, type) else f"has no {', '.join(lacks)}"
            cure = "give an object of a class that derives from phalanx.Callback"
            raise UserError(f"{why}, not a callback", cure=cure, field="callbacks", value=repr(callback))
    if isinstance(config, RunConfig):
        if overrides:
            raise UserError("a loaded config takes no overrides", cure="give them to load_config")
        if not config.run.folder:
            raise UserError("a loaded config has no file to name its run after", cure="set it", field="run.folder")
        name, run = Path(config.run.folder), config
    else:
        name, run = Path(config), load_config(config, overrides)
    result = train_here(run, name, Console(emoji=False, quiet=quiet), callbacks=callbacks, raises=True)
    if result is None:
        count = wanted_ranks(run)
        raise UserError(
            f"the config wants {count} ranks, and train() is one process",
            cure=f"start the script {count} times (torchrun --nproc-per-node {count} SCRIPT), or use `phalanx train`",
            field="parallel",
        )
    return result
