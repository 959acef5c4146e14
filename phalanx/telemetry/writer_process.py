"""The process of a host that writes spans: it waits for its turn, writes until no rank is left, and leaves nothing.

How it is started and where it reads: `phalanx.telemetry.writer_place`. What it does: `phalanx.telemetry.span_writer`,
which it imports only once it has the lock.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from phalanx.ipc.processes import name_process
from phalanx.telemetry.writer_place import LOCK, LOG, NICE, STATE, WriterSettings

_LEFT_S, _LOG_S = 60.0, 86_400.0


def hold_lock(rings: Path) -> IO[bytes]:
    """Wait until no other process writes what is in these rings, and be the one that does until the file is closed."""
    while True:
        rings.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (rings / LOCK).open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), (rings / LOCK).stat()):
                return file
        file.close()  # the one before has removed it at its end


def clear(rings: Path) -> None:
    """Leave nothing of a run in this host's memory; by the holder of the lock, when all is written."""
    with contextlib.suppress(OSError):
        (rings / STATE).unlink(missing_ok=True)
        if (rings / LOG).exists() and not (rings / LOG).stat().st_size:
            (rings / LOG).unlink()
        (rings / LOCK).unlink()
        rings.rmdir()  # fails where a rank has begun meanwhile, or something was said


def clear_left(base: Path, but: Path) -> None:
    """Take away what killed runs left in this host's memory: folders without a ring that nobody writes from.

    What was said in one of them is kept for a day.

    Args:
        base: of the rings of all runs of this user.
        but: the folder of the run that starts.
    """
    for rings in base.glob("*/"):
        with contextlib.suppress(OSError):
            # A rank that begins has a ring at once.
            if rings.name == but.name or _age_s(rings) < _LEFT_S or any(rings.glob("*.ring")):
                continue
            log, lock = rings / LOG, rings / LOCK
            if log.exists() and log.stat().st_size and _age_s(log) < _LOG_S:
                continue
            with lock.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                    log.unlink(missing_ok=True)
                    clear(rings)


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def main(arguments: Sequence[str] | None = None) -> None:
    """Write until nothing more can come, or a signal asks to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rings", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default=socket.gethostname())
    parser.add_argument("--store-host", help="where the store of a job of several hosts is: clocks are compared")
    parser.add_argument("--upload", default="", help="URL of the run in object storage; empty: none")
    parser.add_argument("--spool", action="store_true", help="files that were sent are removed")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of WriterSettings")
    parser.add_argument("--cores", default="", help="such as 0,1; empty: as they are")
    given = parser.parse_args(arguments)
    name_process("phalanx spans")
    os.nice(NICE)
    if given.cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
    lock = hold_lock(given.rings)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    clear_left(given.rings.parent, given.rings)
    # Only now: who waits for the lock needs no memory for it.
    from phalanx.telemetry.span_writer import HostWriter

    remote = None
    if given.upload:
        from phalanx.telemetry.remote_path import RemotePath

        remote = RemotePath.of(given.upload) / "telemetry"
    writer = HostWriter(
        given.rings,
        given.folder,
        given.host,
        WriterSettings(**given.settings),
        store_host=given.store_host,
        remote=remote,
        keeps=not given.spool,
    )
    writer.run(ended)
    clear(given.rings)
    lock.close()


if __name__ == "__main__":
    main()
