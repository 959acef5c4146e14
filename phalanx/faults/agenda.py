"""What a worker is told of a manifest, and what it remembers of it from one attempt to the next. Torch-free.

The agenda is a file beside which, in a folder, every fault that has happened leaves a record: that is how *once* stays
once when the process is gone, and how the controller knows that a fault has really happened, when and where.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.faults.telling import telling_words

Clock = Literal["optimizer", "calls"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One incident, as a worker is told: the fields of `phalanx.faults.manifest.Incident`; `handing` makes it."""

    number: int
    kind: str
    ranks: list[int]
    step: int
    phase: Literal["start", "step", "checkpoint", "recovery"]
    attempt: int
    delay_s: float
    unit: Literal["calls", "steps", "seconds", "forever"]
    amount: float
    retrigger: Literal["once", "attempt", "host"]
    settings: dict[str, int | float | str] = {}

    @property
    def seconds(self) -> float | None:
        """How long it lasts, where that is said in seconds; None: for ever."""
        return self.amount if self.unit == "seconds" else None


class Agenda(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a worker may have to do to itself.

    Attributes:
        seed: for what is drawn at random.
        clock: whose steps count: the optimizers' of torch, or calls of `Injection.advance`.
    """

    seed: int
    clock: Clock
    orders: list[Order]


class Record(msgspec.Struct, frozen=True):
    """An incident has happened in a rank.

    Attributes:
        refused: why it did not happen after all.
        unix_ns, monotonic_ns: when.
    """

    number: int
    kind: str
    rank: int
    attempt: int
    step: int
    host: str
    pid: int
    unix_ns: int
    monotonic_ns: int
    refused: str = ""


def write_agenda(agenda: Agenda, path: Path) -> None:
    """Write it where workers shall read it.

    Raises:
        UserError: the path, which workers see in their environment, would give the faults away.
    """
    if words := telling_words(str(path)):
        raise UserError(f"gives itself away ({', '.join(words)})", cure="choose a plain name", value=str(path))
    write_bytes(path, msgspec.json.encode(agenda))


def read_agenda(path: Path) -> Agenda:
    """The agenda in a file.

    Raises:
        UserError: there is none, or it is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Agenda)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="check the path", value=str(path)) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"is no agenda ({error})", cure="write it with write_agenda", value=str(path)) from None


class Memory:
    """Records in the folder beside an agenda; every process of the job may write to it at once."""

    def __init__(self, agenda: Path) -> None:
        self.folder = agenda.with_name(f"{agenda.name}.d")

    def claim(self, record: Record, retrigger: Literal["once", "attempt", "host"]) -> bool:
        """Write the record; False: the incident has had its turn, and shall not happen.

        The record is there, whole, before this returns, so a process that dies of the fault has left it.
        """
        name = (
            f"{record.number}-{record.rank}"
            if retrigger == "once"
            else f"{record.number}-{record.rank}-{record.attempt}"
        )
        if retrigger == "host":
            key = record.number, record.rank
            homes = {known.host for known in self.records() if (known.number, known.rank) == key}
            if homes and record.host not in homes:
                return False
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".{secrets.token_hex(8)}"
        aside.write_bytes(msgspec.json.encode(record))
        try:
            os.link(aside, self.folder / name)
        except FileExistsError:
            return False
        finally:
            aside.unlink()
        return True

    def records(self) -> Sequence[Record]:
        """All of them, oldest first."""
        found = []
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if not path.name.startswith("."):
                    found.append(msgspec.json.decode(path.read_bytes(), type=Record))
        return sorted(found, key=lambda record: record.unix_ns)


def new_record(order: Order, rank: int, attempt: int, step: int, host: str, refused: str = "") -> Record:
    """A record of now."""
    clock_ns = time.time_ns(), time.monotonic_ns()
    return Record(order.number, order.kind, rank, attempt, step, host, os.getpid(), *clock_ns, refused)
