"""Ranks that fail, and whose connections are not closed before others have ended, which these do not."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.launch.environment import Worker
from phalanx.launch.launch_messages import RankSpec
from phalanx.launch.rank_failures import errors_named
from phalanx.launch.rank_process import become_rank
from phalanx.train import session
from phalanx.train.ranks import Ranks

CONFIG: Any = SimpleNamespace(parallel=None, checkpoint=SimpleNamespace(mode="blocking"))
CONFIG.parallel = SimpleNamespace(layout=Layout(replicate=2))


def become(spec: RankSpec, reports: Connection) -> None:
    """A rank, in a process that has been forked."""
    become_rank(spec, reports, os.getppid(), "fork", time.monotonic_ns())


def refuse(*_: Any) -> None:
    raise UserError("is too large", cure="take less")


def fail_under_our_launcher(worker: Worker) -> int:
    _never_close()
    return session.rank_status(worker, CONFIG, Path("tiny.toml"))


def fail_under_another_launcher(worker: Worker) -> None:
    """As `phalanx.train.start.train_here`, where an error becomes an exit status."""
    _never_close()
    elsewhere = replace(worker, launcher="torchrun")
    with errors_named(elsewhere, CONFIG.parallel.layout):
        session.run_rank(elsewhere, CONFIG, Path("tiny.toml"), None, leaves=True)  # type: ignore[arg-type]


def _never_close() -> None:
    at_end = ExitStack()
    at_end.callback(threading.Event().wait)
    session.meet = lambda *_: Ranks(at_end=at_end)  # type: ignore[assignment]
    session.run_session = refuse  # type: ignore[assignment]
    session.bind_started_elsewhere = lambda *_: None  # type: ignore[assignment]
