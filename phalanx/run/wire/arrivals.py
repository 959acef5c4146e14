"""Strangers at a listening socket: what one of them may cost before it has been heard.

`Arrivals` are connections that have sent nothing yet: they get what serves them with their first bytes, and not before.
Where those bytes can show a proof of the token, all others are heard one after another (`Turns`). An address whose
connections fail to prove themselves spends its budget (`FailureBudgets`).

Queues are `OrderedDict`: the first of a long `dict` from which the first are removed is found in linear time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, cast

MOST = 4096
WITHIN_S = 5.0

TURNS_PER_S = 50.0
TURNS = 64  # that strangers have at once after a quiet time
_MOST_BYTES = 4 << 20

FAILURES = 100
FAILURES_PER_S = 10.0
_MAX_ADDRESSES = 4096


class FailureBudgets:
    """How many connections of each address may still fail to prove themselves.

    Args:
        clock: seconds, monotonic; budgets fill again with time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # and when that was so

    def admits(self, address: str) -> bool:
        """Whether anybody from there may try."""
        return address not in self._left or self._now_left(address) >= 1.0

    def failed(self, address: str) -> None:
        """A connection from there has not proved itself."""
        left = self._now_left(address)
        self._left.pop(address, None)  # the latest to fail are last, the first are forgotten first
        self._left[address] = max(0.0, left - 1.0), self._clock()
        if len(self._left) > _MAX_ADDRESSES:
            self._left.pop(next(iter(self._left)))

    def _now_left(self, address: str) -> float:
        left, at_s = self._left.get(address, (float(FAILURES), self._clock()))
        return min(float(FAILURES), left + (self._clock() - at_s) * FAILURES_PER_S)


class Stranger(Protocol):
    """A connection that may have to wait for its turn."""

    transport: asyncio.Transport

    def hear(self, data: bytes) -> None:
        """It is its turn, with all that it has sent since the last; it may be read from again."""


class Turns:
    """Hears strangers without a proof one after another: a fixed number a second, however many there are.

    A stranger that waits is not read from; one that shows a proof is heard at once. What was sent and not heard takes
    4 MiB at most: beyond that, the connection that has waited longest is cut.

    Args:
        admits: whether these bytes show a proof.
    """

    def __init__(self, admits: Callable[[bytes], bool]) -> None:
        self._admits = admits
        self._left, self._counted_s = float(TURNS), float("-inf")
        self._waiting: OrderedDict[Stranger, bytes] = OrderedDict()  # what they have sent; the first to send first
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, stranger: Stranger, data: bytes) -> None:
        """It has sent something: have it heard now or later."""
        if stranger not in self._waiting and (self._admits(data) or (not self._waiting and self._take())):
            stranger.hear(data)
            return
        stranger.transport.pause_reading()
        self._waiting[stranger] = self._waiting.get(stranger, b"") + data
        self._held_bytes += len(data)
        while self._held_bytes > _MOST_BYTES:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.transport.abort()
        self._schedule()

    def leave(self, stranger: Stranger) -> bytes:
        """It is gone; what it has sent."""
        data = self._waiting.pop(stranger, b"")
        self._held_bytes -= len(data)
        return data

    def _schedule(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(1 / TURNS_PER_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        if self._waiting and self._take():  # one, so that others have their turn of the loop
            first = next(iter(self._waiting))
            data = self.leave(first)
            self._schedule()  # before it is heard, which may raise
            if not first.transport.is_closing():
                first.hear(data)
        self._schedule()

    def _take(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._left = min(float(TURNS), self._left + (now_s - self._counted_s) * TURNS_PER_S)
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Arrivals:
    """Connections of one server that have sent nothing yet. Those that have waited longest go when there are too many.

    Args:
        most: that may wait at one time.
        within_s: in which a connection has to be heard.
        turns: None: all are heard at once.
    """

    def __init__(self, most: int = MOST, within_s: float = WITHIN_S, turns: Turns | None = None) -> None:
        self._most, self._within_s, self._turns = most, within_s, turns
        self._waiting: OrderedDict[ArrivingConnection, float] = OrderedDict()  # until when; the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Hang up on all that wait."""
        for arrival in list(self._waiting):
            self._drop(arrival)

    def add(self, arrival: ArrivingConnection) -> None:
        """It is connected."""
        loop = asyncio.get_running_loop()
        self._waiting[arrival] = loop.time() + self._within_s
        if self._timer is None:
            self._timer = loop.call_later(self._within_s, self._drop_late)
        if len(self._waiting) > self._most:
            self._drop(next(iter(self._waiting)))

    def hear(self, arrival: ArrivingConnection, data: bytes) -> None:
        """It has sent something."""
        if self._turns is None:
            arrival.hear(data)
        else:
            self._turns.hear(arrival, data)

    def remove(self, arrival: ArrivingConnection) -> None:
        """It is heard, or gone."""
        self._waiting.pop(arrival, None)
        if self._turns is not None:
            self._turns.leave(arrival)

    def _drop_late(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            arrival, until_s = next(iter(self._waiting.items()))
            if until_s > loop.time():
                self._timer = loop.call_at(until_s, self._drop_late)
                return
            self._drop(arrival)

    def _drop(self, arrival: ArrivingConnection) -> None:
        self.remove(arrival)
        arrival.transport.abort()


class ArrivingConnection(asyncio.Protocol):
    """One connection that has sent nothing yet; `make` gives the protocol that serves it once it has."""

    __slots__ = ("_arrivals", "_make", "transport")

    def __init__(self, arrivals: Arrivals, make: Callable[[], asyncio.Protocol]) -> None:
        self._arrivals, self._make = arrivals, make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.transport = cast(asyncio.Transport, transport)
        self._arrivals.add(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._arrivals.hear(self, data)

    def hear(self, data: bytes) -> None:
        """Make what serves it, which hears what it has sent."""
        self._arrivals.remove(self)
        self.transport.resume_reading()
        protocol = self._make()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if not self.transport.is_closing():
            protocol.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._arrivals.remove(self)
