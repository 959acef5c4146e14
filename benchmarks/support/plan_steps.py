"""One run of `phalanx train` whose rank 0 notes when each step ends.

``python -m support.plan_steps OUT CONFIG KEY=VALUE…``: the file OUT gets a JSON list of pairs, wall seconds and CPU
seconds of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.core.config import load
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import wanted_ranks


class Stamps:
    """Hangs on the step of the first optimizer that makes one."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.seconds: list[tuple[float, float]] = []
        self._first: Any = None
        register_optimizer_step_post_hook(self._stamp)

    def _stamp(self, optimizer: Any, *_: object) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self.seconds.append((time.perf_counter(), time.process_time()))


def train_alone(config: RunConfig, path: Path, out: Path) -> None:
    """In this process."""
    from phalanx.train.session import run_session

    stamps = Stamps()
    with Path(os.devnull).open("w") as nowhere:
        run_session(config, path, Console(file=nowhere))
    out.write_text(json.dumps(stamps.seconds))


def train_rank(worker: Worker, config: RunConfig, path: Path, out: Path) -> int:
    """As one of several ranks."""
    from phalanx.train import session

    stamps = Stamps()
    status = session.rank_status(worker, config, path)
    if worker.rank == 0:
        out.write_text(json.dumps(stamps.seconds))
    return status


def main() -> None:
    out, path, *overrides = sys.argv[1:]
    config = load(RunConfig, Path(path), overrides).value
    ranks = wanted_ranks(config)
    if ranks == 1:
        train_alone(config, Path(path), Path(out))
        return
    target, layout = "support.plan_steps:train_rank", config.parallel.layout
    sys.exit(launch_local(ranks, target, (config, Path(path), Path(out)), layout=layout))


if __name__ == "__main__":
    main()
