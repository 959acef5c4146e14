"""A training is watched from outside its ranks, where `[alerts]` or `logging.metrics_address` ask for it.

Rank 0 starts the watcher (`phalanx.telemetry.alerts.run_watcher`) and tells it how the run ended; how far the ranks are
it reads from their pages, as `phalanx status` does. Under `phalanx run` the driver does all of this.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.progress import PROGRESS_VARIABLE
from phalanx.telemetry.alerts.alert_receivers import receivers_of
from phalanx.telemetry.alerts.run_metrics import listen
from phalanx.telemetry.alerts.run_watcher import WatcherProcess, own_run, start_watcher
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_numbers import destination, total_steps
from phalanx.train.ranks import Ranks
from phalanx.train.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.train.run_progress import TrainResult


_PORT_S = 3.0
"""The watcher of the start before gives the port back as soon as it sees that the run goes on."""


class Ending:
    """What the watcher is to hear at last."""

    def __init__(self) -> None:
        self.result: TrainResult | None = None


@contextmanager
def watched(config: RunConfig, folder: RunFolder, ranks: Ranks, note: Callable[[str], None]) -> Iterator[Ending]:
    """Watch the run within it; every rank of a run calls this alike, after its folder was made.

    Raises:
        UserError: a receiver of alerts cannot be, or the address of the metrics is taken.
    """
    ending = Ending()
    process = _begin(config, folder, ranks, note) if is_watched(config) else None
    if process is None and ranks.is_first and config.logging.metrics_address and not is_watched(config):
        note("logging.metrics_address has no effect under phalanx run: /metrics of its driver carries these figures")
    try:
        yield ending
    except BaseException as error:
        if process is not None:
            process.end("failed", ranks.why_ended(error))
        raise
    if process is not None:
        stopped_by = "" if ending.result is None else ending.result.stopped_by
        process.end("stopped" if stopped_by else "finished", f"by {stopped_by}" if stopped_by else "")


def is_watched(config: RunConfig) -> bool:
    """Whether this training has a watcher of its own."""
    return (config.alerts.is_on or bool(config.logging.metrics_address)) and PROGRESS_VARIABLE not in os.environ


def _begin(config: RunConfig, folder: RunFolder, ranks: Ranks, note: Callable[[str], None]) -> WatcherProcess | None:
    server: socket.socket | None = None

    def prepare() -> str:
        """On rank 0: whatever can be wrong is found before anything is trained; returns where metrics are read."""
        nonlocal server
        receivers_of(config.alerts, os.environ)
        if not config.logging.metrics_address:
            return ""
        server = listen(config.logging.metrics_address, _PORT_S)
        host, port = server.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    address = ranks.decide(prepare)
    if not ranks.is_first:
        return None
    if address:
        note(f"figures for Prometheus: {address}")
    checkpoints = destination(config, folder.path)
    run = own_run(
        folder.path,
        folder.path.absolute().name,
        ranks=1 if ranks.worker is None else ranks.worker.local_world_size,
        world_size=ranks.size,
        total_steps=total_steps(config),
        every_steps=config.checkpoint.every_steps,
        every_s=config.checkpoint.every_s,
        checkpoints="" if "://" in checkpoints else str(Path(checkpoints).absolute()),
    )
    try:
        return start_watcher(run, config.alerts, folder.starts - 1, server)
    except OSError as error:
        note(f"the run is not watched: its watcher cannot be started ({error.strerror})")
        return None
