"""Plays an executor, its template and ranks that behave badly; run by test_run_executor_reaper.py in new processes.

Every rank, and all that it starts, holds a FIFO open for writing, so whoever reads it sees the end when the last of
them is gone, whatever its number is and wherever it is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from phalanx.checkpoint.keeper.keeper_start import ensure_keeper
from phalanx.ipc.processes import read_process
from phalanx.run.executor.reaper import Reaper, choose_containment, run_guarded
from phalanx.telemetry.recording import open_recording
from phalanx.telemetry.writer_place import WriterPlace

GUARD_S = 240.0
LIVES_S = 100.0  # of what nobody kills: tests leave nothing behind for good
_FORKS = 20_000


# What ranks do. Each writes one byte when it is what it wants to be.


def plain(ready: Callable[[], object]) -> None:
    ready()
    time.sleep(LIVES_S)


def own_session(ready: Callable[[], object]) -> None:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        ready()
    time.sleep(LIVES_S)


def daemon(ready: Callable[[], object]) -> None:
    if os.fork():
        return
    os.setsid()
    if os.fork():
        return
    ready()
    time.sleep(LIVES_S)


def deaf(ready: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        signal.signal(number, signal.SIG_IGN)
    ready()
    time.sleep(LIVES_S)


def stopped(ready: Callable[[], object]) -> None:
    if os.fork() == 0:
        while (rank := read_process(os.getppid())) is None or rank.state != "T":
            time.sleep(0.01)
        ready()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LIVES_S)


def forking(ready: Callable[[], object]) -> None:
    """Starts processes that end at once, one after the other."""
    ready()
    for _ in range(_FORKS):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)


def hopping(ready: Callable[[], object]) -> None:
    """Is a new process all the time, each the child of one that has gone."""
    os.setsid()
    ready()
    for _ in range(_FORKS):
        if os.fork():
            os._exit(0)


def with_keeper(ready: Callable[[], object]) -> None:
    ensure_keeper(Path(os.environ["PHALANX_KEEPER"]))
    ready()
    time.sleep(LIVES_S)


def with_writer(ready: Callable[[], object]) -> None:
    """Records, and is killed without having closed its ring."""
    run = Path(os.environ["PHALANX_KEEPER"]).with_name("run")
    recording = open_recording(run, rank=0, attempt=0, is_first_of_host=True)
    with recording.step(1):
        pass
    while not WriterPlace.of(run).is_written:
        time.sleep(0.01)
    ready()
    time.sleep(LIVES_S)


def impostor(ready: Callable[[], object]) -> None:
    """Has a socket at the keeper's address, as what is forked while a keeper is being started; the rank ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ["PHALANX_KEEPER"])
        listener.listen()
        daemon(ready)


def in_name_only(ready: Callable[[], object]) -> None:
    """Is started as a keeper is, but has no socket."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ready()
            program = f"import time; time.sleep({LIVES_S})  # phalanx.checkpoint.keeper.main"
            os.execv(sys.executable, [sys.executable, "-S", "-c", program])


RANKS = (plain, own_session, daemon, deaf, stopped, forking, hopping)


def template(fifo: str) -> None:
    """Forks the ranks whose names it reads, and says so; one line each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        for name in line.split():
            if os.fork() == 0:
                with suppress(BaseException):
                    descriptor = os.open(fifo, os.O_WRONLY)
                    os.set_inheritable(descriptor, True)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    nothing = os.open(os.devnull, os.O_RDWR)
                    for standard in (0, 1):
                        os.dup2(nothing, standard)
                    globals()[name](partial(os.write, descriptor, b"."))
                os._exit(0)
        print("forked", flush=True)


class Host:
    """The executor's view."""

    def __init__(self, reaper: Reaper, folder: Path) -> None:
        self.reaper = reaper
        self.fifo = folder / "fifo"
        self.template = subprocess.Popen(
            [sys.executable, __file__, "template", str(self.fifo)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        reaper.contain(self.template.pid)

    def fork(self, *names: str) -> int:
        """Start these, wait until all are ready; returns a descriptor that comes to its end when all are gone."""
        descriptor = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        assert self.template.stdin is not None and self.template.stdout is not None
        self.template.stdin.write(" ".join(names) + "\n")
        self.template.stdin.flush()
        assert self.template.stdout.readline() == "forked\n"
        count = 0
        while count < len(names):
            assert select.select([descriptor], [], [], GUARD_S)[0]
            with suppress(BlockingIOError):
                count += len(os.read(descriptor, 100))
        return descriptor


def is_over(descriptor: int, within_s: float = 10.0) -> bool:
    """Whether all have gone."""
    return bool(select.select([descriptor], [], [], within_s)[0]) and os.read(descriptor, 1) == b""


def attempts(host: Host) -> dict:
    """Two attempts, forked from one template, which lives through the end of both."""
    found: dict = {"gone": [], "stuck": [], "left": []}
    for _ in range(2):
        descriptor = host.fork(*[rank.__name__ for rank in RANKS])
        killed = host.reaper.end_attempt(GUARD_S)
        found["gone"].append(is_over(descriptor))
        found["stuck"] += killed.stuck
        found["left"] += host.reaper.left()
        os.close(descriptor)
    found["template lives"] = host.template.poll() is None
    host.reaper.end_all(GUARD_S)
    found["template killed"] = host.template.wait(GUARD_S) == -signal.SIGKILL
    return found


def keeper(host: Host) -> dict:
    """A rank starts a keeper; a helper of the executor's own lives too."""
    helper = host.reaper.helper(lambda: subprocess.Popen(["sleep", str(LIVES_S)]))
    descriptor = host.fork("with_keeper", "daemon")
    host.reaper.end_attempt(GUARD_S)
    gone = is_over(descriptor)
    host.reaper.end_all(GUARD_S)
    found = {"gone": gone, "helper lives": helper.poll() is None, "template": host.template.wait(GUARD_S)}
    helper.kill()
    helper.wait()
    return found


def writer(host: Host) -> dict:
    """A rank that records is killed: what writes its spans is not, and ends by itself."""
    descriptor = host.fork("with_writer")
    host.reaper.end_attempt(GUARD_S)
    left = sorted(host.reaper.left())
    host.reaper.end_all(GUARD_S)
    deadline_s = time.monotonic() + GUARD_S
    while WriterPlace.of(host.fifo.with_name("run")).is_written and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {"gone": is_over(descriptor), "left": left, "template": host.template.wait(GUARD_S)}


def false_keepers(host: Host) -> dict:
    """What only looks like a keeper is killed."""
    descriptor = host.fork("impostor", "in_name_only")
    host.reaper.end_attempt(GUARD_S)
    return {"gone": is_over(descriptor), "left": sorted(host.reaper.left())}


def wait_with_helper(host: Host) -> dict:
    """As `wait`, with a child of the executor's own."""
    host.reaper.helper(lambda: subprocess.Popen(["sleep", str(LIVES_S)]))
    return wait(host)


def wait(host: Host) -> dict:
    """Say that the ranks run, and wait to be killed."""
    host.fork("daemon", "own_session", "plain")
    signal.signal(signal.SIGTERM, _stop)
    print(json.dumps({"template": host.template.pid}), flush=True)
    time.sleep(LIVES_S)
    return {}


def _stop(number: int, frame: object) -> None:
    print("asked to stop", flush=True)
    sys.exit(11)


def leave(host: Host) -> dict:
    """End without ending anything."""
    host.fork("daemon", "own_session", "plain")
    return {"way": host.reaper.containment.name}


def main(wanted: str, scenario: str, folder: Path) -> int:
    way = choose_containment(lambda line: print(line, file=sys.stderr, flush=True), name=folder.name, ways=[wanted])

    def serve(reaper: Reaper) -> int:
        print(json.dumps(globals()[scenario](Host(reaper, folder))), flush=True)
        return 7

    address = os.environ.get("PHALANX_KEEPER")
    return run_guarded(way, serve, environ=os.environ, keeper=Path(address) if address else None)


if __name__ == "__main__":
    if sys.argv[1] == "template":
        template(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
