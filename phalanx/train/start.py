"""Where `phalanx train` begins: in this process, as a rank that a launcher started, or by starting ranks.

Whatever can be known to be wrong is refused here, before a process is started or a minute is lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from phalanx.checkpoint.keeper.keeper_start import prepare_keeper
from phalanx.data.prepare import prepare
from phalanx.ipc.stop_request import exit_status
from phalanx.launch.cores import ignored_threads
from phalanx.launch.environment import worker_environment
from phalanx.launch.local_ranks import launch_local
from phalanx.launch.rank_failures import errors_named
from phalanx.launch.rank_process import load_target
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import check_started, machines_here, resolve_layout, wanted_ranks
from phalanx.train.derived.run_numbers import check_early, default_folder, destination
from phalanx.train.lost_ranks import LostRanks
from phalanx.train.predicted_cost import Expected
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.run_folder import RunFolder

if TYPE_CHECKING:  # it imports torch, which the launcher of ranks does without
    from phalanx.train.reports.callbacks import Callback
    from phalanx.train.run_progress import TrainResult

# By name, because they import torch.
_SESSION = "phalanx.train.session:run_session"
_RANK = "phalanx.train.session:run_rank"
_RANK_STATUS = "phalanx.train.session:rank_status"
# What ranks import, once for all of them: with the compiler, which torch's optimizers and deterministic mode ask for.
_PRELOAD = (_RANK.partition(":")[0], "torch._dynamo", "torch._inductor.config")


def start(config: RunConfig, config_path: Path, console: Console, expected: Expected | None = None) -> int:
    """Train as `config` says, in as many processes as it wants; returns the exit status.

    Args:
        expected: what a step was predicted to cost, with which the run's first steps are compared; None: nothing was.
    """
    result = train_here(config, config_path, console, expected)
    if result is None:
        return start_ranks(config, config_path, console, expected)
    return exit_status(result.stopped_by)


def train_here(
    config: RunConfig,
    config_path: Path,
    console: Console,
    expected: Expected | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    raises: bool = False,
) -> TrainResult | None:
    """Train in this process: alone, or as the rank that a launcher made it; None: ranks have to be started for it.

    A rank of another launcher shows its error and exits with its status, unless it `raises`.
    """
    check_early(config)
    if config.checkpoint.mode != "blocking":
        # The process that keeps snapshots takes no longer to start than the imports that come next.
        url = destination(config, default_folder(config, config_path))
        prepare_keeper(url, ttl_s=config.checkpoint.keeper_ttl_s)
    worker = worker_environment()
    result: TrainResult | None = None
    if worker is not None:
        check_started(config, worker.world_size)
        with nullcontext() if raises else errors_named(worker, config.parallel.layout):
            result = load_target(_RANK)(worker, config, config_path, console, expected, callbacks, leaves=not raises)
    elif wanted_ranks(config) == 1:
        result = load_target(_SESSION)(config, config_path, console, None, expected, callbacks)
    return result


def start_ranks(config: RunConfig, config_path: Path, console: Console, expected: Expected | None = None) -> int:
    """Prepare the text, check that the layout is possible, and start a rank for each of its places on this host."""
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
    folder = default_folder(config, config_path)
    arguments, refused = (config, config_path, expected), RunFolder(folder).out_of_memory

    def written_ns() -> int:
        return refused.stat().st_mtime_ns if refused.exists() else 0

    while True:
        before = written_ns()
        lost = LostRanks(folder, count, config.logging)
        status = launch_local(count, _RANK_STATUS, arguments, preload=_PRELOAD, layout=layout, on_failure=lost.failed)
        lost.close()
        # Ranks that end for want of memory write down for which passes; the next start takes less.
        if status == 0 or written_ns() == before:
            return status
        console.print("starting again, with less in memory at a time", markup=False)
