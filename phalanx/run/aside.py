"""A run folder whose job is over, made ready for the next: what the last one left is kept in ``earlier/NNNN``.

Running the same command again is what people do every day: each job gets a fresh journal, and nothing is lost.
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from phalanx.core.files import fsync_folder
from phalanx.core.watched import Identity, identity_of
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


def supervisor_lives(folder: Path) -> bool:
    """Whether somebody on this machine starts a dead driver again."""
    known = _read(folder / SUPERVISOR)
    return known is not None and identity_of(known.pid) == known


def end_executors(folder: Path) -> None:
    """End those whose driver died after the job had ended; each ends its workers."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        until_s = time.monotonic() + wait_s
        for living in living_executors(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(living.pid, number)
        while living_executors(folder) and time.monotonic() < until_s:
            time.sleep(0.05)


def _read(path: Path) -> Identity | None:
    try:
        fields = json.loads(path.read_text())
        return Identity(int(fields["pid"]), int(fields["started_ticks"]), str(fields["boot_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
