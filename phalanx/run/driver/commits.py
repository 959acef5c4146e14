"""Group commit: what was heard together is written down together, and only then acted upon. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from phalanx.run.decide.actions import Action
from phalanx.run.decide.events import Event
from phalanx.run.driver.book import Batch, Book
from phalanx.run.journal import JournalError, JournalLostError
from phalanx.run.wire.peer import Mark

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
