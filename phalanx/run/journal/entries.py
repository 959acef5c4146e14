"""What a journal holds: entries, and the drivers that wrote them; the tables of both, and what can go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import sqlalchemy as sa

from phalanx.core.errors import UserError

Kind = Literal["event", "action", "note"]

SCHEMA = 1
"""Of the tables; a journal of another one is not opened."""


class JournalTakenError(UserError):
    """Another driver writes this journal."""


class JournalError(OSError):
    """The journal cannot be read or written just now."""


class JournalLostError(RuntimeError):
    """A later driver has taken the job over: this one must not command anything any more."""


@dataclass(frozen=True)
class Draft:
    """What is to be appended.

    Attributes:
        kind: ``event``: what has happened; ``action``: what was decided; ``note``: for people, ignored by a replay.
        attempt: that it belongs to; 0: none yet.
        json_text: one JSON value.
        unix_s: when it happened, for people; order is that of the sequence.
    """

    kind: Kind
    attempt: int
    json_text: str
    unix_s: float

    def check(self) -> None:
        """See that it can be stored.

        Raises:
            ValueError: kind, attempt or text is none.
        """
        if self.kind not in get_args(Kind) or self.attempt < 0:
            raise ValueError(f"kind = {self.kind!r}, attempt = {self.attempt}: a kind is one of {get_args(Kind)}")
        try:
            msgspec.json.decode(self.json_text.encode())
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ValueError(f"an entry of a journal is JSON text: {error}") from None


@dataclass(frozen=True)
class Entry(Draft):
    """What was appended.

    Attributes:
        sequence: place in the journal of the job, from 1, without gaps.
        epoch: of the driver that wrote it.
    """

    sequence: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class DriverStart:
    """A driver began to write.

    Attributes:
        epoch: number of the start, from 1.
        host, pid: where it ran.
        schema: of the tables, as that driver knew them.
    """

    epoch: int
    unix_s: float
    host: str
    pid: int
    schema: int


METADATA = sa.MetaData()

STARTS = sa.Table(
    "phalanx_driver_starts",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("unix_s", sa.Double, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("schema", sa.BigInteger, nullable=False),
)

ENTRIES = sa.Table(
    "phalanx_journal",
    METADATA,
    sa.Column("job", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("unix_s", sa.Double, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("json_text", sa.Text, nullable=False),
)
