"""The driver's memory: what happened is written into the journal before anything is done about it.

A driver that is started again on the same journal has the same state, and begins with a `DriverRestarted`, since of the
last actions it is not known whether they were performed. The first entry holds what job it is and by which policy it is
kept running; a later start that is given others goes on with those of the journal.

Group commit: what was heard together is written down together, and only then acted upon.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from phalanx.run.clock import JobClock, job_clock
from phalanx.run.decide.actions import Action
from phalanx.run.decide.decide import decide, event_from_json, to_json
from phalanx.run.decide.events import DriverRestarted, Event, JobBegun
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Own, initial
from phalanx.run.journal import Draft, Entry, Journal, JournalError, JournalFullError, JournalLostError
from phalanx.run.journal.journal_tables import Kind
from phalanx.run.wire.message_frames import ReceivedMark


class Header(msgspec.Struct, frozen=True, tag_field="note", tag="job"):
    """What the job is."""

    job: Job
    policy: Policy


class Received(msgspec.Struct, frozen=True, tag_field="note", tag="received"):
    """How far the messages of a host have been taken in; `instance`: of its link, in base 64."""

    host: str
    instance: str
    sequence: int


class Met(msgspec.Struct, frozen=True, tag_field="note", tag="met"):
    """Where other hosts reach this one: their workers, and (``address:port``; empty: nowhere) network measurements."""

    host: str
    address: str
    peer: str = ""


class ClockSet(msgspec.Struct, frozen=True, tag_field="note", tag="clock"):
    """By which clock of the job moments are from here on; fields as of `phalanx.run.clock.JobClock`."""

    boot: str
    ahead_s: float


Note = Header | Received | Met | ClockSet


def clock_of(entries: Iterable[Entry]) -> JobClock:
    """The clock of the job whose journal this is."""
    before, last_unix_s = None, None
    for entry in entries:
        last_unix_s = max(entry.unix_s, entry.unix_s if last_unix_s is None else last_unix_s)
        if entry.kind == "note" and '"clock"' in entry.json_text:
            note = msgspec.json.decode(entry.json_text, type=Note)
            before = JobClock(note.boot, note.ahead_s) if isinstance(note, ClockSet) else before
    return job_clock(before, last_unix_s)


class Batch(NamedTuple):
    """What is written down together; marks with when the messages came."""

    drafts: list[Draft]
    marks: dict[str, tuple[ReceivedMark, float]]
    met: dict[str, Met]


class Book:
    """State and journal, kept in step.

    What comes together is written down together: `take` and `meet` what has come, then `write` once; only then may
    anything be done about it.

    Attributes:
        state: after the last event that was taken in. Its dictionaries go on to the next one: read it at once.
        marks: how far messages of each host have been taken in; for `phalanx.run.wire.ExecutorServer`.
        addresses, peers: as in `Met`, of all hosts that were ever met.
        first_actions: what has to be done now that the book is open.

    Args:
        job, policy: of a job that begins; an older journal has its own.
        unix_s: now.
        clock: that says so; written down where the driver before had another.

    Raises:
        JournalError: it cannot be read or written. msgspec.ValidationError: another program has written it.
    """

    def __init__(
        self, journal: Journal, job: Job, policy: Policy, unix_s: float, clock: JobClock | None = None
    ) -> None:
        self._journal = journal
        self.marks: dict[str, ReceivedMark] = {}
        self.addresses: dict[str, str] = {}
        self.peers: dict[str, str] = {}
        self.state = initial(policy, job)
        # No earlier state is kept, so `decide` may change its dictionaries in place.
        self._own: Own = {}
        self._drafts: list[Draft] = []
        # Of messages that are not written down yet.
        self._marks: dict[str, tuple[ReceivedMark, float]] = {}
        self._met: dict[str, Met] = {}
        was_begun, set_before = False, None
        for entry in journal.read():
            if entry.kind == "event":
                was_begun = True
                self.state, _ = decide(self.state, event_from_json(entry.json_text), self._own)
            elif entry.kind == "note":
                was_begun = True
                note = msgspec.json.decode(entry.json_text, type=Note)
                if isinstance(note, Header):
                    self.state = initial(note.policy, note.job)
                elif isinstance(note, Received):
                    self.marks[note.host] = ReceivedMark(base64.b64decode(note.instance), note.sequence)
                elif isinstance(note, ClockSet):
                    set_before = note
                else:
                    self.addresses[note.host], self.peers[note.host] = note.address, note.peer
        if not was_begun:
            self._add("note", msgspec.json.encode(Header(job, policy)), unix_s)
        if clock is not None and (now_set := ClockSet(*clock)) != set_before:
            self._add("note", msgspec.json.encode(now_set), unix_s)
        self.first_actions = self.apply(DriverRestarted(unix_s) if was_begun else JobBegun(unix_s))

    def take(self, event: Event, received: Mapping[str, ReceivedMark] | None = None) -> list[Action]:
        """Take in what has happened; what has to be done about it after the next `write`.

        Args:
            received: marks of the hosts whose messages led to it.
        """
        self.state, actions = decide(self.state, event, self._own)
        # Actions are written for people and for reports: a replay decides them again.
        self._add("event", to_json(event), event.at_s)
        for action in actions:
            self._add("action", to_json(action), event.at_s)
        for host, mark in (received or {}).items():
            if self.marks.get(host) != mark:
                self._marks[host] = mark, event.at_s
        return actions

    def write(self) -> None:
        """Write down what was taken in; it is in the journal for good when this returns.

        Raises:
            JournalError: it could not be written, and is still to be. JournalLostError: a later driver has taken the
                job over.
        """
        # What could not be written is written with the next batch: the state is ahead of the journal until then.
        kept = self._drafts, self._marks, self._met
        batch = self.batch()
        try:
            self.append(batch)
        except Exception:
            self._drafts, self._marks, self._met = kept
            raise
        self.done(batch)

    def batch(self) -> Batch:
        """What has been taken in and is not written down, to be `append`ed now and `done` then."""
        # Marks come last, in the same transaction: up to them all events of a host are there.
        marks, drafts = self._marks, list(self._drafts)
        for host, (mark, at_s) in marks.items():
            note = Received(host, base64.b64encode(mark.instance).decode(), mark.sequence)
            drafts.append(Draft("note", self.state.attempt, msgspec.json.encode(note).decode(), at_s))
        batch = Batch(drafts, marks, self._met)
        self._drafts, self._marks, self._met = [], {}, {}
        return batch

    def append(self, batch: Batch) -> None:
        """Write it; called from any thread, one batch after another. Raises as `write`."""
        if batch.drafts:
            self._journal.append_all(batch.drafts)

    def done(self, batch: Batch) -> None:
        """It has been written."""
        self.marks.update({host: mark for host, (mark, _) in batch.marks.items()})
        for host, met in batch.met.items():
            self.addresses[host], self.peers[host] = met.address, met.peer

    def put_back(self, batch: Batch) -> None:
        """It could not be written: it comes before what is written next."""
        self._drafts = [*batch.drafts, *self._drafts]
        self._marks, self._met = {**batch.marks, **self._marks}, {**batch.met, **self._met}

    def apply(self, event: Event, received: Mapping[str, ReceivedMark] | None = None) -> list[Action]:
        """`take`, and `write` at once."""
        actions = self.take(event, received)
        self.write()
        return actions

    def meet(self, host: str, address: str, unix_s: float, peer: str = "") -> None:
        """Remember where a host is reached; `peer` as in `Met`."""
        if (self.addresses.get(host), self.peers.get(host)) != (address, peer):
            met = self._met[host] = Met(host, address, peer)
            self._add("note", msgspec.json.encode(met), unix_s)

    def _add(self, kind: Kind, text: bytes, unix_s: float) -> None:
        self._drafts.append(Draft(kind, self.state.attempt, text.decode(), unix_s))


_log = logging.getLogger(__name__)

Call = Callable[[], None]

_FULL_S, _MOST_FULL_S = 0.5, 30.0
"""Until it is tried again to write to a full disk: at first, and at most."""

_LOOK_S = 0.05


class Aside(NamedTuple):
    """How to write while everything else goes on."""

    later: Callable[[Call], object]  # calls once all that has come by now has been heard, as `call_soon` of a loop does
    back: Callable[[Call], object]  # the same from another thread, as `call_soon_threadsafe` does
    submit: Callable[[Call], Future[None]]  # runs in another thread, one after another


@contextmanager
def aside_of(loop: asyncio.AbstractEventLoop) -> Iterator[Aside]:
    """A thread that writes the journal, for as long as this context lasts."""
    with ThreadPoolExecutor(1, thread_name_prefix="journal") as pool:
        yield Aside(loop.call_soon, loop.call_soon_threadsafe, pool.submit)


@dataclass
class _Commit:
    """On its way to the disk, and what is to be done when it is there; `waiting`: hosts to be acknowledged."""

    batch: Batch
    due: list[Call]
    waiting: dict[str, None]
    written: Future[None]


class GroupCommit:
    """Between the book and what the driver does: a commit takes a wait for the disk, whatever is in it.

    Args:
        perform: does what has been decided, given when what led to it was heard.
        acknowledge: lets a host know that what it has sent is received for good.
        changed: called when something has been written, or cannot be.
        aside: None: nothing is put off, and everything waits for the disk.
        tell: lets people know that there is no room for the journal, once, and that there is again.

    Attributes:
        problem: why nothing is written and done any more.
    """

    def __init__(
        self,
        book: Book,
        perform: Callable[[Action, float], None],
        acknowledge: Callable[[str], None],
        changed: Call,
        aside: Aside | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._book, self._perform, self._acknowledge, self._changed = book, perform, acknowledge, changed
        self._aside, self._tell = aside, tell
        self._is_full, self._goes_unwritten = False, threading.Event()
        self._due: list[Call] = []
        self._waiting: dict[str, None] = {}
        self._is_open = False
        self._commit: _Commit | None = None
        self.problem: Exception | None = None

    def take(self, event: Event, received: Mapping[str, ReceivedMark] | None) -> list[Action]:
        """Take in what has happened; what will be done about it."""
        actions = self._book.take(event, received)
        self._due += [partial(self._perform, action, event.at_s) for action in actions]
        return actions

    def then(self, call: Call) -> None:
        """Do this, too, once what comes next is written down, before what follows from that."""
        self._due.append(call)

    def put_off(self, host: str = "") -> None:
        """All of one message has been taken in: settle with whatever else has come, or now if nothing is put off.

        Args:
            host: to be acknowledged when it is written down.

        Raises:
            JournalError, JournalLostError: it could not be written, now.
        """
        was_open, self._is_open = self._is_open, True
        if self._aside is None:
            self.settle()
            return
        if host:
            self._waiting[host] = None
        # One wait for the disk (some milliseconds) for all that is heard in this round of the loop, not one each: ten
        # thousand hosts that join at once would take a minute.
        if not was_open:
            self._aside.later(self._start)

    def owes(self, host: str) -> bool:
        """Whether this host will be acknowledged when what it has sent is written down."""
        return host in self._waiting or (self._commit is not None and host in self._commit.waiting)

    def settle(self) -> None:
        """Write down what has been taken in, and do what follows from it, before this returns.

        Raises:
            JournalError, JournalLostError: it could not be written.
        """
        # In order: what is on its way to the disk comes before what has been heard since.
        if (commit := self._commit) is not None:
            while not self._is_full and not wait_for([commit.written], _LOOK_S).done:
                pass
            if not commit.written.done():
                return  # there is no room: all is done once it is written
            self._finish(commit)
        if not self._is_open or self.problem is not None:
            return
        due, waiting = self._take_out()
        try:
            self._book.write()
        except JournalFullError as error:
            if self._aside is None:
                self._fail(error)
                raise
            self._due, self._waiting, self._is_open = due, waiting, True
            self._start()
        except (JournalError, JournalLostError) as error:
            self._fail(error)
            raise
        else:
            self._do(due, waiting)

    def end_unwritten(self) -> None:
        """A person ends the job: from now on what there is no room for is done all the same."""
        self._goes_unwritten.set()

    def _start(self) -> None:
        """Have written what has come by now, unless a commit is on its way still: what comes meanwhile is the next."""
        if self._aside is None or self._commit is not None or not self._is_open or self.problem is not None:
            return
        due, waiting = self._take_out()
        batch, back = self._book.batch(), self._aside.back
        written = self._aside.submit(lambda: self._append(batch, back))
        commit = self._commit = _Commit(batch, due, waiting, written)
        written.add_done_callback(lambda done: back(lambda: self._arrived(commit)))

    def _append(self, batch: Batch, back: Callable[[Call], object]) -> None:
        """In the thread: a full disk is waited for, since a driver that was started again would find it as full."""
        pause_s = _FULL_S
        while True:
            try:
                self._book.append(batch)
            except JournalFullError as error:
                if self._goes_unwritten.is_set():
                    raise
                if not self._is_full:
                    text = f"there is no room to write down what happens, which waits for some: {error}"
                    back(partial(self._tell, text))
                self._is_full = True
                self._goes_unwritten.wait(pause_s)
                pause_s = min(2 * pause_s, _MOST_FULL_S)
            else:
                if self._is_full:
                    back(partial(self._tell, "there is room again: all that has happened is written down"))
                self._is_full = False
                return

    def _arrived(self, commit: _Commit) -> None:
        if self._commit is commit:  # else `settle` has waited for it
            self._finish(commit)
            self._start()

    def _finish(self, commit: _Commit) -> None:
        """It is on the disk, or never will be."""
        self._commit = None
        error = commit.written.exception()
        if isinstance(error, JournalFullError):  # and the job is to end all the same
            self._book.put_back(commit.batch)
        elif isinstance(error, Exception):
            self._fail(error)
            return
        else:
            self._book.done(commit.batch)
        self._do(commit.due, commit.waiting)

    def _take_out(self) -> tuple[list[Call], dict[str, None]]:
        taken = self._due, self._waiting
        self._due, self._waiting, self._is_open = [], {}, False
        return taken

    def _fail(self, error: Exception) -> None:
        # No trying again: another driver may have the journal by now. A new process finds out, and goes on from there.
        self.problem = self.problem or error
        self._changed()

    def _do(self, due: list[Call], waiting: dict[str, None]) -> None:
        if self.problem is None:
            for call in due:
                try:
                    call()
                except Exception:  # the others are no less due
                    _log.exception("it could not be done: %s", call)
            for host in waiting:
                if host not in self._waiting:  # else it is acknowledged with what it has sent since
                    self._acknowledge(host)
        self._changed()
