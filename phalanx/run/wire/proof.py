"""Mutual proof that both sides know the job's token, which itself never travels.

The driver sends a nonce; the executor answers with its own and an HMAC-SHA256, under the token, of everything that both
have said; the driver answers with another HMAC of the same. A recorded answer does not fit the next nonce, and an
answer sent back does not fit the role in it. Whoever can change packets on the way after that is kept off by TLS, not
by this.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import Literal, NamedTuple

import msgspec

from phalanx.core.errors import UserError
from phalanx.run import messages
from phalanx.run.wire.codec import INSTANCE_BYTES, NONCE_BYTES, Accepted, Answer, Challenge

MIN_TOKEN_BYTES = 16
_LABEL = "phalanx run: executor and driver"

PASS = "Phalanx-Pass"
"""The header with it."""

PASS_S = 300.0
"""By so much the clocks of hosts may differ."""

_PASS = re.compile(rb"\r\n" + PASS.encode() + rb": (\d{1,12})\.([0-9a-f]{64})\r\n")

Role = Literal["driver", "executor"]


class Refusal(NamedTuple):
    """Why a handshake is refused.

    Attributes:
        kind: one of a few words, to count by.
        reason: for people on both sides; it fits into a close frame (123 bytes).
    """

    kind: str
    reason: str


def check_token(token: bytes) -> None:
    """Raise UserError when the token is too short to be one."""
    if len(token) < MIN_TOKEN_BYTES:
        raise UserError(
            f"a token of {len(token)} bytes can be guessed",
            cure=f"use at least {MIN_TOKEN_BYTES} random bytes",
            field="token",
        )


def new_nonce() -> bytes:
    """A number used once."""
    return secrets.token_bytes(NONCE_BYTES)


def new_instance() -> bytes:
    """What tells one link of a host from another."""
    return secrets.token_bytes(INSTANCE_BYTES)


def answer(token: bytes, challenge: Challenge, job: str, host: str, instance: bytes, nonce: bytes) -> Answer:
    """What an executor answers to the driver's challenge."""
    proof = _proof(token, "executor", messages.VERSION, job, host, instance, challenge.nonce, nonce)
    return Answer(messages.VERSION, job, host, instance, nonce, proof)


def accepted(token: bytes, challenge: Challenge, given: Answer, received: int) -> Accepted:
    """What the driver says to an executor that has proved itself."""
    return Accepted(_proof_of(token, "driver", challenge, given), received)


def refuse_answer(token: bytes, job: str, challenge: Challenge, given: Answer) -> Refusal | None:
    """Why the driver refuses this answer; None: it is good."""
    if given.version != messages.VERSION:
        return _other_version(messages.VERSION, given.version)
    if given.job != job:
        return Refusal("job", "this driver is of another job; check the address that the executor was told")
    if not hmac.compare_digest(given.proof, _proof_of(token, "executor", challenge, given)):
        return Refusal("token", "the executor does not prove that it knows this job's token; check its token file")
    return None


def refuse_challenge(challenge: Challenge) -> Refusal | None:
    """Why an executor does not answer; None: it does."""
    if challenge.version != messages.VERSION:
        return _other_version(challenge.version, messages.VERSION)
    return None


def refuse_driver(token: bytes, challenge: Challenge, given: Answer, reply: Accepted) -> Refusal | None:
    """Why an executor does not trust this driver; None: it does."""
    if not hmac.compare_digest(reply.proof, _proof_of(token, "driver", challenge, given)):
        return Refusal("token", "the driver does not prove that it knows this job's token; check its token file")
    return None


def make_pass(token: bytes, unix_s: float) -> str:
    """What an executor shows first of all, for a door that its neighbours have shut by failing too often.

    Whoever hears it can come as far as the challenge with it, for some minutes, and no further.
    """
    now = str(int(unix_s))
    return f"{now}.{_pass_proof(token, now)}"


def is_pass(token: bytes, request: bytes, unix_s: float) -> bool:
    """Whether a request shows a pass of about now."""
    found = _PASS.search(request)
    if found is None or abs(int(found[1]) - unix_s) > PASS_S:
        return False
    return hmac.compare_digest(found[2].decode(), _pass_proof(token, found[1].decode()))


def _pass_proof(token: bytes, said: str) -> str:
    return hmac.digest(token, f"{_LABEL}: pass {said}".encode(), "sha256").hex()


def _other_version(driver: int, executor: int) -> Refusal:
    return Refusal(
        "version", f"the driver speaks version {driver}, the executor {executor}; install the same phalanx on both"
    )


def _proof_of(token: bytes, role: Role, challenge: Challenge, given: Answer) -> bytes:
    return _proof(token, role, given.version, given.job, given.host, given.instance, challenge.nonce, given.nonce)


def _proof(token: bytes, role: Role, *said: int | str | bytes) -> bytes:
    # MessagePack carries the length of every part, so that no two lists of parts give the same bytes.
    return hmac.digest(token, msgspec.msgpack.encode([_LABEL, role, *said]), "sha256")
