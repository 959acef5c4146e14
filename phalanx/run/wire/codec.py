"""What travels in a frame: the messages of `phalanx.run.messages`, and the few words that the connection itself needs.

Messages of an executor that must not be lost travel inside `Kept`, with a number that grows by link; the driver answers
with `Received`. Heartbeats travel bare and are answered with `Acknowledged`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from phalanx.ipc.codec import encode as encode_within
from phalanx.run import messages

NONCE_BYTES = 32
PROOF_BYTES = 32
INSTANCE_BYTES = 16
MAX_HANDSHAKE_FRAME_BYTES = 1024

REFUSED = 4001
"""Close code: the handshake was refused; the reason says why."""
REPLACED = 4002
"""Close code: a newer connection of the same host has taken over."""
BAD_FRAME = 4003
"""Close code: what came is not a message."""
TOO_SLOW = 4004
"""Close code: the handshake took too long, or nothing was heard for too long."""
FAILED = 4005
"""Close code: the driver could not handle a message; it was not received and shall be sent again."""

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
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


# The handshake, in this order


class Challenge(messages.Message, frozen=True, tag="challenge"):
    """The driver speaks first: its version, and a number used once."""

    version: int
    nonce: Nonce


class Answer(messages.Message, frozen=True, tag="answer"):
    """An executor names itself and proves that it knows the token.

    Attributes:
        instance: drawn once by each link; numbers of `Kept` messages are of this instance.
    """

    version: int
    job: Name
    host: Name
    instance: Instance
    nonce: Nonce
    proof: Proof


class Accepted(messages.Message, frozen=True, tag="accepted"):
    """The driver proves the same.

    Attributes:
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


FromExecutorFrame = messages.Hello | messages.Heartbeat | Kept
FromDriverFrame = messages.FromDriver | Received


def acknowledged(sequence: int) -> bytes:
    """The bytes of `Acknowledged`, of which as many are sent as heartbeats come."""
    return _ACKNOWLEDGED + _encode(sequence)


def encode(message: messages.Message, limit_bytes: int = messages.MAX_FRAME_BYTES) -> bytes:
    """The bytes of a message.

    Raises:
        TooLargeError: there are more than `limit_bytes`.
    """
    return encode_within(message, limit_bytes)


_encode = msgspec.msgpack.Encoder().encode
_ACKNOWLEDGED = _encode(messages.Acknowledged(0))[:-1]
