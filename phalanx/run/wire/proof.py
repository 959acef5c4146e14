"""Mutual proof that both sides know the job's token, which itself never travels: the one handshake of `phalanx.ipc`.

The driver sends a nonce. The executor names itself and sends the first message of the handshake
(`phalanx.ipc.handshake`), whose prologue is everything that both have sent; the driver answers with the second. A
recorded answer does not fit the next nonce, and an answer sent back does not fit the role in it. What follows is not
sealed: TLS guards against changes on the way, and only loopback goes without it.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import NamedTuple

import msgspec

from phalanx.core.errors import UserError
from phalanx.ipc.handshake import Handshake, NotAuthenticError, PreSharedKey, derive
from phalanx.run import messages
from phalanx.run.wire.message_frames import NONCE_BYTES, Accepted, Challenge, HandshakeAnswer

MIN_TOKEN_BYTES = 16
_LABEL = "phalanx run: executor and driver"

PASS = "Phalanx-Pass"  # the header that holds a pass
PASS_S = 300.0  # by so much the clocks of hosts may differ
_VERSIONS = re.compile(r"the driver speaks version \d{1,9}, the executor (\d{1,9})\b")
_PASS = re.compile(rb"\r\n" + PASS.encode() + rb": (\d{1,12})\.([0-9a-f]{64})\r\n")


class Refusal(NamedTuple):
    """Why a handshake is refused."""

    kind: str  # one of a few words, to count by
    reason: str  # for people on both sides; it fits into a close frame (123 bytes)


def key_of(token: bytes) -> PreSharedKey:
    """The key of the handshake, from the token. Raises UserError: the token is too short to be one."""
    if len(token) < MIN_TOKEN_BYTES:
        raise UserError(
            f"a token of {len(token)} bytes can be guessed",
            cure=f"use at least {MIN_TOKEN_BYTES} random bytes",
            field="token",
        )
    return PreSharedKey(derive(token, _LABEL))


def new_challenge() -> Challenge:
    """With a nonce of its own."""
    return Challenge(messages.VERSION, secrets.token_bytes(NONCE_BYTES))


def _prologue(challenge: Challenge, job: str, host: str, instance: bytes) -> bytes:
    # MessagePack carries the length of every part, so that no two lists of parts give the same bytes.
    return msgspec.msgpack.encode([_LABEL, challenge.version, challenge.nonce, job, host, instance])


def answer(
    key: PreSharedKey, challenge: Challenge, job: str, host: str, instance: bytes
) -> tuple[HandshakeAnswer, Handshake] | Refusal:
    """What an executor answers to the driver's challenge, and the handshake that `refuse_driver` goes on with."""
    if challenge.version != messages.VERSION:
        return _other_version(challenge.version, messages.VERSION)
    handshake = Handshake(key, _prologue(challenge, job, host, instance), calls=True)
    return HandshakeAnswer(messages.VERSION, job, host, instance, handshake.write()), handshake


def accept(key: PreSharedKey, job: str, challenge: Challenge, given: HandshakeAnswer) -> bytes | Refusal:
    """The driver's own proof for an executor whose answer is good, or why the answer is refused."""
    if given.version != messages.VERSION:
        return _other_version(messages.VERSION, given.version)
    if given.job != job:
        return Refusal("job", "this driver is of another job; check the address that the executor was told")
    handshake = Handshake(key, _prologue(challenge, given.job, given.host, given.instance), calls=False)
    try:
        handshake.read(given.proof)
        return handshake.write()
    except NotAuthenticError:
        return Refusal("token", "the executor does not prove that it knows this job's token; check its token file")


def refuse_driver(handshake: Handshake, reply: Accepted) -> Refusal | None:
    """Why an executor does not trust this driver; None: it does."""
    try:
        handshake.read(reply.proof)
    except NotAuthenticError:
        return Refusal("token", "the driver does not prove that it knows this job's token; check its token file")
    return None


def make_pass(token: bytes, unix_s: float) -> str:
    """What an executor shows first of all, for the case that its neighbours have failed too often.

    With an overheard one a stranger comes as far as the challenge, for some minutes, and no further.
    """
    now = str(int(unix_s))
    return f"{now}.{derive(token, f'{_LABEL}: pass {now}').hex()}"


def is_pass(token: bytes, request: bytes, unix_s: float) -> bool:
    """Whether a request shows a pass of about now."""
    found = _PASS.search(request)
    if found is None or abs(int(found[1]) - unix_s) > PASS_S:
        return False
    return hmac.compare_digest(b"%b.%b" % found.groups(), make_pass(token, int(found[1])).encode())


def other_version(reason: str) -> int | None:
    """The version of an executor that was refused for it, by the words of either side; None: it was not for that."""
    found = _VERSIONS.search(reason)
    return int(found[1]) if found is not None else None


def _other_version(driver: int, executor: int) -> Refusal:
    return Refusal(
        "version", f"the driver speaks version {driver}, the executor {executor}; install the same phalanx on both"
    )
