"""Tiny runs for the tests of the trainer and of the command line: in this process, or in forked ones."""

from __future__ import annotations

import atexit
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rich.console import Console
from support import tiny

from phalanx.core.config import load
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.data.batch import Batch
from phalanx.ipc.processes import why_not_fork
from phalanx.launch import local_ranks
from phalanx.launch.launch_messages import QUIET_IMPORTS
from phalanx.launch.template import serve
from phalanx.train import assemble as assembling
from phalanx.train import session
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import wanted_ranks
from phalanx.train.loop import train
from phalanx.train.run_folder import open_for_training
from phalanx.train.run_progress import TrainResult
from phalanx.train.training_run import Run

TINY: dict[str, Any] = tiny.SETTINGS | {
    "train.steps": 20,
    "checkpoint.every_steps": 5,
    "checkpoint.keep_last": 100,
    "checkpoint.mode": "blocking",  # the background is tested where it is the point
    # To collect the garbage of a process that has imported all tests, and to count what is frozen there, takes longer
    # than such a run: test_training.py tests when it is collected.
    "train.garbage_collect_steps": 0,
}

PRELOAD = [
    "phalanx.train.session",
    "phalanx.cli.train_command",
    "phalanx.cli.generate_command",
    "torch.utils.checkpoint",
    "torch._dynamo",  # by torch's optimizers
    "torch._inductor.config",  # by torch.use_deterministic_algorithms
]
"""What processes of the fork server need; there is one such server for all tests of a process."""


def overrides(folder: Path, changes: Mapping[str, Any] | None = None, run: str = "run") -> list[str]:
    """``key=value`` pairs of a tiny run in `folder`; a change to None takes a key out."""
    return tiny.overrides(folder, folder / run, TINY | dict(changes or {}))


def configured(folder: Path, changes: Mapping[str, Any] | None = None, run: str = "run") -> RunConfig:
    return load(RunConfig, None, overrides(folder, changes, run)).value


def begin(config: RunConfig, notes: list[str] | None = None, points: Points = NO_POINTS) -> Run:
    """An assembled run, ready for its next step. Release its folder when done."""
    folder = open_for_training(config, Path(config.run.folder))
    try:
        return assembling.assemble(config, folder, (notes if notes is not None else []).append, points=points)
    except BaseException:
        folder.release()
        raise


def finish(run: Run) -> TrainResult:
    """Train an assembled run to its end."""
    display = session.make_display(Console(file=io.StringIO(), width=200))
    logger = session.open_loggers(run.config.logging, run.folder.path, run.progress.step)
    try:
        return train(run, session.make_reporter(run, display, logger))
    finally:
        logger.close()
        run.folder.release()


def run_all(folder: Path, changes: Mapping[str, Any] | None = None, run: str = "run") -> str:
    """A whole session in this process; returns what it printed."""
    out = io.StringIO()
    result = session.run_session(configured(folder, changes, run), Path("tiny.toml"), Console(file=out, width=200))
    assert not result.stopped_by
    return out.getvalue()


def entries(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics."""
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in every if entry["kind"] == kind]


FIGURES = ("step", "loss", "grad_norm", "lr", "skipped", "untrained", "tokens")
HELD_OUT = ("step", "validation_loss", "validation_bits_per_byte", "validation_tokens")


def figures(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on stops and kills, at full precision: steps, then evaluations."""
    steps = [tuple(entry[name] for name in FIGURES if name in entry) for entry in entries(folder)]
    return steps + [tuple(entry[name] for name in HELD_OUT) for entry in entries(folder, "evaluation")]


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status (negative: killed by that signal), stdout and stderr."""

    status: int
    out: str
    err: str


class Commands:
    """Runs ``phalanx`` in processes forked from one that has imported torch, so that one costs 0.1 s and not 3 s.

    The forking process starts no thread, so its children are as good as fresh ones. Ranks that these start have a
    template that is forked too: what a new Python does there is tested by tests/launch.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def start(self, folder: Path, arguments: Sequence[str], limits: Mapping[str, int] | None = None) -> Any:
        """A started process whose output goes to ``out`` and ``err`` in `folder`."""
        process = self._context.Process(target=_child, args=(str(folder), list(arguments), dict(limits or {})))
        process.start()
        return process

    def call(self, target: Callable[..., None], *arguments: Any) -> int:
        """What ends a process that does `target`: its exit status (negative: killed by that signal)."""
        process = self._context.Process(target=target, args=arguments)
        process.start()
        process.join(400)
        assert process.exitcode is not None, "the process hangs"
        return process.exitcode

    def run(self, folder: Path, *arguments: str, limits: Mapping[str, int] | None = None) -> Ended:
        process = self.start(folder, arguments, limits)
        process.join(400)
        assert process.exitcode is not None, "the command hangs"
        return ended(process, folder)

    def ranks(self, folder: Path, config: RunConfig, target: str, *arguments: Any) -> Ended:
        """What ends a launcher of the config's ranks, each of which does ``module:function``; see `launch_local`."""
        process = self._context.Process(target=_launcher, args=(str(folder), config, target, arguments))
        process.start()
        process.join(400)
        assert process.exitcode is not None, "the ranks hang"
        return ended(process, folder)


def ended(process: Any, folder: Path) -> Ended:
    """What a finished process left."""
    process.join()
    return Ended(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def _child(folder: str, arguments: list[str], limits: dict[str, int]) -> None:
    _begin(folder)
    for name, value in limits.items():
        if value < 0:  # so much more than the process has now
            value = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() - value
        _, hard = resource.getrlimit(getattr(resource, name))
        resource.setrlimit(getattr(resource, name), (value, hard))
    sys.argv = ["phalanx", *arguments]
    from phalanx.cli.main import main

    main(arguments)


def _launcher(folder: str, config: RunConfig, target: str, arguments: Sequence[Any]) -> None:
    _begin(folder)
    layout = None if config.parallel.devices else config.parallel.layout
    sys.exit(local_ranks.launch_local(wanted_ranks(config), target, (config, *arguments), layout=layout))


def _begin(folder: str) -> None:
    """What a process of the fork server has of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the fork server ignores some
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    os.chdir(folder)
    local_ranks._start_template = _fork_template  # type: ignore[assignment]


_START_TEMPLATE = local_ranks._start_template


@dataclass
class _Template:
    """As much of `subprocess.Popen` as a launcher uses."""

    pid: int
    code: int | None = None

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def _fork_template(environ: Mapping[str, str], descriptors: Sequence[int]) -> tuple[Connection, Any]:
    """In place of a new Python: a fork of this process, without its descriptors, signal handlers and atexit."""
    if why_not_fork(sys.modules):
        return _START_TEMPLATE(environ, descriptors)
    ours, theirs = Pipe()
    launcher = os.getpid()
    if pid := os.fork():
        theirs.close()
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # whoever comes first
        return ours, _Template(pid)
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
            if descriptor not in (0, 1, 2, theirs.fileno(), *descriptors):
                with suppress(OSError):
                    os.close(descriptor)
        os.environ.clear()
        os.environ.update({**environ, **QUIET_IMPORTS})
        serve(theirs.fileno(), launcher)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def killed_in_evaluation(arguments: list[str], batch: int) -> None:
    """A target: a whole run of these settings, which SIGKILL ends while its first evaluation looks at that batch."""
    run = begin(load(RunConfig, None, arguments).value)
    original = run.trainer.held_out_loss

    def watched(batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, one in enumerate(batches, 1):
            if number == batch:
                os.kill(os.getpid(), signal.SIGKILL)
            yield one

    run.trainer.held_out_loss = lambda batches: original(watched(batches))  # type: ignore[method-assign]
    finish(run)


def wait_for_step(process: Any, run: Path, step: int) -> int:
    """Wait until `run` has written down `step` (or the process has ended); returns the last step seen."""
    metrics, deadline_s = run / "metrics.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline_s:
        seen = metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0
        if seen >= step or process.exitcode is not None:
            return seen
        time.sleep(0.001)
    raise AssertionError(f"step {step} never came")


def copies(run: Path) -> Iterator[Path]:
    """The checkpoint folders of a run, oldest first."""
    yield from sorted((run / "checkpoints").glob("step-*"))


Reporting = Callable[[str], None]


def until(look: Callable[[], Any], within_s: float = 120.0) -> Any:
    """What `look` gives once it is true."""
    give_up_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < give_up_s, "it does not come"
        time.sleep(0.05)
    return found
