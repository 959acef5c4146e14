"""Connections on which nothing has come yet: they get what serves them with their first bytes, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

MOST = 4096
WITHIN_S = 5.0

Make = Callable[[], asyncio.Protocol]


class Arrivals:
    """All of one server. Whoever has waited longest goes when there are too many, and when his time is over.

    Args:
        most: that may wait at one time.
        within_s: in which a connection has to say something.
    """

    def __init__(self, most: int = MOST, within_s: float = WITHIN_S) -> None:
        self._most, self._within_s = most, within_s
        self._waiting: dict[Arrival, float] = {}  # until when; the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, make: Make) -> asyncio.Protocol:
        """The protocol of a connection that begins now; `make` gives the one that serves it."""
        return Arrival(self, make)

    def close(self) -> None:
        """Hang up on all that wait."""
        for arrival in list(self._waiting):
            self._drop(arrival)

    def add(self, arrival: Arrival) -> None:
        """It is there."""
        loop = asyncio.get_running_loop()
        self._waiting[arrival] = loop.time() + self._within_s
        if self._timer is None:
            self._timer = loop.call_later(self._within_s, self._drop_late)
        if len(self._waiting) > self._most:
            self._drop(next(iter(self._waiting)))

    def remove(self, arrival: Arrival) -> None:
        """It has said something, or is gone."""
        self._waiting.pop(arrival, None)

    def _drop_late(self) -> None:
        loop = asyncio.get_running_loop()
        for arrival, until_s in list(self._waiting.items()):
            if until_s > loop.time():
                self._timer = loop.call_at(until_s, self._drop_late)
                return
            self._drop(arrival)
        self._timer = None

    def _drop(self, arrival: Arrival) -> None:
        self.remove(arrival)
        arrival.transport.abort()


class Arrival(asyncio.Protocol):
    """One of them."""

    __slots__ = ("_arrivals", "_make", "transport")

    def __init__(self, arrivals: Arrivals, make: Make) -> None:
        self._arrivals, self._make = arrivals, make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)
        self._arrivals.add(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._arrivals.remove(self)
        protocol = self._make()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if not self.transport.is_closing():
            protocol.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._arrivals.remove(self)
