"""What a start of a run leaves for others to see while it lasts: its log file, its process, how far it is."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from phalanx import __version__
from phalanx.core.errors import UserError
from phalanx.core.progress import PROGRESS_VARIABLE, ProgressWriter
from phalanx.telemetry.alerts.alert_config import without_addresses
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.run_list import ENDED as END_FILE
from phalanx.telemetry.run_list import note_end
from phalanx.telemetry.run_log import ENDED, RunLog, log_path, open_log
from phalanx.telemetry.run_presence import announce, page_path, withdraw
from phalanx.train.heartbeat import START_S, Pulse
from phalanx.train.ranks import Ranks


@contextmanager
def seen(config: LoggingConfig, run: Path, ranks: Ranks, start: int) -> Iterator[RunLog | None]:
    """For the block, `phalanx status` sees this process as a rank of the run, and its log file is written.

    Args:
        start: how many times the run has been started, with this one.

    Yields:
        The log; None: the config wants none.
    """
    host, command = socket.gethostname(), shlex.join(map(without_addresses, sys.argv))
    of = f"rank {ranks.rank} of {ranks.size}, " if ranks.size > 1 else ""
    begins = f"{of}host {host}, pid {os.getpid()}, phalanx {__version__}, torch {torch.__version__}: {command}"
    path = log_path(run, ranks.rank, ranks.size, host)
    page, began_s = _followed(run, ranks, start), time.time()
    announce(run, rank=ranks.rank, world_size=ranks.size, start=start, page=page)
    try:
        with open_log(config, path, ranks.rank, start, begins) as log:
            try:
                yield log
            except UserError as error:
                _note_end(run, ranks, start, began_s, ranks.why_ended(error))
                if log is not None:
                    log.note(f"{ENDED}{error}", "ERROR")
                raise
            except BaseException as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".removesuffix(": ")
                _note_end(run, ranks, start, began_s, ranks.why_ended(error))
                if log is not None:
                    log.error(error, f"{ENDED}{why}")
                raise
    finally:
        withdraw(run, ranks.rank)


def _note_end(run: Path, ranks: Ranks, start: int, began_s: float, why: str) -> None:
    """Keep why a start failed before training could say so itself."""
    with suppress(OSError):
        said = run / END_FILE
        if ranks.is_first and not (said.exists() and said.stat().st_mtime >= began_s):
            note_end(run, None, why, start)


def _followed(run: Path, ranks: Ranks, start: int) -> Path | None:
    """The page of how far this rank is: its supervisor's, else one of its own; None: none can be written."""
    if ranks.pulse.is_read:
        return Path(os.environ[PROGRESS_VARIABLE])
    page = page_path(run, ranks.rank)
    if page is None:
        return None
    with suppress(OSError):
        ranks.pulse = Pulse(ProgressWriter(page, start), lambda: ranks.waits.waited_ns)
        ranks.pulse.enter("start", START_S)
        return page
    return None
