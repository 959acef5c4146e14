"""A process that imports torch once and forks the foreign loops that it is asked for. Not a test itself.

Reads jobs from standard input, a line of JSON each, and answers each with two lines: the process ids of its ranks when
they are started, and, when they have ended, the exit status of each and what its target returned or raised.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from keeper_forks import fork_keeper

from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.ipc.processes import die_with_parent

HANG_S = 300


class Forks:
    """The side of the tests."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: list[int] = []

    def start(self, target: str, arguments: Sequence[Any], environments: Sequence[dict[str, str]]) -> list[int]:
        """Start a process of ``module:function`` in each environment; their ids."""
        assert self._process.stdin is not None
        job = {"target": target, "arguments": list(arguments), "environments": list(environments)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._running = self._answer()
        return self._running

    def ended(self) -> list[tuple[int, Any]]:
        """Wait for what was started: exit statuses, as `subprocess` has them, and what was returned or raised."""
        ended, self._running = self._answer(), []
        return [(status, told) for status, told in ended]

    def run(self, target: str, arguments: Sequence[Any], environments: Sequence[dict[str, str]]) -> list[Any]:
        """Start, and wait."""
        self.start(target, arguments, environments)
        return self.ended()

    def close(self) -> None:
        """End it, and what it has forked."""
        self.end_running()
        self._process.kill()
        self._process.communicate()

    def end_running(self) -> None:
        """Kill what is still running: a test was broken off."""
        ids, self._running = self._running, []
        for pid in ids:
            os.kill(pid, signal.SIGKILL)  # its parent waits for it, so the number is still its
        if ids:
            self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        return json.loads(line)


@contextmanager
def a_keeper_of_its_own(folder: Path, forks: Forks) -> Iterator[dict[str, str]]:
    """The environment of loops whose keeper has its socket in `folder`; nothing of them is left afterwards."""
    address = str(folder / "s")
    fork_keeper(Path(address), ttl_s=HANG_S, environ=os.environ | {"PHALANX_KEEPER": address})
    try:
        yield {"PHALANX_KEEPER": address}
    finally:
        forks.end_running()
        end_keeper(Path(address))
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("PHALANX_KEEPER") == address:
                process.kill()


class HeardLines(io.TextIOBase):
    """Lines that are printed go to a pipe, one at a time: each print returns when whoever reads has answered a byte."""

    def __init__(self, output: str, answers: str) -> None:
        self._output, self._answers = os.open(output, os.O_WRONLY), os.open(answers, os.O_RDONLY)

    def write(self, text: str) -> int:
        os.write(self._output, text.encode())
        if text.endswith("\n"):
            os.read(self._answers, 1)
        return len(text)


def script(path: str, output: str, answers: str, *arguments: str) -> None:
    """Run a script as ``python PATH ARGUMENT …`` does; it prints `HeardLines`."""
    sys.stdout = HeardLines(output, answers)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _become(job: dict[str, Any], environment: dict[str, str], end: int) -> int:
    """Be one of the processes; its exit status."""
    die_with_parent(os.getppid())
    os.dup2(2, 1)  # answers are not the loops' to write
    signal.alarm(HANG_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    module, _, name = job["target"].partition(":")
    try:
        told, status = getattr(importlib.import_module(module), name)(*job["arguments"]), 0
    except BaseException:
        told, status = traceback.format_exc(), 1
    os.write(end, json.dumps(told).encode())
    return status


def _fork(job: dict[str, Any]) -> list[tuple[int, int]]:
    """Process ids, and pipes on which the processes tell."""
    importlib.import_module(job["target"].partition(":")[0])
    started = []
    for environment in job["environments"]:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            sys.exit(_become(job, environment, theirs))
        os.close(theirs)
        started.append((pid, ours))
    return started


def _wait(started: list[tuple[int, int]]) -> list[tuple[int, Any]]:
    ended = []
    for pid, ours in started:
        with os.fdopen(ours) as told:
            text = told.read()
        ended.append((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(text or "null")))
    return ended


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end it
    for module in ("torch._dynamo", "phalanx.checkpoint.foreign.checkpointer"):  # an optimizer would import the first
        importlib.import_module(module)
    for line in sys.stdin:
        started = _fork(json.loads(line))
        print(json.dumps([pid for pid, _ in started]), flush=True)
        print(json.dumps(_wait(started)), flush=True)


if __name__ == "__main__":
    _serve()
