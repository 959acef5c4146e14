"""The process of a host that writes spans, as ranks know it: where it reads, how it is started, and whether it lives.

Ranks import this and not what the process does (`phalanx.telemetry.writer_process`, `span_writer`), which needs
pyarrow. It is nobody's child, in a session that it has for itself: it outlives whatever ends the ranks, takes what they
left in their rings, and ends by itself within a second or two. So it works alike under `phalanx train`, torchrun, srun
and `phalanx run`, whose reaper knows it by its program and its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.files import digest, make_private

PROGRAM = "phalanx.telemetry.writer_process"
MEMORY = Path("/dev/shm")
LOCK = "writer.lock"
STATE = "writer.json"
LOG = "writer.log"
IDENTITY = "rings.id"
WRITER = ".writer"
"""Ending of the file in ``live`` of a run that the process of a host holds locked for as long as it writes."""

NICE = 10  # training comes first; on a busy core it still gets a tenth

_START = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path[:] = {path!r}
from phalanx.ipc.processes import give_way
from phalanx.telemetry.writer_place import NICE
from phalanx.telemetry.writer_process import main
give_way(NICE)  # the session is its own
main({arguments!r})
"""

# Its sums need no pool of threads.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

# It is no rank, and must not be taken for one that was left behind.
_OF_RANKS = ("PHALANX_", "TORCHELASTIC_", "SLURM_PROCID")


@dataclass(frozen=True)
class WriterSettings:
    """How often, and for how long.

    Attributes:
        period_s: between two looks at the rings; what a crash of the whole host loses.
        part_s: between two Parquet files.
        part_rows: a file is closed early when it has so many spans.
        detail_s: how long every span is kept, apart from incidents; sums are kept for good.
        around_s: how much before and after an incident is kept.
        most_bytes: of all spans of this host; beyond, the oldest go first.
    """

    period_s: float = 1.0
    part_s: float = 60.0
    part_rows: int = 2_000_000
    detail_s: float = 1800.0
    around_s: float = 120.0
    most_bytes: int = 2 << 30


def _identify(folder: Path) -> None:
    """Tell a folder from one that was there before it: rings of a run that was removed are not this one's."""
    path = folder / IDENTITY
    if path.exists():
        return
    number, name = tempfile.mkstemp(prefix=f".{IDENTITY}-", dir=folder)
    try:
        with os.fdopen(number, "w") as file:
            file.write(uuid.uuid4().hex)
        Path(name).chmod(0o644)
        # Of several ranks one is first. Where there are no hard links, the path alone has to tell.
        with contextlib.suppress(OSError):
            os.link(name, path)
    finally:
        Path(name).unlink()


def rings_of(folder: Path) -> Path:
    """Where this host's rings of the `telemetry` folder of a run are; it may not be there."""
    base, identity = rings_base(MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())), ""
    with contextlib.suppress(OSError):
        identity = (folder / IDENTITY).read_text()
    return base / digest(socket.gethostname(), str(folder), identity)[:16]


@dataclass(frozen=True)
class WriterPlace:
    """Where a host's spans of one run go through.

    Attributes:
        rings: folder in this host's memory, this user's alone, with the rings of its ranks (``*.ring``).
        folder: `telemetry` of the run; may be shared by many hosts.
        host: this one's name.
        store_host: where the store of a job of several hosts is, as this one reaches it: hosts compare their clocks.
        upload: URL of the run in object storage, where finished files are sent; empty: nowhere.
        keeps: what was sent stays in `folder`, too.
        cores: that the process may use; None: those of the one that starts it.
    """

    rings: Path
    folder: Path
    host: str
    store_host: str | None = None
    cores: frozenset[int] | None = None
    upload: str = ""
    keeps: bool = True

    @classmethod
    def of(
        cls,
        run: str | Path,
        store_host: str | None = None,
        cores: Collection[int] | None = None,
        upload: str = "",
    ) -> WriterPlace:
        """That of a run folder; made if need be. Of a run at a URL it is a spool on this host's disk, for `upload`.

        Raises:
            OSError: a folder cannot be made, or is not this user's alone.
            UserError: the URL is of a kind that is not known here.
        """
        host, is_spool = socket.gethostname(), isinstance(run, str) and "://" in run
        upload = str(run) if is_spool else upload
        if upload:
            from phalanx.telemetry.remote_path import check_url

            check_url(upload)
        if is_spool:
            spools = Path(tempfile.gettempdir()) / f"phalanx-spool-{os.getuid()}"
            run = spools / digest(host, upload)[:16]
            if not make_private(spools) or not make_private(run):
                raise PermissionError(f"{spools} is not this user's alone")
        folder = Path(run).resolve() / "telemetry"
        folder.mkdir(parents=True, exist_ok=True)
        _identify(folder)
        rings = rings_of(folder)
        if not make_private(rings.parent) or not make_private(rings):
            raise PermissionError(f"{rings.parent} is not this user's alone")
        chosen = None if cores is None else frozenset(cores)
        return cls(rings, folder, host, store_host, chosen, upload, keeps=not is_spool)

    def start_writer(self, settings: WriterSettings) -> None:
        """Start the process; where one writes already, the new one waits for its end and goes on from there.

        Raises:
            OSError: it cannot be started.
        """
        arguments = ["--rings", str(self.rings), "--folder", str(self.folder), "--host", self.host]
        arguments += ["--settings", json.dumps(asdict(settings))]
        arguments += ["--store-host", self.store_host] if self.store_host else []
        arguments += ["--upload", self.upload] if self.upload else []
        arguments += ["--spool"] if not self.keeps else []
        arguments += ["--cores", ",".join(map(str, sorted(self.cores)))] if self.cores else []
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)} | _ENVIRONMENT
        with (self.rings / LOG).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=sys.path, arguments=arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,  # whoever reads what ranks write must not wait for it
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        # The parent of the writer ends at once; it is waited for so that it does not stay a zombie.
        threading.Thread(target=process.wait, daemon=True, name="start span writer").start()

    @property
    def is_written(self) -> bool:
        """Whether some process writes what is in the rings."""
        try:
            with (self.rings / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def state(self) -> dict[str, Any]:
        """What the process says of itself: ``dropped`` (spans) and ``problem``; empty: nothing so far."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.rings / STATE).read_text())
            return found if isinstance(found, dict) else {}
        return {}


def rings_base(memory: Path) -> Path:
    """Where the rings of all runs of this user lie, below a folder in memory."""
    return memory / f"phalanx-spans-{os.getuid()}"
