"""What a run folder says of its job, for commands that look for it: ``job.json``. Torch-free."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.ipc.processes import Identity, identity_of
from phalanx.run.config import RunConfig
from phalanx.run.secrets import scrub_arguments, scrub_text

NAME = "job.json"

Life = Literal["lives", "dead", "elsewhere"]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as its last driver wrote it down; nothing in it is secret.

    Attributes:
        driver_host, pid, started_ticks, boot_id: which process the driver is.
        began_unix_s: when that driver began.
        http: URL of the interface for people; empty: none yet.
        certificate, authority: what its certificate is checked by; empty: no TLS.
        token, journal, logs: where they are; relative to the run folder where they lie in it.
        journal_job: the job's name in the journal.
        command: script and arguments.
        status: with which the job has ended; None: it has not.
        ended: why.
    """

    job: str
    driver_host: str
    pid: int
    started_ticks: int
    boot_id: str
    began_unix_s: float
    token: str
    journal: str
    logs: str
    journal_job: str
    backend: str = "local"
    command: list[str] = []
    http: str = ""
    certificate: str = ""
    authority: str = ""
    status: int | None = None
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


def write_card(folder: Path, card: Card) -> None:
    """Write it down, all at once.

    Raises:
        OSError: it cannot be written.
    """
    write_bytes(folder / NAME, msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")


def read_card(folder: Path) -> Card | None:
    """What the folder says; None: no job was ever run in it.

    Raises:
        UserError: it says nothing that can be read.
    """
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Card)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"cannot be read ({error})", cure="give another --folder", value=str(folder / NAME)) from None


def life(card: Card) -> Life:
    """Whether the driver lives; that of another machine's cannot be told from here."""
    if card.driver_host != socket.gethostname():
        return "elsewhere"
    return "lives" if identity_of(card.pid) == card.identity else "dead"


def _within(folder: Path, path: str) -> str:
    if "://" in path:
        return path
    whole = Path(path).absolute()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)
