"""The driver's memory: what happened is written into the journal before anything is done about it.

A driver that is started again on the same journal has the same state, and is told by a `DriverRestarted` what may not
have been done. The first entry says what job it is and by which policy it is kept running; a later start that is given
others goes on with those of the journal.

Group commit: what was heard together is written down together, and only then acted upon.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from phalanx.run.decide.actions import Action
from phalanx.run.decide.decide import decide, event_from_json, to_json
from phalanx.run.decide.events import DriverRestarted, Event, JobBegun
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import initial
from phalanx.run.decide.transition import Own
from phalanx.run.journal import Draft, Entry, JournalError, JournalLostError
from phalanx.run.journal.journal_tables import Kind
from phalanx.run.wire.connection import Mark


class Header(msgspec.Struct, frozen=True, tag_field="note", tag="job"):
    """What the job is."""

    job: Job
    policy: Policy


class Received(msgspec.Struct, frozen=True, tag_field="note", tag="received"):
    """How far the messages of a host have been taken in, with the events before this note.

    Attributes:
        instance: of the host's link, in base 64.
        sequence: of its last message.
    """

    host: str
    instance: str
    sequence: int


class Met(msgspec.Struct, frozen=True, tag_field="note", tag="met"):
    """Where other hosts reach this one.

    Attributes:
        address: for their workers.
        peer: ``address:port`` for measurements of the network; empty: nowhere.
    """

    host: str
    address: str
    peer: str = ""


Note = Header | Received | Met


class Paper(Protocol):
    """What a book needs of `phalanx.run.journal.Journal`."""

    def append_all(self, drafts: list[Draft]) -> int:
        """Append all or none; they are there for good when this returns."""
        ...

    def read(self, from_sequence: int = 1) -> Iterator[Entry]:
        """All entries in order."""
        ...


class Batch(NamedTuple):
    """What is written down together.

    Attributes:
        marks: and when the messages came.
        met: hosts, and where they are reached.
    """

    drafts: list[Draft]
    marks: dict[str, tuple[Mark, float]]
    met: dict[str, Met]


class Book:
    """State and journal, kept in step.

    What comes together is written down together: `take` and `meet` what has come, then `write` once; only then may
    anything be done about it.

    Attributes:
        state: after the last event that was taken in. Its dictionaries go on to the next one: read it at once.
        marks: how far messages of each host have been taken in; for `phalanx.run.wire.ExecutorServer`.
        addresses: of all hosts that were ever met, as workers of other hosts reach them.
        peers: ``address:port`` where each of them serves measurements of the network; empty: nowhere.
        first_actions: what has to be done now that the book is open.

    Args:
        journal: which this driver writes.
        job, policy: of a job that begins.
        unix_s: now.

    Raises:
        JournalError: it cannot be read or written. msgspec.ValidationError: another program has written it.
    """

    def __init__(self, journal: Paper, job: Job, policy: Policy, unix_s: float) -> None:
        self._journal = journal
        self.marks: dict[str, Mark] = {}
        self.addresses: dict[str, str] = {}
        self.peers: dict[str, str] = {}
        self.state = initial(policy, job)
        self._own: Own = {}
        self._drafts: list[Draft] = []
        self._marks: dict[str, tuple[Mark, float]] = {}
        self._met: dict[str, Met] = {}
        """Of messages that are not written down yet: marks, each with when it came, and where hosts are reached."""
        if self._read():
            self.first_actions = self.apply(DriverRestarted(unix_s))
        else:
            self._drafts.append(self._draft("note", msgspec.json.encode(Header(job, policy)), unix_s))
            self.first_actions = self.apply(JobBegun(unix_s))

    def take(self, event: Event, received: Mapping[str, Mark] | None = None) -> list[Action]:
        """Take in what has happened; what has to be done about it after the next `write`.

        Args:
            received: marks of the hosts whose messages led to it.
        """
        self.state, actions = decide(self.state, event, self._own)
        self._drafts.append(self._draft("event", to_json(event), event.at_s))
        self._drafts += [self._draft("action", to_json(action), event.at_s) for action in actions]
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
        taken = self._drafts, self._marks, self._met
        batch = self.batch()
        try:
            self.append(batch)
        except Exception:
            self._drafts, self._marks, self._met = taken
            raise
        self.done(batch)

    def batch(self) -> Batch:
        """What has been taken in and is not written down, to be `append`ed now and `done` then."""
        notes = [self._draft("note", _received(host, mark), at_s) for host, (mark, at_s) in self._marks.items()]
        batch = Batch([*self._drafts, *notes], self._marks, self._met)
        self._drafts, self._marks, self._met = [], {}, {}
        return batch

    def append(self, batch: Batch) -> None:
        """Write it; called from any thread, one batch after another. Raises as `write`."""
        if batch.drafts:
            self._journal.append_all(batch.drafts)

    def done(self, batch: Batch) -> None:
        """It has been written."""
        self.marks.update({host: mark for host, (mark, _) in batch.marks.items()})
        for met in batch.met.values():
            self._keep(met)

    def apply(self, event: Event, received: Mapping[str, Mark] | None = None) -> list[Action]:
        """`take`, and `write` at once."""
        actions = self.take(event, received)
        self.write()
        return actions

    def meet(self, host: str, address: str, unix_s: float, peer: str = "") -> None:
        """Remember where a host is reached; `peer` as in `Met`."""
        if (self.addresses.get(host), self.peers.get(host)) != (address, peer):
            met = self._met[host] = Met(host, address, peer)
            self._drafts.append(self._draft("note", msgspec.json.encode(met), unix_s))

    def _read(self) -> bool:
        """Whether anything was in the journal."""
        was_begun = False
        for entry in self._journal.read():
            if entry.kind == "event":
                was_begun = True
                self.state, _ = decide(self.state, event_from_json(entry.json_text), self._own)
            elif entry.kind == "note":
                self._recall(msgspec.json.decode(entry.json_text, type=Note))
                was_begun = True
        return was_begun

    def _recall(self, note: Note) -> None:
        if isinstance(note, Header):
            self.state = initial(note.policy, note.job)
        elif isinstance(note, Received):
            self.marks[note.host] = Mark(base64.b64decode(note.instance), note.sequence)
        elif isinstance(note, Met):
            self._keep(note)

    def _keep(self, met: Met) -> None:
        self.addresses[met.host], self.peers[met.host] = met.address, met.peer

    def _draft(self, kind: Kind, text: bytes, unix_s: float) -> Draft:
        return Draft(kind, self.state.attempt, text.decode(), unix_s)


def _received(host: str, mark: Mark) -> bytes:
    return msgspec.json.encode(Received(host, base64.b64encode(mark.instance).decode(), mark.sequence))


_log = logging.getLogger(__name__)

Call = Callable[[], None]


class Aside(NamedTuple):
    """How to write while everything else goes on.

    Attributes:
        later: calls what it is given once all that has come by now has been heard, as `call_soon` of a loop does.
        back: the same from another thread, as `call_soon_threadsafe` does.
        submit: runs what it is given in another thread, one after another.
    """

    later: Callable[[Call], object]
    back: Callable[[Call], object]
    submit: Callable[[Call], Future[None]]


@dataclass
class _Flight:
    """A commit on its way to the disk, and what is to be done when it has arrived."""

    batch: Batch
    due: list[Call]
    owed: dict[str, None]
    arrives: Future[None]


class GroupCommit:
    """Between the book and what the driver does: a commit takes a wait for the disk, whatever is in it.

    Args:
        book: that is written.
        perform: does what has been decided, given when what led to it was heard.
        acknowledge: tells a host that what it has said is received for good.
        changed: called when something has been written, or cannot be.
        aside: None: nothing is put off, and everything waits for the disk.

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
    ) -> None:
        self._book, self._perform, self._acknowledge, self._changed = book, perform, acknowledge, changed
        self._aside = aside
        self._due: list[Call] = []
        self._owed: dict[str, None] = {}
        self._is_open = False
        self._flight: _Flight | None = None
        self.problem: Exception | None = None

    def take(self, event: Event, received: Mapping[str, Mark] | None) -> list[Action]:
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
            host: which has sent it, and is to be told when it is written down.

        Raises:
            JournalError, JournalLostError: it could not be written, now.
        """
        was_open, self._is_open = self._is_open, True
        if self._aside is None:
            self.settle()
            return
        if host:
            self._owed[host] = None
        if not was_open:
            self._aside.later(self._depart)

    def owes(self, host: str) -> bool:
        """Whether this host will be told that what it has said is written down."""
        return host in self._owed or (self._flight is not None and host in self._flight.owed)

    def settle(self) -> None:
        """Write down what has been taken in, and do what follows from it, before this returns.

        Raises:
            JournalError, JournalLostError: it could not be written.
        """
        if self._flight is not None:
            with suppress(Exception):  # `_land` looks at it
                self._flight.arrives.result()
            self._land(self._flight)
        if not self._is_open or self.problem is not None:
            return
        due, owed = self._take_out()
        try:
            self._book.write()
        except (JournalError, JournalLostError) as error:
            self._fail(error)
            raise
        self._do(due, owed)

    def _depart(self) -> None:
        """Have written what has come by now, unless something is on its way still."""
        if self._aside is None or self._flight is not None or not self._is_open or self.problem is not None:
            return
        due, owed = self._take_out()
        batch = self._book.batch()
        arrives = self._aside.submit(lambda: self._book.append(batch))
        flight = self._flight = _Flight(batch, due, owed, arrives)
        back = self._aside.back
        arrives.add_done_callback(lambda done: back(lambda: self._arrive(flight)))

    def _arrive(self, flight: _Flight) -> None:
        """It is on the disk, or never will be; nothing to do for one that somebody has waited for."""
        if self._flight is flight:
            self._land(flight)
            self._depart()

    def _land(self, flight: _Flight) -> None:
        self._flight = None
        error = flight.arrives.exception()
        if isinstance(error, Exception):
            self._fail(error)
            return
        self._book.done(flight.batch)
        self._do(flight.due, flight.owed)

    def _take_out(self) -> tuple[list[Call], dict[str, None]]:
        taken = self._due, self._owed
        self._due, self._owed, self._is_open = [], {}, False
        return taken

    def _fail(self, error: Exception) -> None:
        self.problem = self.problem or error
        self._changed()

    def _do(self, due: list[Call], owed: dict[str, None]) -> None:
        if self.problem is None:
            for call in due:
                self._try(call)
            for host in owed:
                if host not in self._owed:  # else it is told with what it has said since
                    self._acknowledge(host)
        self._changed()

    def _try(self, call: Call) -> None:
        try:
            call()
        except Exception:  # the others are no less due
            _log.exception("it could not be done: %s", call)
