"""A tiny run in forked processes, and finding the processes that keep its snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from phalanx.cli.main import main
from support import tiny

SETTINGS: dict[str, Any] = tiny.SETTINGS | {
    "checkpoint.memory_every_steps": 1,
    "checkpoint.every_steps": 7,
    "checkpoint.keep_last": 3,
    "checkpoint.keeper_ttl_s": 60,
    "train.garbage_collect_steps": 0,  # a forked process would first look through all that its parent had imported
}


@dataclass
class TinyRun:
    """A run in `folder`; `changes` are settings. Its keeper has a socket of its own in the folder."""

    folder: Path
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    @property
    def keeper(self) -> Path:
        """The socket of its keeper."""
        return self.folder / f"{self.name}.keeper"

    @property
    def log(self) -> Path:
        """What all its processes have said."""
        return self.folder / f"{self.name}.log"

    def arguments(self) -> list[str]:
        """Of the command."""
        return ["train", "none.toml", *tiny.overrides(self.folder, self.path, SETTINGS | dict(self.changes))]

    def start(self, faults: str = "") -> int:
        """Fork a process that trains; its pid. This process must have imported torch and have one thread."""
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # it has done so itself, or is gone
                os.setpgid(pid, pid)
            return pid
        status = 70
        try:
            self.become(faults)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            os._exit(status)

    def become(self, faults: str = "") -> None:
        """Be the run: train, and end this process's work with the command's `SystemExit`."""
        os.setpgid(0, 0)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        (self.folder / "none.toml").touch()
        os.chdir(self.folder)
        os.environ["PHALANX_KEEPER"] = str(self.keeper)
        os.environ["PHALANX_FAULTS"] = faults
        os.environ["COLUMNS"] = "1000"  # no line is broken
        main(self.arguments())

    def steps(self) -> list[tuple[Any, ...]]:
        """Step, loss, norm and learning rate of all steps that were written down."""
        lines = (json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines())
        return [tuple(one[key] for key in _FIGURES) for one in lines if one["kind"] == "step"]

    def last_step(self) -> int:
        """The last step that was written down; 0 where there is none."""
        with contextlib.suppress(FileNotFoundError):
            for line in reversed((self.path / "metrics.jsonl").read_bytes()[-4000:].splitlines()):
                with contextlib.suppress(ValueError):
                    if (entry := json.loads(line))["kind"] == "step":
                        return int(entry["step"])
        return 0

    def processes(self, title: str) -> list[psutil.Process]:
        """The processes of this run whose name begins with `title`, such as ``phalanx keeper``."""
        return [one for one in _named(title) if self._owns(one)]

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("PHALANX_KEEPER") == str(self.keeper)
        return False


_FIGURES = ("step", "loss", "grad_norm", "lr", "skipped", "tokens")


def _named(title: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name"]):
        if process.info["name"].startswith(title[:15]):
            yield process


def kill(processes: Sequence[psutil.Process]) -> int:
    """SIGKILL all at once; how many there were."""
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
            count += 1
    return count


def wait(pid: int, limit_s: float) -> int | None:
    """Exit status of a child, as `subprocess` has it; None where it has not ended in time."""
    end_s = time.monotonic() + limit_s
    descriptor = os.pidfd_open(pid)
    try:
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left_s)[0]:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return None
    finally:
        os.close(descriptor)
