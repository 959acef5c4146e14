"""Statements on the tables of a journal; each is called within a transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from phalanx.run.journal.entries import ENTRIES, STARTS, DriverStart, Entry

_CHUNK = 1000

_ADD = sa.insert(ENTRIES)
_ENTRIES = (
    sa.select(
        ENTRIES.c.kind,
        ENTRIES.c.attempt,
        ENTRIES.c.json_text,
        ENTRIES.c.unix_s,
        ENTRIES.c.sequence,
        ENTRIES.c.epoch,
    )
    .where(ENTRIES.c.job == sa.bindparam("job_name"), ENTRIES.c.sequence >= sa.bindparam("first"))
    .order_by(ENTRIES.c.sequence)
    .limit(sa.bindparam("most"))
)
_STARTS = (
    sa.select(STARTS.c.epoch, STARTS.c.unix_s, STARTS.c.host, STARTS.c.pid, STARTS.c.schema)
    .where(STARTS.c.job == sa.bindparam("job_name"))
    .order_by(STARTS.c.epoch)
)
_EPOCH = sa.select(sa.func.max(STARTS.c.epoch)).where(STARTS.c.job == sa.bindparam("job_name"))
_LAST = sa.select(sa.func.max(ENTRIES.c.sequence)).where(ENTRIES.c.job == sa.bindparam("job_name"))


def newest_epoch(connection: sa.Connection, job: str) -> int:
    """Of the driver that was started last; 0: none."""
    return connection.scalar(_EPOCH, {"job_name": job}) or 0


def last_sequence(connection: sa.Connection, job: str) -> int:
    """Of the newest entry; 0: none."""
    return connection.scalar(_LAST, {"job_name": job}) or 0


def starts(connection: sa.Connection, job: str) -> list[DriverStart]:
    """All drivers that have written, in order."""
    return [DriverStart(*row) for row in connection.execute(_STARTS, {"job_name": job})]


def add_start(connection: sa.Connection, job: str, start: DriverStart) -> None:
    """Append a driver."""
    values = {"epoch": start.epoch, "unix_s": start.unix_s, "host": start.host, "pid": start.pid}
    connection.execute(sa.insert(STARTS), {"job": job, "schema": start.schema, **values})


def add_entries(connection: sa.Connection, job: str, entries: Sequence[Entry]) -> None:
    """Append entries."""
    connection.execute(
        _ADD,
        [
            {
                "job": job,
                "sequence": entry.sequence,
                "epoch": entry.epoch,
                "unix_s": entry.unix_s,
                "kind": entry.kind,
                "attempt": entry.attempt,
                "json_text": entry.json_text,
            }
            for entry in entries
        ],
    )


def chunk(connection: sa.Connection, job: str, first: int, most: int = _CHUNK) -> list[Entry]:
    """Up to `most` entries from the sequence `first` on."""
    return [Entry(*row) for row in connection.execute(_ENTRIES, {"job_name": job, "first": first, "most": most})]


def each(connection: sa.Connection, job: str, first: int) -> Iterator[Entry]:
    """Every entry from `first` on, in short transactions, so that nothing waits for a slow reader."""
    while True:
        with connection.begin():
            entries = chunk(connection, job, first)
        yield from entries
        if len(entries) < _CHUNK:
            return
        first = entries[-1].sequence + 1
