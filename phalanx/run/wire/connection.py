"""Connections on the driver's side: strangers who wait to be heard, and one executor from challenge to last message.

*Arrivals* were not heard yet: they get what serves them with their first bytes, and not before.

Where those bytes can show who knows the token, all others take turns. The first of a long `dict` from which the first
are removed is found in linear time, of an `OrderedDict` at once.

A `Peer` is one executor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from phalanx.ipc.codec import BadMessageError, Decoder
from phalanx.run import messages
from phalanx.run.wire import codec, proof, websocket
from phalanx.run.wire.codec import Accepted, Answer, Challenge, Kept, KeptMessage, Received
from phalanx.run.wire.websocket import Channel, Ending, server_protocol

MOST = 4096
WITHIN_S = 5.0

TURNS_PER_S = 50.0
TURNS = 64
"""That strangers have at once after a quiet time."""

_MOST_BYTES = 4 << 20

Make = Callable[[], asyncio.Protocol]


class Stranger(Protocol):
    """Who may have to wait for its turn."""

    transport: asyncio.Transport

    def hear(self, data: bytes) -> None:
        """It is its turn, with all that it has said since the last; it may be read from again."""


class Turns:
    """Hears one after another those who show no proof: so many a second, whose number does not matter, nor their haste.

    Nothing is read of who waits. Who shows a proof is heard at once. What strangers have said and was not heard takes
    4 MiB at most: beyond that, the one who waits longest is hung up on.

    Args:
        admits: whether these bytes show that whoever says them may come.
    """

    def __init__(self, admits: Callable[[bytes], bool]) -> None:
        self._admits = admits
        self._left, self._counted_s = float(TURNS), float("-inf")
        self._waiting: OrderedDict[Stranger, bytes] = OrderedDict()  # what they have said; the first to speak first
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, stranger: Stranger, data: bytes) -> None:
        """It has said something: have it heard now or later."""
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
        self._wait()

    def leave(self, stranger: Stranger) -> bytes:
        """It is gone; what it has said."""
        data = self._waiting.pop(stranger, b"")
        self._held_bytes -= len(data)
        return data

    def _wait(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(1 / TURNS_PER_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        if self._waiting and self._take():  # one, so that others have their turn of the loop
            first = next(iter(self._waiting))
            data = self.leave(first)
            self._wait()
            if not first.transport.is_closing():
                first.hear(data)
        self._wait()

    def _take(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._left = min(float(TURNS), self._left + (now_s - self._counted_s) * TURNS_PER_S)
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Arrivals:
    """All of one server. Whoever has waited longest goes when there are too many, and when his time is over.

    Args:
        most: that may wait at one time.
        within_s: in which a connection has to be heard.
        turns: None: all are heard at once.
    """

    def __init__(self, most: int = MOST, within_s: float = WITHIN_S, turns: Turns | None = None) -> None:
        self._most, self._within_s, self._turns = most, within_s, turns
        self._waiting: OrderedDict[Arrival, float] = OrderedDict()  # until when; the oldest first
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

    def hear(self, arrival: Arrival, data: bytes) -> None:
        """It has said something."""
        if self._turns is None:
            arrival.hear(data)
        else:
            self._turns.hear(arrival, data)

    def remove(self, arrival: Arrival) -> None:
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
        self._arrivals.hear(self, data)

    def hear(self, data: bytes) -> None:
        """Get what serves it, which hears what it has said."""
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


class Mark(NamedTuple):
    """How far the messages of a host have been received.

    Attributes:
        instance: the link whose numbers they are; another link begins anew.
        sequence: the highest number received.
    """

    instance: bytes
    sequence: int


class House(Protocol):
    """What a connection needs of the server."""

    token: bytes
    job: str
    answers: Decoder
    frames: Decoder
    clock: Callable[[], float]
    logger: logging.Logger

    def received(self, host: str, instance: bytes) -> int:
        """Up to which number the messages of this host's link have been received for good."""

    def admit(self, peer: Peer) -> bool:
        """A connection was opened; False: it may not stay."""

    def prove(self, peer: Peer) -> None:
        """It has proved that it knows the token."""

    def join(self, peer: Peer, hello: messages.Hello) -> None:
        """It has said hello."""

    def beat(self, peer: Peer, beat: messages.Heartbeat) -> None:
        """Its heartbeat has come."""

    def take(self, peer: Peer, message: KeptMessage, sequence: int) -> bool:
        """It has said something; False: this could not be handled, or is not received for good yet."""

    def leave(self, peer: Peer, ending: Ending) -> None:
        """It is gone."""

    def refuse(self, peer: Peer, refusal: proof.Refusal) -> None:
        """It was turned away."""


class Peer:
    """A connection to an executor.

    Attributes:
        host: the name that it has proved; empty: none yet.
        instance: of its link.
        since_s: when it was opened.
        heard_s: when it last said something.
        joined: it has said hello.
    """

    __slots__ = (
        "_challenge",
        "_hear",
        "_house",
        "address",
        "channel",
        "heard_s",
        "host",
        "instance",
        "joined",
        "since_s",
    )

    def __init__(self, house: House) -> None:
        self._house = house
        self._challenge = Challenge(messages.VERSION, proof.new_nonce())
        self._hear: Callable[[bytes], None] = self._prove
        self.host = ""
        self.instance = b""
        self.address = ""
        self.joined = False
        self.since_s = self.heard_s = house.clock()
        self.channel = Channel(server_protocol(house.logger), self._opened, self._heard, self._ended, self._connected)

    def refuse(self, code: int, refusal: proof.Refusal) -> None:
        """Turn it away, and say so on both sides."""
        self.channel.end(code, refusal.reason)
        self._house.refuse(self, refusal)

    def _connected(self, channel: Channel) -> None:
        self.address = channel.peer
        if not self._house.admit(self):
            channel.abort("too many connections from this address have failed")

    def _opened(self, channel: Channel) -> None:
        channel.send(codec.encode(self._challenge))

    def _heard(self, content: bytes) -> None:
        self.heard_s = self._house.clock()
        try:
            self._hear(content)
        except BadMessageError as error:
            self.refuse(codec.BAD_FRAME, proof.Refusal("frame", f"not a message that may come here: {error}"))

    def _ended(self, ending: Ending) -> None:
        self._house.leave(self, ending)

    def _prove(self, content: bytes) -> None:
        given = self._house.answers.decode(content)
        assert isinstance(given, Answer)
        refusal = proof.refuse_answer(self._house.token, self._house.job, self._challenge, given)
        if refusal is not None:
            self.refuse(codec.REFUSED, refusal)
            return
        self.host, self.instance = given.host, given.instance
        received = self._house.received(given.host, given.instance)
        self._house.prove(self)
        self.channel.trust(messages.MAX_FRAME_BYTES)
        self.channel.send(codec.encode(self._accepted(given, received)))
        self._hear = self._greet

    def _accepted(self, given: Answer, received: int) -> Accepted:
        return proof.accepted(self._house.token, self._challenge, given, received)

    def _greet(self, content: bytes) -> None:
        hello = self._house.frames.decode(content)
        if not isinstance(hello, messages.Hello):
            raise BadMessageError(f"{type(hello).__name__} before Hello")
        if hello.host != self.host:
            raise BadMessageError(f"Hello of {hello.host!r} from {self.host!r}")
        self._hear = self._work
        self.joined = True
        self._house.join(self, hello)

    def _work(self, content: bytes) -> None:
        frame = self._house.frames.decode(content)
        if isinstance(frame, messages.Heartbeat):
            self._house.beat(self, frame)
        elif isinstance(frame, Kept):
            if self._house.take(self, frame.message, frame.sequence):
                self.channel.write(websocket.framed(codec.encode(Received(frame.sequence))))
        else:
            raise BadMessageError("a second Hello")
