"""What ranks do in the tests of this folder. Imports no torch, so that a template is ready in a moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from phalanx.core.errors import UserError
from phalanx.core.peers import PeerError
from phalanx.launch.environment import Worker, worker_environment
from phalanx.launch.rank_failures import errors_named

FORKED_FROM = os.getpid()


def describe_self(worker: Worker, folder: str) -> None:
    found = {
        "rank": worker.rank,
        "environment_agrees": worker_environment() == worker,
        "imported_in": FORKED_FROM,
        "parent": os.getppid(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": os.environ["OMP_NUM_THREADS"],
        "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "argv": sys.argv,
        "random": random.random(),
        "phases": list(worker.phases_s),
        "attempt": worker.attempt,
        "descriptors": sorted(int(link.name) for link in Path("/proc/self/fd").iterdir()),
        "listen_fd": worker.listen_fd,
        "listening": sockets_listening_at(worker.port),
        "group": os.getpgrp(),
    }
    Path(folder, f"{worker.rank}.json").write_text(json.dumps(found))


def sockets_listening_at(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def say(worker: Worker, text: str) -> None:
    print(f"{text} {worker.rank}")
    print("error", worker.rank, file=sys.stderr)
    sys.stdout.write("no end of line")


def say_and_wait(worker: Worker, folder: str) -> None:
    note(folder, f"pid-{worker.rank}", os.getpid())
    print("a line", flush=True)
    wait_for_ever()


def end(worker: Worker, endings: dict[int, Any]) -> Any:
    """Rank r ends as `endings[r]` says; the others wait for a signal for ever."""
    if worker.rank not in endings:
        wait_for_ever()
    how, what = endings[worker.rank]
    return WAYS[how](what)


def end_leaving_time(worker: Worker, folder: str, endings: dict[int, Any]) -> Any:
    """As `end`, with the time and every process noted first; SIGTERM does not impress those that wait."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, f"pid-{worker.rank}", os.getpid())
    if worker.rank in endings:
        wait_for_files(folder, "pid-*", worker.world_size)
        note(folder, "time", time.monotonic())
    return end(worker, endings)


def end_in_turn(worker: Worker, folder: str, endings: dict[int, Any]) -> Any:
    """As `end`, but each when the process of the one before it is gone, and with it what it has said."""
    note(folder, f"pid-{worker.rank}", os.getpid())
    if worker.rank in endings and worker.rank > 0:
        before = f"pid-{worker.rank - 1}"
        wait_for_files(folder, before, 1)
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(int(Path(folder, before).read_text()))], [], [])
    return end(worker, endings)


def note(folder: str, name: str, value: float) -> None:
    """Write a number so that nobody who sees the file finds it empty."""
    aside = Path(folder, f".{name}")
    aside.write_text(str(value))
    aside.rename(Path(folder, name))


def wait_for_ever() -> NoReturn:
    while True:
        signal.pause()


def wait_for_files(folder: str, pattern: str, count: int) -> None:
    while len(list(Path(folder).glob(pattern))) < count:
        time.sleep(0.002)


def raise_value_error(text: str) -> NoReturn:
    raise ValueError(text)


def raise_user_error(text: str) -> NoReturn:
    raise UserError(text, cure="choose another", field="model.layers", value=7)


def raise_reset(text: str) -> NoReturn:
    raise ConnectionResetError(text)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    wait_for_ever()


def leave(status: int) -> NoReturn:
    print("last words", flush=True)
    os._exit(status)


WAYS: dict[str, Callable[[Any], Any]] = {
    "returns": lambda value: value,
    "exits": sys.exit,
    "raises": raise_value_error,
    "refuses": raise_user_error,
    "reset": raise_reset,
    "killed": kill_self,
    "leaves": leave,
}


def leave_a_child(worker: Worker, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    note(folder, f"child-{worker.rank}", child.pid)


def count_signals(worker: Worker, folder: str, until: int) -> int:
    """Count signals until `until` comes, and a moment longer; returns 7 then."""
    counts: dict[int, int] = {}

    def count(number: int, _: object) -> None:
        counts[number] = counts.get(number, 0) + 1

    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, count)
    note(folder, f"pid-{worker.rank}", os.getpid())
    while until not in counts:
        signal.sigtimedwait([], 0.05)
    signal.sigtimedwait([], 0.1)  # one that came twice would be here by now
    Path(folder, f"counts-{worker.rank}").write_text(json.dumps(counts))
    return 7


def write_pid_and_wait(worker: Worker, folder: str) -> None:
    note(folder, f"pid-{worker.rank}", os.getpid())
    wait_for_ever()


def without_its_peer(worker: Worker) -> None:
    """Started as by torchrun: an error becomes an exit status."""
    with errors_named(replace(worker, launcher="torchrun"), None):
        raise PeerError("rank 0 is gone")


def with_an_error_of_its_own(worker: Worker) -> None:
    with errors_named(replace(worker, launcher="torchrun"), None):
        raise ValueError("wrong")
