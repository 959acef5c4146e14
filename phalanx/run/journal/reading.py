"""Reading a journal that another process may be writing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import sqlalchemy as sa

from phalanx.core.errors import UserError
from phalanx.run.journal import rows
from phalanx.run.journal.entries import SCHEMA, DriverStart, Entry, JournalError
from phalanx.run.journal.places import Place, place_for

_NO_JOURNAL = ("not a database", "malformed", "no such table", "does not exist")


class JournalReader:
    """The entries of one job; for use as a context, or with `close`."""

    def __init__(self, place: Place, connection: sa.Connection, job: str) -> None:
        self._place, self._connection, self._job = place, connection, job

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        """Entries in order; what is appended meanwhile comes too, or with the next call.

        Raises:
            JournalError: it cannot be read.
        """
        with told(self._place):
            yield from rows.each(self._connection, self._job, from_sequence)

    def starts(self) -> list[DriverStart]:
        """The drivers that have written it.

        Raises:
            JournalError: it cannot be read.
        """
        with told(self._place), self._connection.begin():
            return rows.starts(self._connection, self._job)

    def close(self) -> None:
        """Let go of it."""
        with suppress(sa.exc.DBAPIError):
            self._connection.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_journal(url: str, *, job: str = "job", environ: Mapping[str, str] | None = None) -> JournalReader:
    """Open a journal to read it, while a driver writes it or after.

    Args:
        url, job, environ: as for `open_journal`.

    Raises:
        UserError: there is none, or it is none.
        JournalError: it cannot be reached.
    """
    place = place_for(url, job, os.environ if environ is None else environ)
    with told(place):
        reader = JournalReader(place, place.connect(), job)
    try:
        with told(place):
            check_schema(place, reader.starts())
    except BaseException:
        reader.close()
        raise
    return reader


@contextmanager
def told(place: Place) -> Iterator[None]:
    """Within it, what SQLAlchemy and the system complain of becomes errors of ours.

    Raises:
        UserError: what is there is no journal.
        JournalError: it cannot be reached, read or written.
    """
    try:
        yield
    except JournalError:
        raise
    except (sa.exc.SQLAlchemyError, OSError) as error:
        cause = getattr(error, "orig", None) or error
        if any(words in str(cause) for words in _NO_JOURNAL):
            raise UserError("is no journal", cure="give another path", field="run.journal", value=str(place)) from error
        raise JournalError(f"the journal {place} does not answer as it should: {cause}") from error


def check_schema(place: Place, starts: list[DriverStart]) -> None:
    """See that a journal was written by a version that we understand.

    Raises:
        UserError: it was not.
    """
    if starts and starts[-1].schema != SCHEMA:
        raise UserError(
            f"the journal has the form {starts[-1].schema}, and this version of Phalanx knows {SCHEMA}",
            cure="use the version that wrote it, or another journal",
            field="run.journal",
            value=str(place),
        )
