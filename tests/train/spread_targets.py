"""What ranks are made to do by tests of real processes."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.launch.environment import Worker
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.engine import Engine
from phalanx.parallel.rendezvous import Abort
from phalanx.train import ranks as meeting
from phalanx.train.config import RunConfig
from phalanx.train.device import Device
from phalanx.train.ranks import Ranks
from phalanx.train.reports.callbacks import Callback, StepReport
from phalanx.train.session import rank_status, run_rank
from phalanx.train.training_run import Run


def raise_at_step_5(worker: Worker, config: RunConfig, folder: str) -> int:
    """Train, but rank 1 has an error of its own in the middle of step 5; notes down every process."""
    (Path(folder) / f"pid-{worker.rank}").write_text(str(os.getpid()))
    if worker.rank == 1:
        accumulate_gradients = Run.accumulate_gradients

        def failing(run: Run, batch: Any) -> Any:
            if run.progress.step + 1 == 5:
                raise ArithmeticError("rank 1 has come to step 5")
            return accumulate_gradients(run, batch)

        Run.accumulate_gradients = failing  # type: ignore[method-assign]
    return rank_status(worker, config, Path("tiny.toml"))


def run_out_of_memory(worker: Worker, config: RunConfig, folder: str, culprit: int, stuck: int | None) -> int:
    """Train, but one rank has no memory for its first step; notes down what every rank ends with.

    Args:
        stuck: a rank that waits in its first step and hears nothing of a peer's end, as over NCCL.
    """

    def refused(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    if worker.rank == culprit:
        Engine.accumulate_gradients = refused  # type: ignore[method-assign]
    if worker.rank == stuck:
        Engine.accumulate_gradients = lambda *_, **__: threading.Event().wait()  # type: ignore[assignment]
    meeting.Abort = partial(Abort, look_s=0.2, grace_s=2.0)  # type: ignore[misc,assignment]
    try:
        rank_status(worker, config, Path("tiny.toml"))
    except Exception as error:
        (Path(folder) / f"said-{worker.rank}").write_text(str(error))
    return 0


def have_unequal_memory(worker: Worker, config: RunConfig, folder: str, free_bytes: list[int]) -> int:
    """Begin to train with so much memory on each rank; notes down the layout that each opens its groups for."""

    def noted(_: Ranks, parallel: ParallelConfig, device: Any) -> None:
        (Path(folder) / f"layout-{worker.rank}").write_text(parallel.model_dump_json())
        raise KeyboardInterrupt

    Device.available_bytes = lambda _: free_bytes[worker.rank]  # type: ignore[method-assign,assignment]
    Ranks.join = noted  # type: ignore[method-assign,assignment]
    try:
        return rank_status(worker, config, Path("tiny.toml"))
    except KeyboardInterrupt:
        return 0


CALLED = "called-{}"


def train_with_callback(worker: Worker, config: RunConfig, folder: str) -> int:
    """Train with a callback that notes down the steps it gets, and stops the run at step 2."""
    steps: list[str] = []

    class Noting(Callback):
        def on_step(self, report: StepReport) -> Any:
            steps.append(str(report.step))
            (Path(folder) / CALLED.format(worker.rank)).write_text(" ".join(steps))
            return "stop" if report.step == 2 else None

    result = run_rank(worker, config, Path("tiny.toml"), Console(quiet=True), callbacks=[Noting()])
    return int((result.steps, result.stopped_by) != (3, "a callback"))
