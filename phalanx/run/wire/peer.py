"""One connection on the driver's side, from the challenge to the last message."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from phalanx.run import messages
from phalanx.run.wire import codec, frames, proof
from phalanx.run.wire.channel import Channel, Ending, server_protocol
from phalanx.run.wire.codec import Accepted, Answer, BadMessageError, Challenge, Kept, KeptMessage, Received


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
    answers: codec.Decoder
    frames: codec.Decoder
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
                self.channel.write(frames.framed(codec.encode(Received(frame.sequence))))
        else:
            raise BadMessageError("a second Hello")
