"""Writing and reading a journal: one driver at a time, each entry once, and never after a later driver has begun.

Two things keep two drivers of one job apart. A lock that only one holds, and that ends with its holder; and, where a
lock does not hold (a network file system without locks, a session that a database has given up), the epoch: every
driver that opens a journal takes the next number, and an append of an older one is refused within the transaction.
"""

from __future__ import annotations

import errno
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import sqlalchemy as sa

from phalanx.core.errors import UserError
from phalanx.run.journal import journal_tables
from phalanx.run.journal.journal_tables import (
    SCHEMA,
    Draft,
    DriverStart,
    Entry,
    JournalError,
    JournalFullError,
    JournalLostError,
    JournalPlace,
    JournalTakenError,
    Kind,
    place_for,
)

_NO_JOURNAL = ("not a database", "malformed", "no such table", "does not exist")


class JournalReader:
    """The entries of one job, while a driver may write them; for use as a context, or with `close`."""

    def __init__(self, place: JournalPlace, connection: sa.Connection, job: str) -> None:
        self._place, self._connection, self._job = place, connection, job

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        """Entries in order; what is appended meanwhile comes too, or with the next call.

        Raises:
            JournalError: it cannot be read.
        """
        with _translated(self._place):
            yield from journal_tables.each(self._connection, self._job, from_sequence)

    def starts(self) -> list[DriverStart]:
        """The drivers that have written it.

        Raises:
            JournalError: it cannot be read.
        """
        with _translated(self._place), self._connection.begin():
            return journal_tables.starts(self._connection, self._job)

    def close(self) -> None:
        """Let go of it."""
        with suppress(sa.exc.DBAPIError):
            self._connection.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def read_journal(url: str, *, job: str = "job", environ: Mapping[str, str] | None = None) -> JournalReader:
    """Open a journal to read it, while a driver writes it or after; arguments as for `open_journal`.

    Raises:
        UserError: there is no journal. JournalError: it cannot be reached.
    """
    place = place_for(url, job, os.environ if environ is None else environ)
    with _translated(place):
        reader = JournalReader(place, place.connect(), job)
    try:
        with _translated(place):
            _check_schema(place, reader.starts())
    except BaseException:
        reader.close()
        raise
    return reader


@contextmanager
def _translated(place: JournalPlace) -> Iterator[None]:
    """Within it, errors of SQLAlchemy and the system become a UserError (not a journal) or a JournalError."""
    try:
        yield
    except JournalError:
        raise
    except (sa.exc.SQLAlchemyError, OSError) as error:
        cause = getattr(error, "orig", None) or error
        if any(words in str(cause) for words in _NO_JOURNAL):
            raise UserError("is no journal", cure="give another path", field="run.journal", value=str(place)) from error
        kind = JournalFullError if _is_full(cause) else JournalError
        raise kind(f"the journal {place} does not answer as it should: {cause}") from error


def _is_full(cause: BaseException) -> bool:
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return (
        getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", None) == "53100"
    )


def _check_schema(place: JournalPlace, starts: list[DriverStart]) -> None:
    if starts and starts[-1].schema != SCHEMA:
        raise UserError(
            f"the journal has the form {starts[-1].schema}, and this version of Phalanx knows {SCHEMA}",
            cure="use the version that wrote it, or another journal",
            field="run.journal",
            value=str(place),
        )


_RETRY_S = 0.05


class Journal:
    """What the driver writes; for use as a context, or with `close`. Its methods may be called from any thread.

    Appending waits for the disk, or for the database: some milliseconds, or up to `retry_s` if the connection breaks.
    `epoch`: number of this driver among those of the job, from 1.
    """

    def __init__(self, place: JournalPlace, connection: sa.Connection, job: str, epoch: int, retry_s: float) -> None:
        self._place, self._job, self._retry_s = place, job, retry_s
        self._connection: sa.Connection | None = connection
        self._is_closed = False
        self._turn = threading.Lock()
        self.epoch = epoch
        with connection.begin():
            self._last = journal_tables.last_sequence(connection, job)
        self._is_last_known = True

    @property
    def last_sequence(self) -> int:
        """Of the newest entry; 0: there is none."""
        return self._last

    def append(self, kind: Kind, attempt: int, json_text: str, unix_s: float) -> int:
        """`append_all` of one entry."""
        return self.append_all([Draft(kind, attempt, json_text, unix_s)])

    def append_all(self, drafts: Sequence[Draft]) -> int:
        """Append all or none, at the price of one; they are there for good when this returns the last one's sequence.

        Raises:
            ValueError: one of them is not an entry.
            JournalError: it cannot be written, as on a full disk; nothing was appended as far as is known, and the same
                drafts may be tried again: they are there once then.
            JournalLostError: another driver has taken over.
        """
        for draft in drafts:
            draft.check()
        with self._turn:
            if self._is_closed:
                raise JournalError(f"{self._place} is closed")
            if drafts:
                self._last = self._store(drafts)
            return self._last

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        """Entries in order, of this driver and of those before it.

        Raises:
            JournalError: it cannot be read.
        """
        with _translated(self._place):
            connection = self._place.connect()
        try:
            with _translated(self._place):
                yield from journal_tables.each(connection, self._job, from_sequence)
        finally:
            with suppress(sa.exc.DBAPIError):
                connection.close()

    def close(self) -> None:
        """Let go of the journal and of its lock; a second time does nothing."""
        with self._turn:
            self._is_closed = True
            self._drop()
            self._place.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _store(self, drafts: Sequence[Draft]) -> int:
        until_s = time.monotonic() + self._retry_s
        while True:
            try:
                with _translated(self._place):
                    last = self._try_to_store(drafts)
            except JournalError:
                self._is_last_known = False
                if not self._place.reconnects:
                    raise
                self._drop()
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_RETRY_S)
            else:
                self._is_last_known = True
                return last

    def _try_to_store(self, drafts: Sequence[Draft]) -> int:
        # The connection holds the lock; a new one, with the lock, if it has broken.
        if self._connection is None:
            self._connection = self._place.acquire()
        if (connection := self._connection) is None:
            raise JournalError("the lock is still held, by the broken connection or by another driver")
        with connection.begin():
            if journal_tables.newest_epoch(connection, self._job) != self.epoch:
                raise JournalLostError(f"another driver writes {self._place}: this one ({self.epoch}) has to end")
            entries = _numbered(drafts, self._last + 1, self.epoch)
            if not self._is_last_known:
                # After a connection has broken it is not known whether the commit had been done. If so the same is not
                # appended again, and anything else comes after it.
                there = journal_tables.chunk(connection, self._job, self._last + 1, len(drafts) + 1)
                if there == entries:
                    return entries[-1].sequence
                if there:
                    entries = _numbered(drafts, journal_tables.last_sequence(connection, self._job) + 1, self.epoch)
            journal_tables.add_entries(connection, self._job, entries)
        return entries[-1].sequence

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(sa.exc.DBAPIError):
                self._connection.invalidate()
                self._connection.close()
            self._connection = None


def _numbered(drafts: Sequence[Draft], first: int, epoch: int) -> list[Entry]:
    return [
        Entry(draft.kind, draft.attempt, draft.json_text, draft.unix_s, first + index, epoch)
        for index, draft in enumerate(drafts)
    ]


def open_journal(
    url: str,
    *,
    job: str = "job",
    wait_s: float = 0.0,
    retry_s: float = 5.0,
    environ: Mapping[str, str] | None = None,
) -> Journal:
    """Open a journal to write it, as the next driver of the job; it is made if there is none.

    Args:
        url: a path or ``sqlite:////FOLDER/journal.db``, or ``postgresql://USER@HOST/DATABASE``.
        job: its name; several jobs may share a database.
        wait_s: how long to wait for another driver to end.
        retry_s: how long `append` tries to get a broken connection to a database back.
        environ: for ``PGPASSWORD``; None: this process's.

    Raises:
        UserError: the URL is wrong, what is there is not a journal, or it is of another version.
        JournalTakenError: another driver writes it.
        JournalError: it cannot be reached or written.
    """
    place = place_for(url, job, os.environ if environ is None else environ)
    connection = None
    try:
        with _translated(place):
            connection = _acquire(place, job, wait_s)
            place.create(connection)
            with connection.begin():
                earlier = journal_tables.starts(connection, job)
                _check_schema(place, earlier)
                epoch = earlier[-1].epoch + 1 if earlier else 1
                start = DriverStart(epoch, time.time(), socket.gethostname(), os.getpid(), SCHEMA)
                journal_tables.add_start(connection, job, start)
            return Journal(place, connection, job, epoch, retry_s)
    except BaseException:
        if connection is not None:
            with suppress(sa.exc.DBAPIError):
                connection.close()
        place.release()
        raise


def _acquire(place: JournalPlace, job: str, wait_s: float) -> sa.Connection:
    until_s = time.monotonic() + wait_s
    while (connection := place.acquire()) is None:
        if time.monotonic() < until_s:
            time.sleep(_RETRY_S)
            continue
        holder = ""
        with suppress(sa.exc.DBAPIError, UserError, IndexError):  # it has only just begun
            reading = place.connect()
            with reading, reading.begin():
                start = journal_tables.starts(reading, job)[-1]
            holder = f" (process {start.pid} on {start.host})"
        raise JournalTakenError(
            f"another driver of the job {job!r} writes this journal{holder}",
            cure="attach to it or stop it, or give this job another name or folder",
            field="run.journal",
            value=str(place),
        )
    return connection
