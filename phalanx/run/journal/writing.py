"""Writing and reading the journal: one driver at a time, each entry once, and never after a later driver has begun.

Reading a journal that another process may be writing.

Writing a journal: one driver at a time, each entry once, and never after a later driver has begun.

Two things keep two drivers of one job apart. A lock that only one holds, and that ends with its holder; and, where a
lock does not hold (a network file system without locks, a session that a database has given up), the epoch: every
driver that opens a journal takes the next number, and an append of an older one is refused within the transaction.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import sqlalchemy as sa

from phalanx.core.errors import UserError
from phalanx.run.journal import journal_tables
from phalanx.run.journal.journal_tables import (
    SCHEMA,
    Draft,
    DriverStart,
    Entry,
    JournalError,
    JournalLostError,
    JournalTakenError,
    Kind,
    Place,
    place_for,
)

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
            yield from journal_tables.each(self._connection, self._job, from_sequence)

    def starts(self) -> list[DriverStart]:
        """The drivers that have written it.

        Raises:
            JournalError: it cannot be read.
        """
        with told(self._place), self._connection.begin():
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


_RETRY_S = 0.05


@dataclass(frozen=True)
class Clock:
    """Seconds that count, seconds for people, and waiting; tests bring their own."""

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Journal:
    """What the driver writes; for use as a context, or with `close`. Its methods may be called from any thread.

    `append` waits for the disk, or for the database: some milliseconds, or up to `retry_s` if the connection breaks.

    Attributes:
        epoch: number of this driver among those of the job, from 1.
    """

    def __init__(
        self, place: Place, connection: sa.Connection, job: str, epoch: int, *, clock: Clock, retry_s: float
    ) -> None:
        self._place, self._job, self._clock, self._retry_s = place, job, clock, retry_s
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
        """Append one entry; it is there for good when this returns.

        Returns:
            Its sequence.

        Raises:
            ValueError, JournalError, JournalLostError: as `append_all`.
        """
        return self.append_all([Draft(kind, attempt, json_text, unix_s)])

    def append_all(self, drafts: Sequence[Draft]) -> int:
        """Append all or none, at the price of one; they are there for good when this returns.

        Returns:
            The sequence of the last.

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
        with told(self._place):
            connection = self._place.connect()
        try:
            with told(self._place):
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
        until_s = self._clock.monotonic_s() + self._retry_s
        while True:
            try:
                with told(self._place):
                    last = self._try_to_store(drafts)
            except JournalError:
                self._is_last_known = False
                if not self._place.reconnects:
                    raise
                self._drop()
                if self._clock.monotonic_s() >= until_s:
                    raise
                self._clock.sleep(_RETRY_S)
            else:
                self._is_last_known = True
                return last

    def _try_to_store(self, drafts: Sequence[Draft]) -> int:
        """One try; gives the sequence of the last entry."""
        connection = self._connected()
        with connection.begin():
            if journal_tables.newest_epoch(connection, self._job) != self.epoch:
                raise JournalLostError(f"another driver writes {self._place}: this one ({self.epoch}) has to end")
            entries = _numbered(drafts, self._last + 1, self.epoch)
            if not self._is_last_known:
                # Of a connection that broke it is not known whether the commit had been done. If so the same is not
                # appended again, and anything else comes after it.
                there = journal_tables.chunk(connection, self._job, self._last + 1, len(drafts) + 1)
                if there == entries:
                    return entries[-1].sequence
                if there:
                    entries = _numbered(drafts, journal_tables.last_sequence(connection, self._job) + 1, self.epoch)
            journal_tables.add_entries(connection, self._job, entries)
        return entries[-1].sequence

    def _connected(self) -> sa.Connection:
        """The connection that holds the lock; a new one, with the lock, if it has broken."""
        if self._connection is None:
            self._connection = self._place.acquire()
        if self._connection is None:
            raise JournalError("the lock is still held, by the broken connection or by another driver")
        return self._connection

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
    clock: Clock | None = None,
) -> Journal:
    """Open a journal to write it, as the next driver of the job; it is made if there is none.

    Args:
        url: a path or ``sqlite:////FOLDER/journal.db``, or ``postgresql://USER@HOST/DATABASE``.
        job: its name; several jobs may share a database.
        wait_s: how long to wait for another driver to end.
        retry_s: how long `append` tries to get a broken connection to a database back.
        environ: for ``PGPASSWORD``; None: this process's.

    Raises:
        UserError: the URL is none, what is there is no journal, or it is of another version.
        JournalTakenError: another driver writes it.
        JournalError: it cannot be reached or written.
    """
    clock = clock or Clock()
    place = place_for(url, job, os.environ if environ is None else environ)
    connection = None
    try:
        with told(place):
            connection = _acquire(place, job, wait_s, clock)
            epoch = _begin(place, connection, job, clock)
            return Journal(place, connection, job, epoch, clock=clock, retry_s=retry_s)
    except BaseException:
        if connection is not None:
            with suppress(sa.exc.DBAPIError):
                connection.close()
        place.release()
        raise


def _acquire(place: Place, job: str, wait_s: float, clock: Clock) -> sa.Connection:
    until_s = clock.monotonic_s() + wait_s
    while (connection := place.acquire()) is None:
        if clock.monotonic_s() >= until_s:
            raise JournalTakenError(
                f"another driver of the job {job!r} writes this journal{_holder(place, job)}",
                cure="attach to it or stop it, or give this job another name or folder",
                field="run.journal",
                value=str(place),
            )
        clock.sleep(_RETRY_S)
    return connection


def _holder(place: Place, job: str) -> str:
    try:
        connection = place.connect()
        with connection, connection.begin():
            start = journal_tables.starts(connection, job)[-1]
    except (sa.exc.DBAPIError, UserError, IndexError):  # it has only just begun
        return ""
    return f" (process {start.pid} on {start.host})"


def _begin(place: Place, connection: sa.Connection, job: str, clock: Clock) -> int:
    """Take the next epoch."""
    place.create(connection)
    with connection.begin():
        earlier = journal_tables.starts(connection, job)
        check_schema(place, earlier)
        epoch = earlier[-1].epoch + 1 if earlier else 1
        start = DriverStart(epoch, clock.unix_s(), socket.gethostname(), os.getpid(), SCHEMA)
        journal_tables.add_start(connection, job, start)
    return epoch
