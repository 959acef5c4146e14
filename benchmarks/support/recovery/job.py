"""A job of `phalanx run` as a person starts it: its processes, its journal, and what its ranks wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from phalanx.run.journal.journal_tables import JournalError
from phalanx.run.journal.writing import read_journal

_MARK = "RECOVERY_JOB"
"""A variable by which every process of a job is known; all of them inherit it."""

_POLL_S = 0.01


@dataclass(frozen=True)
class Event:
    """What the driver wrote down.

    Attributes:
        kind: such as ``worker-failed``.
        unix_s: when it was.
    """

    kind: str
    unix_s: float
    attempt: int
    fields: dict[str, Any]


@dataclass
class Job:
    """One command and all that it starts; for use as a context, at whose end nothing is left.

    Args:
        folder: where it runs; the run folder is ``run`` in there.
        words: options of the command and the script with its arguments.
        environ: added to this process's environment.
        within: a command that is given the one to run, such as ``unshare``.
    """

    folder: Path
    words: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)
    within: Sequence[str] = ()
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    commands: list[subprocess.Popen] = field(default_factory=list)

    @property
    def run_folder(self) -> Path:
        """Where the job keeps what it needs."""
        return self.folder / "run"

    @property
    def output(self) -> str:
        """What the command has said so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("said-*")))

    def environment(self) -> dict[str, str]:
        """What the command is given."""
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.environ, _MARK: self._mark}

    def start(self) -> subprocess.Popen:
        """Give the command, the first time or again."""
        return self._popen("phalanx.cli.main", "run", "--folder", str(self.run_folder), "--start", "warm", *self.words)

    def _popen(self, module: str, *words: str) -> subprocess.Popen:
        """Start a program of Python's, and keep what it says."""
        with (self.folder / f"said-{len(self.commands)}").open("wb") as said:
            command = subprocess.Popen(
                [*self.within, sys.executable, "-m", module, *words],
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.commands.append(command)
        return command

    def events(self, *kinds: str) -> list[Event]:
        """What is in the journal by now, of these kinds or of all."""
        names = sorted(self.run_folder.glob("journal.db"))
        if not names:
            return []
        with contextlib.suppress(JournalError), read_journal(str(names[0]), job=self.name) as journal:
            found = [(entry, json.loads(entry.json_text)) for entry in journal.read() if entry.kind == "event"]
            told = [Event(fields["event"], entry.unix_s, entry.attempt, fields) for entry, fields in found]
            return [event for event in told if not kinds or event.kind in kinds]
        return []

    def driver_pid(self) -> int:
        """Of the driver that writes the journal."""
        with read_journal(str(self.run_folder / "journal.db"), job=self.name) as journal:
            return journal.starts()[-1].pid

    @property
    def name(self) -> str:
        """Of the job: that of its script."""
        return next(Path(word).stem for word in self.words if word.endswith(".py"))

    def executor_pid(self, host: str) -> int:
        """Of the process that stands for a host."""
        return int(json.loads((self.run_folder / "executors" / f"{host}.json").read_text())["pid"])

    def rank_pid(self, rank: int) -> int | None:
        """Of the process that is this rank now; None: there is none just now."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{process.pid}/comm").read_text().strip() == f"phalanx rank {rank}":
                    pid: int = process.pid
                    return pid
        return None

    def processes(self) -> list[psutil.Process]:
        """All that belong to it and run, but for `phalanx` processes that only hold checkpoints in memory."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get(_MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for(self, what: Callable[[], Any], within_s: float = 300.0) -> Any:
        """What `what` says once it says something true.

        Raises:
            TimeoutError: it does not, or the command has ended before.
        """
        until_s = time.monotonic() + within_s
        while True:
            ended = self.commands[-1].poll() if self.commands else None
            if found := what():
                return found
            if ended is not None or time.monotonic() > until_s:
                raise TimeoutError(f"the command's status is {ended}, and it said:\n{self.output}")
            time.sleep(_POLL_S)

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for _ in range(50):  # what is killed may be about to start something
            left = self.processes()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            if not left:
                break
            time.sleep(0.1)
        for command in self.commands:
            command.kill()
            command.wait()
