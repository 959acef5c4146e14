"""A run folder whose job is over, made ready for the next: what the last one left is kept in ``earlier/NNNN``.

Running the same command again is what people do every day: each job gets a fresh journal, and nothing is lost. And what
still lives of a job whose driver does not: who starts the driver again, and its executors. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import psutil

from phalanx.core.files import fsync_folder
from phalanx.ipc.processes import Identity, identity_of
from phalanx.run.card import NAME, Card

FOLDER = "earlier"
SUPERVISOR = "supervisor.json"
"""Who keeps the driver alive."""

_OURS = (
    "journal.db",
    "journal.db-wal",
    "journal.db-shm",
    "incidents",
    "logs",
    "driver.log",
    "driver",
    "executors",
    "http",
    SUPERVISOR,
)
"""What a job leaves; its token stays, and so does what the script has put there. The card goes last."""

_GRACE_S = 12.0


def set_aside(folder: Path, card: Card) -> Path:
    """Move what the job has left; where it is now.

    Raises:
        OSError: it cannot be moved.
    """
    end_executors(folder)
    earlier = folder / FOLDER
    earlier.mkdir(exist_ok=True)
    numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdecimal()]
    place = earlier / f"{max(numbers, default=0) + 1:04d}"
    place.mkdir()
    for name in (*_OURS, NAME):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(place / name)
    fsync_folder(folder)
    return place


def living_executors(folder: Path) -> list[Identity]:
    """Executors of this machine that a driver of the job has started and that still live."""
    found = (_read(path) for path in (folder / "executors").glob("host-*.json"))
    return [known for known in found if known is not None and identity_of(known.pid) == known]


def supervisor_of(folder: Path) -> Identity | None:
    """Who on this machine starts a dead driver again; None: nobody."""
    known = _read(folder / SUPERVISOR)
    return known if known is not None and identity_of(known.pid) == known else None


def ask_supervisor(folder: Path, number: signal.Signals) -> bool:
    """Let the driver hear a signal, the next one if none lives; False: nobody starts one."""
    known = supervisor_of(folder)
    if known is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(known.pid, number)
    return True


def end_supervisor(folder: Path) -> None:
    """End whoever starts drivers, and a driver that does not come up."""
    known = supervisor_of(folder)
    if known is None:
        return
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(known.pid)
        supervisor.suspend()  # so that it starts none between these two
        for process in [*supervisor.children(), supervisor]:
            process.kill()
        psutil.wait_procs([supervisor], _GRACE_S)


def end_executors(folder: Path, grace_s: float = 0.0) -> int:
    """End those of a job that nobody drives; each ends its workers. How many they were.

    Args:
        grace_s: what workers have between SIGTERM and SIGKILL.
    """
    count = len(living_executors(folder))
    asked = [(signal.SIGINT, grace_s)] if grace_s > 0 else []
    for number, wait_s in (*asked, (signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        until_s = time.monotonic() + wait_s
        for living in living_executors(folder):
            for each in (number, signal.SIGCONT):  # a stopped process takes no other signal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(living.pid, each)
        while living_executors(folder) and time.monotonic() < until_s:
            time.sleep(0.05)
    return count


def _read(path: Path) -> Identity | None:
    try:
        fields = json.loads(path.read_text())
        return Identity(int(fields["pid"]), int(fields["started_ticks"]), str(fields["boot_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
