"""Group commit: what was heard together is written down together, and only then acted upon. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from phalanx.run.decide.actions import Action
from phalanx.run.decide.events import Event
from phalanx.run.driver.book import Book
from phalanx.run.journal import JournalError, JournalLostError
from phalanx.run.wire.peer import Mark

_log = logging.getLogger(__name__)

Later = Callable[[Callable[[], None]], object]
"""Calls what it is given once all that has come by now has been heard, as `call_soon` of a loop does."""


class GroupCommit:
    """Between the book and what the driver does: a commit takes a wait for the disk, whatever is in it.

    Args:
        book: that is written.
        perform: does what has been decided, given when what led to it was heard.
        acknowledge: tells a host that what it has said is received for good.
        changed: called when something has been written, or cannot be.
        later: None: nothing is put off.

    Attributes:
        problem: why nothing is written and done any more.
    """

    def __init__(
        self,
        book: Book,
        perform: Callable[[Action, float], None],
        acknowledge: Callable[[str], None],
        changed: Callable[[], None],
        later: Later | None = None,
    ) -> None:
        self._book, self._perform, self._acknowledge, self._changed = book, perform, acknowledge, changed
        self._later = later
        self._due: list[tuple[Action, float]] = []
        self._owed: dict[str, None] = {}
        self._is_open = False
        self.problem: Exception | None = None

    def take(self, event: Event, received: Mapping[str, Mark] | None) -> list[Action]:
        """Take in what has happened; what will be done about it."""
        actions = self._book.take(event, received)
        self._due += [(action, event.at_s) for action in actions]
        return actions

    def put_off(self, host: str = "") -> None:
        """All of one message has been taken in: settle with whatever else has come, or now if nothing is put off.

        Args:
            host: which has sent it, and is to be told when it is written down.

        Raises:
            JournalError, JournalLostError: it could not be written, now.
        """
        if self._later is None:
            self._is_open = True
            self.settle()
            return
        if host:
            self._owed[host] = None
        if not self._is_open:
            self._is_open = True
            self._later(self._settle_later)

    def owes(self, host: str) -> bool:
        """Whether this host will be told that what it has said is written down."""
        return host in self._owed

    def settle(self) -> None:
        """Write down what has been taken in, and do what follows from it.

        Raises:
            JournalError, JournalLostError: it could not be written.
        """
        if not self._is_open or self.problem is not None:
            return
        self._is_open = False
        (due, self._due), (owed, self._owed) = (self._due, []), (self._owed, {})
        try:
            self._book.write()
        except (JournalError, JournalLostError) as error:
            self.problem = error
            self._changed()
            raise
        for action, at_s in due:
            self._do(action, at_s)
        for host in owed:
            self._acknowledge(host)
        self._changed()

    def _settle_later(self) -> None:
        with suppress(JournalError, JournalLostError):  # it is the `problem`
            self.settle()

    def _do(self, action: Action, at_s: float) -> None:
        try:
            self._perform(action, at_s)
        except Exception:  # the others are no less due
            _log.exception("it could not be done: %s", action)
