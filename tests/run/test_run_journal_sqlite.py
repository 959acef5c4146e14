"""The journal in a file: order, one writer, epochs, readers beside it, and killed writers."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from run_journal_writers import text_of

from phalanx.core.errors import UserError
from phalanx.run.journal import (
    Draft,
    JournalError,
    JournalFullError,
    JournalLostError,
    JournalTakenError,
    journal_tables,
    open_journal,
    read_journal,
)
from phalanx.run.journal.journal_tables import SqliteFile, is_network_file_system

HERE = Path(__file__).parent


def test_what_is_appended_is_read_in_order_by_this_and_later_drivers(tmp_path: Path) -> None:
    url = str(tmp_path / "new folder" / "journal.db")
    with open_journal(url) as journal:
        assert (journal.epoch, journal.last_sequence) == (1, 0)
        assert journal.append("event", 0, '{"a": 1}', 5.5) == 1
        assert journal.append_all([Draft("action", 1, "[]", 6.0), Draft("note", 1, '"ü€🙂"', 7.0)]) == 3
        assert journal.append_all([]) == 3
    with open_journal(f"sqlite:///{url}") as journal:
        assert (journal.epoch, journal.last_sequence) == (2, 3)
        assert journal.append("event", 2, "null", 8.0) == 4
        entries = list(journal.read())
    assert [entry.sequence for entry in entries] == [1, 2, 3, 4]
    assert [entry.epoch for entry in entries] == [1, 1, 1, 2]
    assert [entry.kind for entry in entries] == ["event", "action", "note", "event"]
    assert [entry.attempt for entry in entries] == [0, 1, 1, 2]
    assert [entry.json_text for entry in entries] == ['{"a": 1}', "[]", '"ü€🙂"', "null"]
    assert [entry.unix_s for entry in entries] == [5.5, 6.0, 7.0, 8.0]
    with read_journal(url) as reader:
        assert list(reader.read(3)) == entries[2:]
        assert [(start.epoch, start.pid) for start in reader.starts()] == [(1, os.getpid()), (2, os.getpid())]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**40), st.text()), max_size=4), max_size=4))
def test_any_text_comes_back(batches: list[list[tuple[int, str]]]) -> None:
    with tempfile.TemporaryDirectory() as folder, open_journal(f"{folder}/journal.db") as journal:
        written = [Draft("note", attempt, json.dumps(text), 0.5) for batch in batches for attempt, text in batch]
        for batch in batches:
            journal.append_all([Draft("note", attempt, json.dumps(text), 0.5) for attempt, text in batch])
        read = [Draft(entry.kind, entry.attempt, entry.json_text, entry.unix_s) for entry in journal.read()]
        assert read == written


@pytest.mark.parametrize(
    "draft",
    [Draft("event", 1, "{", 0.0), Draft("event", -1, "1", 0.0), Draft("other", 1, "1", 0.0)],  # type: ignore[arg-type]
)
def test_what_is_no_entry_is_refused_and_nothing_of_its_batch_stays(tmp_path: Path, draft: Draft) -> None:
    with open_journal(str(tmp_path / "journal.db")) as journal:
        with pytest.raises(ValueError):
            journal.append_all([Draft("event", 1, "1", 0.0), draft])
        assert list(journal.read()) == []


def test_a_reader_goes_on_where_it_was_over_many_chunks_while_it_is_written(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.db")
    with open_journal(url) as journal, read_journal(url) as reader:
        journal.append_all([Draft("event", 1, str(i), 0.0) for i in range(1, 2501)])
        found = reader.read()
        first = [next(found) for _ in range(10)]
        journal.append("event", 1, "2501", 0.0)  # does not wait for the reader that stands in the middle
        assert [int(entry.json_text) for entry in [*first, *found]] == list(range(1, 2502))
        journal.append("event", 1, "2502", 0.0)
        assert [entry.sequence for entry in reader.read(2502)] == [2502]


def test_threads_may_append(tmp_path: Path) -> None:
    with open_journal(str(tmp_path / "journal.db")) as journal:

        def work(number: int) -> None:
            for _ in range(20):
                journal.append("event", number, "1", 0.0)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [entry.sequence for entry in journal.read()] == list(range(1, 81))


def test_a_second_driver_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.db")
    with open_journal(url) as journal:
        with pytest.raises(JournalTakenError, match=rf"process {os.getpid()} on .*; attach to it"):
            open_journal(url)
        journal.append("event", 1, "1", 0.0)
        assert len(read_journal(url).starts()) == 1
    open_journal(url).close()


def test_a_driver_waits_for_the_one_before_it(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.db")
    first = open_journal(url)
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(open_journal(url, wait_s=60).epoch))
    thread.start()
    first.append("event", 1, "1", 0.0)
    first.close()
    thread.join(60)
    assert opened == [2]


def test_a_lock_that_does_not_hold_is_made_up_for_by_the_epoch(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.db")
    first = open_journal(url)
    first.append("event", 1, "1", 0.0)
    (tmp_path / "journal.db.lock").unlink()  # as where a file system has no locks
    second = open_journal(url)
    with pytest.raises(JournalLostError, match="another driver"):
        first.append("event", 1, "2", 0.0)
    second.append("event", 2, "3", 0.0)
    assert [(entry.epoch, entry.json_text) for entry in second.read()] == [(1, "1"), (2, "3")]
    first.close()
    second.close()


def test_jobs_that_share_a_file_do_not_see_each_other(tmp_path: Path) -> None:
    url = str(tmp_path / "journal.db")
    with open_journal(url, job="a") as journal:
        journal.append("event", 1, '"of a"', 0.0)
    with open_journal(url, job="b") as journal:
        assert (journal.epoch, journal.append("event", 1, '"of b"', 0.0)) == (1, 1)
        assert [entry.json_text for entry in journal.read()] == ['"of b"']


def test_a_full_file_refuses_and_goes_on_later(tmp_path: Path) -> None:
    with open_journal(str(tmp_path / "journal.db")) as journal:
        journal.append("event", 1, "1", 0.0)
        connection = journal._connection
        assert connection is not None
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        connection.rollback()
        with pytest.raises(JournalFullError, match="full"):
            journal.append("event", 1, json.dumps("x" * 100_000), 0.0)
        connection.exec_driver_sql("PRAGMA max_page_count=1000000")
        connection.rollback()
        assert journal.append("event", 1, "2", 0.0) == 2
        assert [entry.json_text for entry in journal.read()] == ["1", "2"]


def test_that_the_system_has_no_room_is_told_from_other_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_journal(str(tmp_path / "journal.db")) as journal:
        for number, kind in (
            (errno.ENOSPC, JournalFullError),
            (errno.EDQUOT, JournalFullError),
            (errno.EIO, JournalError),
        ):

            def fails(*given: object, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(journal_tables, "add_entries", fails)
            with pytest.raises(JournalError) as caught:
                journal.append("event", 1, "1", 0.0)
            assert type(caught.value) is kind
        monkeypatch.undo()
        assert journal.append("event", 1, "2", 0.0) == 1


def test_what_is_closed_is_not_written(tmp_path: Path) -> None:
    journal = open_journal(str(tmp_path / "journal.db"))
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append("event", 1, "1", 0.0)


@pytest.mark.parametrize("opener", [open_journal, read_journal])
def test_other_files_are_no_journals(tmp_path: Path, opener) -> None:
    other = tmp_path / "other.db"
    other.write_text("hello" * 1000)
    with pytest.raises(UserError, match=r"other.db.*no journal"):
        opener(str(other))
    assert other.read_text() == "hello" * 1000


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such journal"):
        read_journal(str(tmp_path / "journal.db"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_whenever_a_reader_comes_there_is_no_journal_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    path, outcomes = tmp_path / "journal.db", []

    def read(connection: sa.Connection, *statement: object) -> None:
        if connection.engine in readers:
            return
        is_there = path.exists()
        try:
            with read_journal(str(path)) as reader:
                outcomes.append(len(reader.starts()))
        except UserError as error:
            outcomes.append("" if not is_there else error.problem)

    readers: set[sa.Engine] = set()
    connect = SqliteFile.connect

    def noted(place: SqliteFile) -> sa.Connection:
        connection = connect(place)
        readers.add(connection.engine)
        return connection

    def refuse(*paths: Path) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(SqliteFile, "connect", noted)
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    sa.event.listen(sa.Engine, "before_cursor_execute", read)
    try:
        open_journal(str(path)).close()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", read)
    assert outcomes[0] == "" and outcomes[-1] == 1
    if has_links:
        assert set(outcomes) == {"", 0, 1}
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "journal.db.lock"]
    with open_journal(str(path)) as journal:
        assert journal.epoch == 2


def test_a_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    open_journal(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE phalanx_driver_starts SET schema = 99")
    connection.close()
    for opener in (open_journal, read_journal):
        with pytest.raises(UserError, match=r"form 99.*knows 1; use the version that wrote it"):
            opener(str(path))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://me:hidden@host/x", "not kept in mysql"),
        ("sqlite://", "not kept in sqlite"),
        ("postgresql://me:hidden@host/x?sslmode=prefer", "sslmode"),
        ("postgresql://me:hidden@host/x?sslrootcert=/no/such", "cannot be read"),
        ("postgresql://me:hidden@[::1:x/y", "no URL"),
    ],
)
def test_urls_that_are_none_are_refused_without_their_password(url: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        open_journal(url)
    assert "hidden" not in str(caught.value)


def test_a_database_that_is_away_is_said_without_the_password() -> None:
    with pytest.raises(JournalError) as caught:
        open_journal("postgresql://me:hidden@127.0.0.1:1/x")
    assert "hidden" not in f"{caught.value}{caught.value!r}{caught.value.__cause__}"


def test_it_is_synchronous_and_ahead_of_the_file(tmp_path: Path) -> None:
    with open_journal(str(tmp_path / "journal.db")) as journal:
        connection = journal._connection
        assert isinstance(connection, sa.Connection)
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


MOUNTS = """\
22 28 0:21 / /proc rw - proc proc rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 28 0:40 / /home rw - nfs4 server:/home rw
41 40 254:1 / /home/my\\040disk rw shared:7 master:1 - xfs /dev/vdb rw
42 28 0:42 / /work rw - fuse.sshfs host:/ rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "is_network"),
    [("/tmp/x", False), ("/home/me/x", True), ("/home/my disk/x", False), ("/work/x", True), ("/workshop/x", False)],
)
def test_network_file_systems_are_known(path: str, is_network: bool) -> None:
    assert is_network_file_system(Path(path), MOUNTS) is is_network


@pytest.mark.slow
def test_killed_writers_lose_nothing_that_they_were_told_is_there(tmp_path: Path) -> None:
    seeds = [str(seed) for seed in range(40)]
    ended = subprocess.run(
        [sys.executable, str(HERE / "run_journal_writers.py"), str(tmp_path), *seeds],
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    lengths = set()
    for seed, (first, second) in json.loads(ended.stdout).items():
        with open_journal(str(tmp_path / f"{seed}.db")) as journal:
            entries = list(journal.read())
            assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
            assert [entry.json_text for entry in entries] == [text_of(entry.sequence) for entry in entries]
            assert len(entries) >= max(first, second)
            assert second >= first
            lengths.add(len(entries))
            assert journal.append("event", 9, "1", 0.0) == len(entries) + 1
    assert len(lengths) > 3  # they were killed at different moments
