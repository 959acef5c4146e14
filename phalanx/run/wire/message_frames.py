"""What travels in a frame: the messages of `phalanx.run.messages`, and the few that the connection itself needs.

Messages of an executor that must not be lost travel inside `Kept`, with a number that grows by link; the driver answers
with `Received`. Heartbeats travel bare and are answered with `Acknowledged`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from phalanx.ipc import codec
from phalanx.ipc.handshake import MESSAGE_BYTES
from phalanx.run import messages

NONCE_BYTES = 32
INSTANCE_BYTES = 16
MAX_HANDSHAKE_FRAME_BYTES = 1024

# Close codes: of WebSocket itself, then ours.
GOING_AWAY = 1001  # this side ends
NO_CLOSE_FRAME = 1006  # the connection ended without a close frame
REFUSED = 4001  # the handshake was refused; the reason says why
REPLACED = 4002  # a newer connection of the same host has taken over
BAD_FRAME = 4003  # what came is not a message
TOO_SLOW = 4004  # the handshake took too long, or nothing was heard for too long
FAILED = 4005  # the driver could not handle a message; it was not received and shall be sent again

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=MESSAGE_BYTES, max_length=MESSAGE_BYTES)]
Instance = Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

KeptMessage = (
    messages.Prepared
    | messages.StoreOpened
    | messages.Started
    | messages.WorkerEnded
    | messages.Stopped
    | messages.Evidence
    | messages.Found
    | messages.Checked
    | messages.Refused
)


# The handshake, in this order: see `phalanx.run.wire.proof`


class Challenge(messages.Message, frozen=True, tag="challenge"):
    """The driver speaks first: its version, and a number used once."""

    version: int
    nonce: Nonce


class HandshakeAnswer(messages.Message, frozen=True, tag="answer"):
    """An executor names itself and proves that it knows the token.

    Attributes:
        instance: drawn once by each link; numbers of `Kept` messages are of this instance.
        proof: first message of the handshake.
    """

    version: int
    job: Name
    host: Name
    instance: Instance
    proof: Proof


class Accepted(messages.Message, frozen=True, tag="accepted"):
    """The driver proves the same.

    Attributes:
        proof: second message of the handshake.
        received: the highest number of a `Kept` message of this instance that it has.
    """

    proof: Proof
    received: Count


# Around messages


class Kept(messages.Message, frozen=True, tag="kept"):
    """A message that the executor keeps until the driver has it."""

    sequence: Count
    message: KeptMessage


class Received(messages.Message, frozen=True, tag="received"):
    """The driver has all `Kept` messages up to this number."""

    sequence: Count


class ReceivedMark(NamedTuple):
    """How far the kept messages of a host have been received, of this instance: another link begins anew."""

    instance: bytes
    sequence: int


FromExecutorFrame = messages.Hello | messages.Heartbeat | Kept
FromDriverFrame = messages.FromDriver | Received


def encode(message: messages.Message) -> bytes:
    """The bytes of a message. Raises TooLargeError: there are more than a frame may have."""
    return codec.encode(message, messages.MAX_FRAME_BYTES)


# As many of these are sent as heartbeats come, so all but the number is encoded once.
_ACKNOWLEDGED = encode(messages.Acknowledged(0))[:-1]


def acknowledged(sequence: int) -> bytes:
    """The bytes of `Acknowledged`."""
    return _ACKNOWLEDGED + msgspec.msgpack.encode(sequence)
