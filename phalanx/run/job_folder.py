"""The folder of a run: `job.json` for commands that look for it, what earlier jobs left, and what still lives of a job.

Running the same command again is what people do every day: each job gets a fresh journal, and nothing is lost, since
what an earlier job left is kept in ``earlier/NNNN``. Of a job without a living driver its supervisor and its executors
may live.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from phalanx.core.errors import UserError
from phalanx.core.files import digest, fsync_folder, make_private, write_bytes
from phalanx.ipc.processes import Identity, identity_of
from phalanx.run.config import RunConfig
from phalanx.run.secrets import scrub_arguments, scrub_text

NAME = "job.json"

_MOST_SOCKET_BYTES = 107

Life = Literal["lives", "dead", "elsewhere"]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as its last driver wrote it down; nothing in it is secret."""

    job: str
    driver_host: str  # `driver_host`, `pid`, `started_ticks`, `boot_id`: which process the driver is
    pid: int
    started_ticks: int
    boot_id: str
    began_unix_s: float
    token: str  # `token`, `journal`, `logs`: where they are; relative to the run folder where they lie in it
    journal: str
    logs: str
    journal_job: str
    backend: str = "local"
    command: list[str] = []
    http: str = ""  # URL of the interface for people; empty: none yet
    local: str = ""  # its Unix socket, for this user's commands on `driver_host`; empty: there is none
    certificate: str = ""  # `certificate`, `authority`: to check its certificate; empty: no TLS
    authority: str = ""
    status: int | None = None  # `status`, `ended`: how the job has ended, and why; None: it has not
    ended: str = ""

    @property
    def identity(self) -> Identity:
        """Of the driver's process."""
        return Identity(self.pid, self.started_ticks, self.boot_id)

    def journal_url(self, folder: Path) -> str:
        """For `phalanx.run.journal.read_journal`."""
        return self.journal if "://" in self.journal else str(folder / self.journal)

    def token_path(self, folder: Path) -> Path:
        """Of the job's token."""
        return folder / self.token

    def log_folder(self, folder: Path) -> Path:
        """Of the ranks' logs."""
        return folder / self.logs


def card_of_this_process(config: RunConfig, folder: Path, unix_s: float) -> Card:
    """The card of the job that this process drives."""
    identity = identity_of(os.getpid())
    assert identity is not None, "this process is there"
    return Card(
        job=config.job_name,
        driver_host=socket.gethostname(),
        pid=identity.pid,
        started_ticks=identity.started_ticks,
        boot_id=identity.boot_id,
        began_unix_s=unix_s,
        token=_within(folder, str(config.token_path)),
        journal=scrub_text(_within(folder, config.journal_url)),
        logs=_within(folder, str(config.log_folder)),
        journal_job=config.job_name,
        backend=config.backend,
        command=[config.script, *scrub_arguments(config.arguments)],
        certificate=str(Path(config.tls.certificate).absolute()) if config.tls.certificate else "",
        authority=str(Path(config.tls.authority).absolute()) if config.tls.authority else "",
    )


def local_socket(folder: Path) -> Path | None:
    """Where the driver of this run folder listens for commands on its host; None: nowhere is safe from other users."""
    private = Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}"
    path = private / f"driver-{digest(str(folder.absolute()))[:16]}"
    return path if make_private(private) and len(os.fsencode(path)) <= _MOST_SOCKET_BYTES else None


def write_card(folder: Path, card: Card) -> None:
    """Write it down, all at once.

    Raises:
        OSError: it cannot be written.
    """
    write_bytes(folder / NAME, msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")


def read_card(folder: Path) -> Card | None:
    """The card in the folder; None: no job was ever run in it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Card)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"cannot be read ({error})", cure="give another --folder", value=str(folder / NAME)) from None


def life(card: Card) -> Life:
    """Whether the driver lives; from here that is not known of another machine's."""
    if card.driver_host != socket.gethostname():
        return "elsewhere"
    return "lives" if identity_of(card.pid) == card.identity else "dead"


def _within(folder: Path, path: str) -> str:
    if "://" in path:
        return path
    whole = Path(path).absolute()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)


FOLDER = "earlier"
SUPERVISOR = "supervisor.json"
"""The process that keeps the driver alive."""

_OURS = (
    "journal.db",
    "journal.db-wal",
    "journal.db-shm",
    "incidents",
    "detections.jsonl",
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
    """The process on this machine that starts a dead driver again; None: there is none."""
    known = _read(folder / SUPERVISOR)
    return known if known is not None and identity_of(known.pid) == known else None


def ask_supervisor(folder: Path, number: signal.Signals) -> bool:
    """Pass a signal to the driver, the next one if none lives; False: there is no supervisor."""
    known = supervisor_of(folder)
    if known is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(known.pid, number)
    return True


def end_supervisor(folder: Path) -> None:
    """End the supervisor, and a driver that does not come up."""
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
    """End those of a job without a driver; each ends its workers within `grace_s`. How many they were."""
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
