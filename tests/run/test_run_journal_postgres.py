"""The journal in PostgreSQL, with a real server where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from phalanx.core.errors import UserError
from phalanx.run.journal import Draft, JournalError, JournalLostError, JournalTakenError, open_journal, read_journal

PROGRAMS = [shutil.which("initdb"), shutil.which("postgres")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in PROGRAMS, reason="initdb and postgres are not installed"),
]


class Server:
    """A PostgreSQL server with a folder and a port of its own; not as root, which it refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.user = folder, "nobody" if os.geteuid() == 0 else None
        if self.user:
            os.chown(folder, pwd.getpwnam(self.user).pw_uid, -1)
        self._run(PROGRAMS[0], "-D", str(folder / "data"), "-U", "phalanx", "-A", "trust", "--no-sync").wait()
        is_up = False
        while not is_up:  # somebody else may take the port in between
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]
            self.url = f"postgresql://phalanx@127.0.0.1:{self.port}/postgres"
            is_up = self.start()

    def start(self) -> bool:
        """Whether the server has come up; not if its port is taken."""
        self.process = self._run(
            *(PROGRAMS[1], "-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder), "-F"),
            *("-c", "listen_addresses=127.0.0.1"),
        )
        until_s = time.monotonic() + 60
        while True:
            try:
                sa.create_engine(self.url.replace("://", "+pg8000://")).connect().close()
                return self.process.poll() is None
            except sa.exc.DBAPIError:
                if self.process.poll() is not None:
                    return False
                assert time.monotonic() < until_s, "the server does not start"
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.send_signal(3)  # SIGQUIT: at once
        self.process.wait(60)

    def statement(self, text: str) -> None:
        engine = sa.create_engine(self.url.replace("://", "+pg8000://"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(text)
        engine.dispose()

    def _run(self, *command: str | None) -> subprocess.Popen:
        return subprocess.Popen(
            [str(word) for word in command],
            user=self.user,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="phalanx-postgres-"))
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def test_drivers_and_readers_share_a_database(server: Server) -> None:
    with open_journal(server.url, job="shared") as journal, read_journal(server.url, job="shared") as reader:
        assert journal.append_all([Draft("event", 1, str(i), 0.25) for i in range(1500)]) == 1500
        with pytest.raises(JournalTakenError, match=f"process {os.getpid()}"):
            open_journal(server.url, job="shared")
        assert [int(entry.json_text) for entry in reader.read()] == list(range(1500))
        journal.append("note", 2, '"ü€🙂"', 1e9)
        assert [entry.json_text for entry in reader.read(1501)] == ['"ü€🙂"']
    with open_journal(server.url, job="shared") as journal, open_journal(server.url, job="other") as other:
        assert (journal.epoch, journal.last_sequence) == (2, 1501)
        assert (other.epoch, other.last_sequence) == (1, 0)


def test_a_connection_that_breaks_comes_again_and_nothing_is_there_twice(server: Server) -> None:
    with open_journal(server.url, job="broken", retry_s=60) as journal:
        journal.append("event", 1, "1", 0.0)
        server.statement("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ 'broken'")
        assert journal.append("event", 1, "2", 0.0) == 2
        assert [entry.json_text for entry in journal.read()] == ["1", "2"]
        with pytest.raises(JournalTakenError):  # the lock came with the new connection
            open_journal(server.url, job="broken")


def test_an_append_waits_for_a_server_that_is_restarted(server: Server) -> None:
    with open_journal(server.url, job="restarted", retry_s=60) as journal:
        journal.append("event", 1, "1", 0.0)
        server.stop()
        thread = threading.Thread(target=server.start)
        thread.start()
        assert journal.append("event", 1, "2", 0.0) == 2
        thread.join()
        assert [entry.json_text for entry in journal.read()] == ["1", "2"]


def test_a_commit_whose_answer_was_lost_is_not_repeated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_journal(server.url, job="unanswered", retry_s=0.0) as journal:
        store = journal._try_to_store

        def lose_the_answer(drafts: Sequence[Draft]) -> int:
            store(drafts)
            raise JournalError("the connection broke")

        batch = [Draft("event", 1, "1", 0.1), Draft("action", 1, "2", 0.2)]
        for then in (batch, [Draft("event", 1, "3", 0.3), Draft("event", 1, "4", 0.4)]):
            monkeypatch.setattr(journal, "_try_to_store", lose_the_answer)
            with pytest.raises(JournalError, match="broke"):
                journal.append_all(batch)
            monkeypatch.setattr(journal, "_try_to_store", store)
            journal.append_all(then)
        assert [entry.json_text for entry in journal.read()] == ["1", "2", "1", "2", "3", "4"]
        assert (
            [entry.sequence for entry in journal.read()] == [1, 2, 3, 4, 5, 6] == [*range(1, journal.last_sequence + 1)]
        )


def test_a_server_that_stays_away_is_said(server: Server) -> None:
    with open_journal(server.url, job="away", retry_s=0.2) as journal:
        server.stop()
        try:
            with pytest.raises(JournalError):
                journal.append("event", 1, "1", 0.0)
        finally:
            server.start()
        assert journal.append("event", 1, "2", 0.0) == 1


def test_a_driver_that_was_cut_off_is_fenced(server: Server) -> None:
    cut_off = open_journal(server.url, job="fenced", retry_s=1)
    cut_off.append("event", 1, "1", 0.0)
    server.statement("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ 'fenced'")
    with open_journal(server.url, job="fenced", wait_s=60) as later:
        later.append("event", 2, "2", 0.0)
        with pytest.raises(JournalError, match="lock"):
            cut_off.append("event", 1, "3", 0.0)
    with pytest.raises(JournalLostError):
        cut_off.append("event", 1, "3", 0.0)
    cut_off.close()
    with read_journal(server.url, job="fenced") as reader:
        assert [entry.json_text for entry in reader.read()] == ["1", "2"]


def test_where_nothing_was_written_there_is_no_journal(server: Server) -> None:
    server.statement("CREATE DATABASE empty")
    with pytest.raises(UserError, match="no journal"):
        read_journal(server.url.replace("/postgres", "/empty"))


def test_other_jobs_may_make_the_tables_at_once(server: Server) -> None:
    server.statement("CREATE DATABASE fresh")
    url, epochs = server.url.replace("/postgres", "/fresh"), []

    def work(job: str) -> None:
        with open_journal(url, job=job) as journal:
            epochs.append(journal.epoch)

    threads = [threading.Thread(target=work, args=(f"job {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert epochs == [1] * 6


def test_a_socket_and_a_password_from_the_environment(server: Server) -> None:
    url = f"postgresql://phalanx@/postgres?unix_sock={server.folder}/.s.PGSQL.{server.port}"
    with open_journal(url, job="socket", environ={"PGPASSWORD": "not asked for"}) as journal:
        assert journal.append("event", 1, "1", 0.0) == 1


def test_a_server_without_tls_is_not_talked_to_where_it_is_asked_for(server: Server) -> None:
    with pytest.raises(JournalError, match=r"(?i)ssl"):
        open_journal(f"{server.url}?sslmode=verify-full", job="tls")
