"""The driver's state and its journal stay in step, also over restarts and failing disks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.run.decide.actions import OpenStore, Start
from phalanx.run.decide.events import CheckPassed, HostJoined, Running, Started, StoreOpened, WorkerFailed
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.write_ahead import Book
from phalanx.run.journal import Draft, Entry, JournalError, open_journal, read_journal
from phalanx.run.wire.message_frames import ReceivedMark

JOB = Job("j", hosts=2)
POLICY = Policy()


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


def go(book: Book) -> None:
    """Two hosts join, are checked and run."""
    for host in ("a", "b"):
        book.apply(HostJoined(10.0, host))
    numbers = {name: check.number for name, check in book.state.checks.items()}
    actions = [action for host in ("a", "b") for action in book.apply(CheckPassed(11.0, host, numbers[host]))]
    assert [type(action) for action in actions] == [OpenStore]
    [start] = book.apply(StoreOpened(12.0, 1, 2950))
    assert isinstance(start, Start)
    for host in ("a", "b"):
        book.apply(Started(13.0, host=host, attempt=1))
    book.apply(Running(14.0, 1, 1))


def test_a_driver_that_is_started_again_knows_everything(path: str) -> None:
    with open_journal(path) as journal:
        book = Book(journal, JOB, POLICY, 9.0)
        go(book)
        state = book.state
        assert state.phase == "running"
    with open_journal(path) as journal:
        again = Book(journal, Job("other", hosts=7), Policy(settle_s=9.0), 20.0)
        assert (again.state.job, again.state.policy) == (JOB, POLICY)
        assert (again.state.phase, again.state.attempt, again.state.placement) == ("running", 1, state.placement)
        assert [
            type(action).__name__ for action in again.first_actions if type(action).__name__ in ("Stop", "Start")
        ] == []
        again.apply(WorkerFailed(21.0, 1, 0, "signal"))
        assert again.state.recovery is not None
    with read_journal(path) as reader:
        entries = list(reader.read())
    assert [entry.kind for entry in entries[:2]] == ["note", "event"]
    assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
    first_action = next(entry for entry in entries if entry.kind == "action")
    assert entries[first_action.sequence - 2].kind in ("event", "action")  # what led to it stands before it


def test_marks_come_back(path: str) -> None:
    with open_journal(path) as journal:
        book = Book(journal, JOB, POLICY, 9.0)
        book.apply(HostJoined(10.0, "a"), {"a": ReceivedMark(b"\x00link", 4)})
        book.apply(HostJoined(11.0, "b"), {"a": ReceivedMark(b"\x00link", 4), "b": ReceivedMark(b"x", 1)})
        book.apply(HostJoined(12.0, "a"), {"a": ReceivedMark(b"\x00link", 6)})
        book.apply(HostJoined(12.5, "a"), {"a": ReceivedMark(b"\x00link", 6)})
        book.meet("a", "10.0.0.1", 12.6)
        book.meet("a", "10.0.0.2", 12.7, "10.0.0.2:4001")
        book.write()
    with open_journal(path) as journal:
        again = Book(journal, JOB, POLICY, 13.0)
        assert again.marks == {"a": ReceivedMark(b"\x00link", 6), "b": ReceivedMark(b"x", 1)}
        assert again.addresses == {"a": "10.0.0.2"} and again.peers == {"a": "10.0.0.2:4001"}
    with read_journal(path) as reader:
        notes = [entry.json_text for entry in reader.read() if entry.kind == "note"]
    assert sum('"received"' in note for note in notes) == 3  # a mark that has not moved is not written again


class FullDisk:
    """Takes so many appends, then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.drafts: list[Draft] = []

    def append_all(self, drafts: list[Draft]) -> int:
        if self.room == 0:
            raise JournalError("no space left on device")
        self.room -= 1
        self.drafts += drafts
        return len(self.drafts)

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        return iter([])


def test_what_could_not_be_written_down_is_still_to_be() -> None:
    disk = FullDisk(room=2)
    book = Book(disk, JOB, POLICY, 9.0)
    book.apply(HostJoined(10.0, "a"))
    before = dict(book.marks), len(disk.drafts)
    with pytest.raises(JournalError, match="no space"):
        book.apply(HostJoined(11.0, "b"), {"b": ReceivedMark(b"x", 1)})
    assert (book.marks, len(disk.drafts)) == before
    book.meet("b", "10.0.0.7", 11.5)
    with pytest.raises(JournalError, match="no space"):
        book.write()
    assert book.addresses == {}
    disk.room = 1
    book.apply(HostJoined(12.0, "c"))
    assert set(book.state.hosts) == {"a", "b", "c"}
    assert (book.marks, book.addresses) == ({"b": ReceivedMark(b"x", 1)}, {"b": "10.0.0.7"})
    assert sum(draft.kind == "event" for draft in disk.drafts[before[1] :]) == 2, "each of them once"
