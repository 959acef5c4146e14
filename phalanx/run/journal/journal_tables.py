"""What a journal holds, the tables of it, and where it is kept: a SQLite file, or a PostgreSQL database.

SQLite is written with ``synchronous=FULL``: what `append` has returned for is on the disk, also after a power cut. It
costs one fsync per batch, and there are few batches; without it a host that loses power could forget the number of
the newest attempt and give it away twice. The file is in WAL mode, so readers never wait for the writer nor it for
them. On a network file system, where WAL does not work, it has a rollback journal instead.

The lock of a file is an flock, that of a database an advisory lock of the session: both end with their holder, however
that ends. (A child that is forked without exec shares an flock; a driver starts none.)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.core.files import fsync_folder

Kind = Literal["event", "action", "note"]

SCHEMA = 1
"""Of the tables; a journal with another one is not opened."""


class JournalTakenError(UserError):
    """Another driver writes this journal."""


class JournalError(OSError):
    """The journal cannot be read or written just now."""


class JournalFullError(JournalError):
    """There is no room for what is to be written: the disk is full, or a quota used up. That may pass."""


class JournalLostError(RuntimeError):
    """A later driver has taken the job over: this one must not command anything any more."""


@dataclass(frozen=True)
class Draft:
    """What is to be appended."""

    kind: Kind  # ``event``: what has happened; ``action``: what was decided; ``note``: what else the driver has to know
    attempt: int  # 0: none yet
    json_text: str  # one JSON value
    unix_s: float  # when it happened, for people; order is that of the sequence

    def check(self) -> None:
        """Raise ValueError where it cannot be stored."""
        if self.kind not in get_args(Kind) or self.attempt < 0:
            raise ValueError(f"kind = {self.kind!r}, attempt = {self.attempt}: a kind is one of {get_args(Kind)}")
        try:
            msgspec.json.decode(self.json_text.encode())
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise ValueError(f"an entry of a journal is JSON text: {error}") from None


@dataclass(frozen=True)
class Entry(Draft):
    """What was appended by the driver of this epoch; `sequence`: in the journal of the job, from 1, without gaps."""

    sequence: int = 0
    epoch: int = 0


@dataclass(frozen=True)
class DriverStart:
    """A driver began to write; `epoch`: number of the start, from 1; `schema`: of the tables, as it knew them."""

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
    """Of the driver that was started last; 0: none. Within a transaction, as all of these."""
    return connection.scalar(_EPOCH, {"job_name": job}) or 0


def last_sequence(connection: sa.Connection, job: str) -> int:
    """Of the newest entry; 0: none."""
    return connection.scalar(_LAST, {"job_name": job}) or 0


def starts(connection: sa.Connection, job: str) -> list[DriverStart]:
    """All drivers that have written, in order."""
    return [DriverStart(*row) for row in connection.execute(_STARTS, {"job_name": job})]


def add_start(connection: sa.Connection, job: str, start: DriverStart) -> None:
    """Append a driver."""
    connection.execute(sa.insert(STARTS), {"job": job, **vars(start)})


def add_entries(connection: sa.Connection, job: str, entries: Sequence[Entry]) -> None:
    """Append entries."""
    connection.execute(_ADD, [{"job": job, **vars(entry)} for entry in entries])


def chunk(connection: sa.Connection, job: str, first: int, most: int = _CHUNK) -> list[Entry]:
    """Up to `most` entries from the sequence `first` on."""
    return [Entry(*row) for row in connection.execute(_ENTRIES, {"job_name": job, "first": first, "most": most})]


def each(connection: sa.Connection, job: str, first: int) -> Iterator[Entry]:
    """Every entry from `first` on, in short transactions of its own, so that nothing waits for a slow reader."""
    while True:
        with connection.begin():
            entries = chunk(connection, job, first)
        yield from entries
        if len(entries) < _CHUNK:
            return
        first = entries[-1].sequence + 1


_FIELD = "run.journal"
_BUSY_S = 30.0
_NETWORK_S = 10.0
_CREATING = 0x70_68_61_6C_61_6E_78  # "phalanx": only one connection at a time makes the tables of a database
_NETWORK_FILE_SYSTEMS = re.compile(r"nfs\d?|cifs|smb\d?|smbfs|lustre|gpfs|beegfs|ceph|glusterfs|afs|9p|fuse\..*")


class JournalPlace(Protocol):
    """A kind of place for a journal; as a string it is for people, without a password."""

    reconnects: bool
    """Whether a connection may break and come again, with everything still there."""

    def acquire(self) -> sa.Connection | None:
        """Take the writer's lock and connect; None: another has it."""

    def connect(self) -> sa.Connection:
        """A connection that only reads."""

    def create(self, connection: sa.Connection) -> None:
        """Make the tables if there are none, in a transaction of its own."""

    def release(self) -> None:
        """Let go of the lock."""


def place_for(url: str, job: str, environ: Mapping[str, str]) -> JournalPlace:
    """The place that `url` names: ``sqlite:///FOLDER/journal.db``, a plain path, or ``postgresql://USER@HOST/DATABASE``.

    Args:
        job: its name; several jobs may share a database.
        environ: ``PGPASSWORD`` is the password where the URL holds none.

    Raises:
        UserError: it is not such a URL, or the driver of PostgreSQL is not installed.
    """
    if "://" not in url:
        return SqliteFile(Path(url))
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise UserError("is no URL", cure=_CURE, field=_FIELD) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return SqliteFile(Path(parsed.database))
    if backend in ("postgresql", "postgres"):
        return PostgresDatabase(parsed, job, environ)
    raise UserError(f"journals are not kept in {backend}", cure=_CURE, field=_FIELD, value=parsed.render_as_string())


_CURE = "give a path, sqlite:////FOLDER/journal.db, or postgresql://USER@HOST/DATABASE"


class SqliteFile:
    """A file on this host."""

    reconnects = False

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._lock = -1

    def __str__(self) -> str:
        return str(self._path)

    def acquire(self) -> sa.Connection | None:
        """Lock ``<file>.lock``, and only then touch the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        name = self._path.with_name(f"{self._path.name}.lock")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        self._lock = lock
        if not self._path.exists():
            self._make()
        return self._connection(to_write=True)

    def connect(self) -> sa.Connection:
        """A connection that only reads; the file has to be there."""
        if not self._path.exists():
            raise UserError("there is no such journal", cure="check the path", field=_FIELD, value=str(self._path))
        return self._connection(to_write=False)

    def create(self, connection: sa.Connection) -> None:
        """Make the tables."""
        with connection.begin():
            METADATA.create_all(connection)

    def release(self) -> None:
        """Unlock; the lock file stays, or two could lock two of them."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make(self) -> None:
        """Make the file, and give it its name when it has its tables: a reader may come at any time."""
        with tempfile.TemporaryDirectory(prefix=f".{self._path.name}.", dir=self._path.parent) as folder:
            aside = SqliteFile(Path(folder, self._path.name))
            with aside._connection(to_write=True) as connection:
                self.create(connection)
            # Never over another's. Where a file system has no such links, the file is made where it is to be.
            with suppress(OSError):
                os.link(aside._path, self._path)
                fsync_folder(self._path.parent)

    def _connection(self, *, to_write: bool) -> sa.Connection:
        engine = sa.create_engine(
            "sqlite://", creator=lambda: self._open(to_write), poolclass=NullPool, hide_parameters=True
        )
        begin = "BEGIN IMMEDIATE" if to_write else "BEGIN"
        # Python's sqlite3 begins transactions too late to lock anything, says SQLAlchemy's page on SQLite.
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine.connect()

    def _open(self, to_write: bool) -> sqlite3.Connection:
        mode = "rwc" if to_write else "rw"  # a reader of a WAL has to write to the index that is beside it
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?mode={mode}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        if to_write:
            is_local = not is_network_file_system(self._path, _mounts())
            connection.execute(f"PRAGMA journal_mode={'WAL' if is_local else 'TRUNCATE'}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA journal_size_limit=16777216")
        else:
            connection.execute("PRAGMA query_only=ON")
        return connection


class PostgresDatabase:
    """Tables of a database; with TLS unless the server is on this host, or the URL says ``sslmode=disable``."""

    reconnects = True

    def __init__(self, url: sa.URL, job: str, environ: Mapping[str, str]) -> None:
        password = url.password or environ.get("PGPASSWORD")
        options: dict[str, Any] = {"timeout": _NETWORK_S, "application_name": f"phalanx run {job}"[:63]}
        options |= _tls_options(url)
        self._url = url.set(drivername="postgresql+pg8000", password=password, query={})
        if "unix_sock" in url.query:
            options["unix_sock"] = url.query["unix_sock"]
        try:
            self._engine = sa.create_engine(self._url, connect_args=options, poolclass=NullPool, hide_parameters=True)
        except ImportError:
            raise UserError(
                "PostgreSQL needs pg8000", cure="pip install phalanx-train[postgres]", field=_FIELD, value=str(self)
            ) from None
        self._key = int.from_bytes(hashlib.sha256(f"phalanx run {job}".encode()).digest()[:8], signed=True)

    def __str__(self) -> str:
        return self._url.render_as_string(hide_password=True)

    def acquire(self) -> sa.Connection | None:
        """Take an advisory lock, which belongs to the session of the connection."""
        connection = self._engine.connect()
        try:
            # The server shall notice within 20 s that a writer's host is dead, and free its lock.
            for name, value in (("idle", 10), ("interval", 5), ("count", 2)):
                connection.exec_driver_sql(f"SET tcp_keepalives_{name} = {value}")
            is_ours = connection.scalar(sa.select(sa.func.pg_try_advisory_lock(self._key)))
            connection.commit()
        except BaseException:
            connection.close()
            raise
        if not is_ours:
            connection.close()
        return connection if is_ours else None

    def connect(self) -> sa.Connection:
        """A connection that only reads."""
        connection = self._engine.connect()
        connection.exec_driver_sql("SET default_transaction_read_only = on")
        connection.commit()
        return connection

    def create(self, connection: sa.Connection) -> None:
        """Make the tables; another job may be about it too."""
        with connection.begin():
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
            METADATA.create_all(connection)

    def release(self) -> None:
        """Nothing: the lock goes with the connection."""


def is_network_file_system(path: Path, mounts: str) -> bool:
    """Whether the file system that `path` is on is shared with other hosts.

    Args:
        mounts: as in /proc/self/mountinfo.
    """
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, place = before.split(), ""
        if len(fields) > 4 and after:
            place = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), fields[4])
        if place and path.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, after.split()[0]
    return bool(_NETWORK_FILE_SYSTEMS.fullmatch(kind))


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:  # another system than Linux
        return ""


def _tls_options(url: sa.URL) -> dict[str, Any]:
    """``ssl_context`` for pg8000, from ``sslmode`` and ``sslrootcert`` as libpq names them."""
    mode, authority = url.query.get("sslmode", ""), url.query.get("sslrootcert")
    unknown = set(url.query) - {"sslmode", "sslrootcert", "unix_sock"}
    if unknown or mode not in ("", "disable", "verify-full"):
        raise UserError(
            "of a URL's parameters only sslmode (disable, verify-full), sslrootcert and unix_sock are known",
            cure="remove the others",
            field=_FIELD,
            value=", ".join(sorted(unknown)) or f"sslmode={mode}",
        )
    is_here = "unix_sock" in url.query or is_loopback(url.host or "localhost")
    if mode == "disable" or (is_here and not mode):
        return {}
    try:
        return {"ssl_context": ssl.create_default_context(cafile=str(authority) if authority else None)}
    except OSError as error:  # SSLError is one
        raise UserError(
            f"the certificate cannot be read ({error.strerror or error})",
            cure="give sslrootcert the path of a PEM file",
            field=_FIELD,
            value=str(authority),
        ) from None
