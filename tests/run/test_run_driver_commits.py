"""What is heard together is written down together; nothing is done, and nobody told, before that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from phalanx.run.decide.actions import Action, Check
from phalanx.run.decide.events import HostJoined
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver import write_ahead
from phalanx.run.driver.write_ahead import Aside, Book, GroupCommit
from phalanx.run.journal import Draft, Entry, JournalError, JournalFullError
from phalanx.run.wire.message_frames import ReceivedMark


class Disk:
    """Remembers what was appended with each commit."""

    def __init__(self) -> None:
        self.commits: list[list[Draft]] = []
        self.is_broken = False
        self.left_full = 0
        self.at_full: Callable[[], object] = lambda: None

    def append_all(self, drafts: list[Draft]) -> int:
        if self.is_broken:
            raise JournalError("no answer")
        if self.left_full:
            self.left_full -= 1
            self.at_full()
            raise JournalFullError("no space left on device")
        self.commits.append(drafts)
        return len(self.commits)

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        return iter([])


class Around:
    """What a group commit calls, in order."""

    def __init__(self, *, puts_off: bool = True) -> None:
        self.disk = Disk()
        self.book = Book(self.disk, Job("j", hosts=2), Policy(), 9.0)
        self.log: list[str] = []
        self.told: list[str] = []
        self.later: list[Callable[[], None]] = []
        self.writing: list[tuple[Future[None], Callable[[], None]]] = []
        self.commits = GroupCommit(
            self.book,
            self.perform,
            lambda host: self.log.append(f"acknowledge {host}"),
            lambda: self.log.append("changed"),
            Aside(self.later.append, self.later.append, self.submit) if puts_off else None,
            self.told.append,
        )
        self.disk.commits.clear()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """To be written by a thread; `write` is that thread."""
        future: Future[None] = Future()
        self.writing.append((future, work))
        return future

    def write(self) -> None:
        future, work = self.writing.pop(0)
        try:
            work()
        except JournalError as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def go_on(self) -> None:
        """Everything that is due, until nothing is."""
        while self.later or self.writing:
            while self.later:
                self.later.pop(0)()
            if self.writing:
                self.write()

    def perform(self, action: Action, at_s: float) -> None:
        if isinstance(action, Check):
            self.log.append(f"check {action.host} at {at_s:g}")
            if action.host == "bad":
                raise ValueError("this action cannot be performed")

    def join(self, host: str, at_s: float) -> None:
        self.commits.take(HostJoined(at_s, host), {host: ReceivedMark(b"link", 1)})
        self.commits.put_off(host)


def test_what_comes_together_is_one_commit_and_done_after_it() -> None:
    around = Around()
    around.join("a", 10.0)
    around.join("b", 11.0)
    assert around.commits.owes("a") and around.commits.owes("b") and not around.commits.owes("c")
    assert (around.log, around.disk.commits, len(around.later)) == ([], [], 1)
    assert set(around.book.state.hosts) == {"a", "b"}, "decisions do not wait for the disk"
    around.go_on()
    assert [sum(draft.kind == "event" for draft in commit) for commit in around.disk.commits] == [2]
    assert around.log == ["check a at 10", "check b at 11", "acknowledge a", "acknowledge b", "changed"]
    assert not around.commits.owes("a")
    around.join("c", 12.0)
    assert len(around.later) == 1
    around.commits.settle()  # somebody cannot wait: what was put off has nothing left to do
    assert around.log[-3:] == ["check c at 12", "acknowledge c", "changed"]
    around.go_on()
    assert len(around.disk.commits) == 2 and around.log[-1] == "changed" and around.log.count("changed") == 2


def test_what_comes_while_the_disk_is_waited_for_is_the_next_commit() -> None:
    around = Around()
    around.join("a", 10.0)
    around.later.pop(0)()
    around.join("b", 11.0)
    around.join("a", 11.5)
    while around.later:
        around.later.pop(0)()
    assert len(around.writing) == 1 and around.log == [] and around.commits.owes("a") and around.commits.owes("b")
    around.write()
    around.later.pop(0)()
    assert around.log == ["check a at 10", "changed"], "a has said more since, which is not written down"
    assert len(around.writing) == 1
    around.go_on()
    assert around.log[2:] == ["check b at 11", "check a at 11.5", "acknowledge b", "acknowledge a", "changed"]
    assert len(around.disk.commits) == 2 and not around.commits.owes("a")


def test_who_cannot_wait_waits_for_what_is_on_its_way_too() -> None:
    around = Around()
    around.join("a", 10.0)
    around.later.pop(0)()
    around.join("b", 11.0)
    around.write()
    around.commits.settle()
    assert [line for line in around.log if line != "changed"] == [
        *("check a at 10", "acknowledge a"),
        *("check b at 11", "acknowledge b"),
    ]
    around.go_on()
    assert len(around.disk.commits) == 2 and around.log.count("check a at 10") == 1


def test_a_driver_that_steps_down_leaves_what_is_on_its_way_to_the_next() -> None:
    around = Around()
    around.join("a", 10.0)
    around.later.pop(0)()
    around.commits.problem = RuntimeError("another one takes over")
    around.go_on()
    assert around.log == ["changed"] and len(around.disk.commits) == 1


def test_of_what_cannot_be_written_nothing_is_done() -> None:
    around = Around()
    around.disk.is_broken = True
    around.join("a", 10.0)
    around.go_on()
    assert around.log == ["changed"] and around.book.marks == {}
    assert isinstance(around.commits.problem, JournalError)
    around.disk.is_broken = False
    around.join("b", 11.0)
    around.go_on()
    assert around.log == ["changed"] and around.disk.commits == [], "this driver does nothing any more"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead, "_FULL_S", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_a_full_disk_is_waited_for_and_told_of_once() -> None:
    around = Around()
    around.disk.left_full = 5
    around.join("a", 10.0)
    around.go_on()
    assert around.log == ["check a at 10", "acknowledge a", "changed"] and around.commits.problem is None
    assert [text.split(":")[0] for text in around.told] == [
        "there is no room to write down what happens, which waits for some",
        "there is room again",
    ]
    assert len(around.disk.commits) == 1


@pytest.mark.usefixtures("no_pause")
def test_who_asks_to_end_on_a_full_disk_is_obeyed_and_all_is_written_once_there_is_room() -> None:
    around = Around()
    around.disk.left_full, around.disk.at_full = 1000, around.commits.end_unwritten
    around.join("a", 10.0)
    around.go_on()
    assert "check a at 10" in around.log and around.disk.commits == []
    around.disk.left_full = 0
    around.join("b", 11.0)
    around.go_on()
    (written,) = around.disk.commits
    assert [draft.unix_s for draft in written if draft.kind == "event"] == [10.0, 11.0]
    assert set(around.book.marks) == {"a", "b"}


@pytest.mark.usefixtures("no_pause")
def test_an_order_does_not_wait_for_room() -> None:
    around = Around()
    # While the thread waits, as of a signal.
    around.disk.left_full, around.disk.at_full = 3, lambda: around.commits.settle() if around.later else None
    around.join("a", 10.0)
    around.go_on()
    assert around.log.count("check a at 10") == 1
    around.disk.left_full, around.disk.at_full = 2, lambda: None
    around.join("b", 11.0)
    around.commits.settle()
    assert "check b at 11" not in around.log
    around.go_on()
    assert around.log.count("check b at 11") == 1 and around.commits.problem is None


def test_a_thread_that_waits_for_room_is_woken_by_who_asks_to_end() -> None:
    disk = Disk()
    book = Book(disk, Job("j", hosts=2), Policy(), 9.0)
    disk.left_full = sys.maxsize

    async def story() -> None:
        told, done = asyncio.Event(), asyncio.Event()
        with write_ahead.aside_of(asyncio.get_running_loop()) as aside:
            commits = GroupCommit(
                book, lambda action, at_s: done.set(), lambda host: None, lambda: None, aside, lambda text: told.set()
            )
            commits.take(HostJoined(10.0, "a"), None)
            commits.put_off()
            await told.wait()
            assert not done.is_set()
            commits.settle()
            commits.end_unwritten()
            await done.wait()

    asyncio.run(story())


def test_nothing_is_put_off_where_nobody_calls_later() -> None:
    around = Around(puts_off=False)
    around.join("a", 10.0)
    assert around.log == ["check a at 10", "changed"] and len(around.disk.commits) == 1
    around.disk.is_broken = True
    with pytest.raises(JournalError, match="no answer"):
        around.join("b", 11.0)
    assert isinstance(around.commits.problem, JournalError)


def test_an_action_that_fails_does_not_keep_others_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    around = Around()
    around.join("bad", 10.0)
    around.join("b", 11.0)
    around.go_on()
    assert around.log[:2] == ["check bad at 10", "check b at 11"] and around.commits.problem is None
    assert "this action cannot be performed" in caplog.text
