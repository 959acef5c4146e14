"""Which processes train in a run folder, for whoever looks from elsewhere: ``RUN/processes/rank-3.json``.

Each rank writes its own when it starts and takes it away when it ends, however that is, unless it is killed: a file
whose process is gone says that the run died without saying so. How far a rank is stands on its page
(`phalanx.core.progress`), which lies in memory of its host, since the run folder may lie on a file system that holds up
whoever writes there.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from phalanx.core.files import digest, make_private, read_regular
from phalanx.ipc.processes import Identity, identity_of, read_process
from phalanx.telemetry.run_access import read_table

FOLDER = "processes"
MOVED = "moved.json"
"""The folder of a run was moved or removed while it trained: ``{"from": "/runs/a"}`` or ``{"lost": true}``."""
_MOST_BYTES = 1 << 16
_FILE = re.compile(r"rank-(\d+)\.json")

Life = Literal["lives", "paused", "gone", "elsewhere"]
"""Paused: stopped by a signal or a debugger. Elsewhere: on another host, where it cannot be looked at."""


@dataclass(frozen=True)
class Presence:
    """A process that trains.

    Attributes:
        start: of which start of the run, from 1.
        page: file of how far it is, on its host; empty: there is none.
    """

    rank: int
    world_size: int
    start: int
    host: str
    pid: int
    started_ticks: int
    boot_id: str
    began_unix_s: float
    page: str

    def life(self) -> Life:
        """Whether it lives."""
        if self.host != socket.gethostname():
            return "elsewhere"
        if identity_of(self.pid) != Identity(self.pid, self.started_ticks, self.boot_id):
            return "gone"
        process = read_process(self.pid)
        return "paused" if process is not None and process.state in "Tt" else "lives"


def page_path(run: Path, rank: int) -> Path | None:
    """A place for the page of a rank, in memory of this host; None: there is none that is this user's alone."""
    memory = Path("/dev/shm")
    base = (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / f"phalanx-progress-{os.getuid()}"
    folder = base / digest(socket.gethostname(), str(run.resolve()))[:16]
    return folder / f"{rank}.page" if make_private(base) and make_private(folder) else None


def announce(run: Path, *, rank: int, world_size: int, start: int, page: Path | None) -> None:
    """Say that this process is a rank of the run; what cannot be written is left out.

    Rank 0 takes away what ranks of a larger start have left.
    """
    own = identity_of(os.getpid()) or Identity(os.getpid(), 0, "")
    presence = Presence(
        rank,
        world_size,
        start,
        socket.gethostname(),
        own.pid,
        own.started_ticks,
        own.boot_id,
        time.time(),
        "" if page is None else str(page),
    )
    with suppress(OSError):
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for number, path in _files(run) if rank == 0 else ():
            if number >= world_size:
                path.unlink(missing_ok=True)
        # Not durable: after a power cut no process is there either.
        place = folder / f"rank-{rank}.json"
        half = place.with_suffix(f".{own.pid}")
        half.write_text(json.dumps(asdict(presence)))
        half.replace(place)


def withdraw(run: Path, rank: int) -> None:
    """This process ends as a rank of the run, and says itself how, if it has to."""
    page = page_path(run, rank)
    with suppress(OSError):
        (run / FOLDER / f"rank-{rank}.json").unlink(missing_ok=True)
    with suppress(OSError):  # other ranks may still have pages there
        if page is not None:
            page.unlink(missing_ok=True)
            page.parent.rmdir()


def presences(run: Path, only: Container[int] | None = None) -> list[Presence]:
    """The ranks of the newest start that have not said that they end, in order of rank; torn files are left out.

    Args:
        only: these ranks; None: all.
    """
    found = []
    for _, path in (item for item in _files(run) if only is None or item[0] in only):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            found.append(Presence(**json.loads(read_regular(path, _MOST_BYTES))))
    newest = max((presence.start for presence in found), default=0)
    return [presence for presence in found if presence.start == newest]


def _files(run: Path) -> list[tuple[int, Path]]:
    try:
        paths = list((run / FOLDER).iterdir())
    except OSError:
        return []
    return sorted((int(match[1]), path) for path in paths if (match := _FILE.fullmatch(path.name)))


def moved_words(run: Path, *, is_running: bool) -> str:
    """That the folder is not where, or what, its run began with; empty: it is."""
    found = read_table(run / MOVED) or {}
    if found.get("lost"):
        why = "its folder was removed, or moved to another file system, while it trained"
        return f"{why}: what it wrote before is not here"
    if found.get("from") and is_running:
        return f"moved here from {found['from']} while it trains; it goes on here"
    return ""
