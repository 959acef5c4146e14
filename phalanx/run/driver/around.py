"""Whom the driver talks to. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phalanx.run import messages
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action
from phalanx.run.now import Now
from phalanx.run.wire.peer import Mark


class Line(Protocol):
    """What the driver needs of `phalanx.run.wire.server.ExecutorServer`."""

    def send(self, host: str, message: messages.FromDriver) -> bool:
        """Send, if the host is connected."""
        ...

    def mark(self, host: str) -> Mark | None:
        """How far the messages of this host were received."""
        ...

    def acknowledge(self, host: str) -> None:
        """All messages of this host up to its mark are received for good."""
        ...


class People(Protocol):
    """Who is told."""

    def tell(self, action: Action, at: Now) -> None:
        """Something has been decided; alerts and what is about incidents is for people, the rest as they like."""
        ...

    def heard(self, host: str, message: messages.Evidence | messages.WorkerEnded, at: Now) -> None:
        """An executor has said something that may explain what went wrong."""
        ...

    def wrote(self, lines: Sequence[messages.LogLine], at: Now) -> None:
        """Ranks have written lines; with very many not all of them are told."""
        ...


class Orders(Protocol):
    """Where what the back end shall do is put, to be done in this order."""

    def arrived(self, host: str) -> None:
        """An executor has connected; what is put later is decided with that in mind, what was put before is not."""
        ...

    def put(self, action: actions.AskForHosts | actions.Evict | actions.Release) -> None:
        """The back end's part."""
        ...
