"""Where `phalanx train` begins: in this process, as a rank that somebody started, or by starting ranks.

Whatever can be known to be wrong is refused here, before a process is started or a minute is lost.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from phalanx.checkpoint.keeper.keeper_start import prepare_keeper
from phalanx.data.prepare import prepare
from phalanx.launch.cores import ignored_threads
from phalanx.launch.environment import worker_environment
from phalanx.launch.local_ranks import launch_local
from phalanx.launch.template import load_target
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import check_started, machines_here, resolve_layout, wanted_ranks
from phalanx.train.derived.run_numbers import check_early, default_folder, destination
from phalanx.train.predicted_cost import Expected
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.run_folder import RunFolder

# By name, because they import torch, which the launcher of ranks does without.
_SESSION = "phalanx.train.session:train_session"
_RANK = "phalanx.train.session:train_rank"
# What ranks import, once for all of them: with the compiler, which torch's optimizers and deterministic mode ask for.
_PRELOAD = (_RANK.partition(":")[0], "torch._dynamo", "torch._inductor.config")


def start(config: RunConfig, config_path: Path, console: Console, expected: Expected | None = None) -> int:
    """Train as `config` says, in as many processes as it wants.

    Args:
        expected: what a step was predicted to cost, which the run's first steps are held against; None: nothing was.

    Returns:
        The exit status.

    Raises:
        UserError: the settings are impossible.
    """
    check_early(config)
    _prepare_keeper(config, config_path)
    worker = worker_environment()
    if worker is not None:
        check_started(config, worker.world_size)
        return int(load_target(_RANK)(worker, config, config_path, expected))
    if wanted_ranks(config) == 1:
        return int(load_target(_SESSION)(config, config_path, console, None, expected))
    return start_ranks(config, config_path, console, expected)


def _prepare_keeper(config: RunConfig, config_path: Path) -> None:
    """Begin to start the process that keeps snapshots, which takes no longer than the imports that come next."""
    if config.checkpoint.mode == "blocking":
        return
    url = destination(config, default_folder(config, config_path))
    prepare_keeper(url, ttl_s=config.checkpoint.keeper_ttl_s)


def start_ranks(config: RunConfig, config_path: Path, console: Console, expected: Expected | None = None) -> int:
    """Prepare the text, see that the layout is possible, and start a rank for each of its places on this host.

    Raises:
        UserError: it is not.
    """
    count = wanted_ranks(config)
    problem = ignored_threads(os.environ)
    if problem:
        cure = "set it to a whole number from 1, or unset it"
        console.print(f"{problem} (each rank has as many as its share of the cores); {cure}", markup=False)
    with PrepareDisplay(console) as progress:
        prepared = prepare(config.data, progress=progress.show)
    here = machines_here(config, count)
    chosen = resolve_layout(config, prepared.vocab_size, here, count, lambda _: None)
    # Where the memory of devices is known to their ranks alone, these may choose another.
    settled = here.available_bytes is not None or not config.parallel.devices
    layout = chosen.parallel.layout if settled else None
    arguments, refused = (config, config_path, expected), RunFolder(default_folder(config, config_path)).out_of_memory
    while True:
        before = _changed_ns(refused)
        status = launch_local(count, _RANK, arguments, preload=_PRELOAD, layout=layout)
        if status == 0 or _changed_ns(refused) == before:
            return status
        console.print("starting again, with less in memory at a time", markup=False)


def _changed_ns(path: Path) -> int:
    """When a file was written, as its file system counts; 0: it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0
