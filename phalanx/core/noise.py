"""Two ends of a connection that share a secret: they prove it to each other, and what they then say is sealed.

This is ``Noise_NNpsk0_25519_AESGCM_SHA256`` of the Noise Protocol Framework (https://noiseprotocol.org/noise.html,
revision 34), which `cryptography` computes. Whoever listens learns nothing, not even once the secret is known later
(keys come from X25519 as well); whoever changes, repeats, leaves out or reorders anything is noticed at the first byte
that he touched. Of the framework's limits one is not kept: what is sealed at once may be longer than 65,535 bytes, up
to what AES-GCM allows. Pure; it reads and writes nothing. Torch-free.

The first message of the caller proves that it has the secret. It could be recorded and said again, so the listener
speaks first and gives `prologue` something that it has never given before.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SECRET_BYTES = 32
TAG_BYTES = 16
MESSAGE_BYTES = 32 + TAG_BYTES
"""Of either message of the greeting, where it says nothing else."""

_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"
_NONCE = struct.Struct("!4xQ")


class NotAuthenticError(ValueError):
    """It does not come from somebody who has the secret, or not as that one has sent it."""


class Cipher:
    """Seals in order, or opens in the same order. The key and the number of each piece are the only state."""

    def __init__(self, key: bytes) -> None:
        self._aes = AESGCM(key)
        self._number = 0

    def seal(self, content: bytes, beside: bytes = b"") -> bytes:
        """What nobody else can read or change; `beside` cannot be changed either, but is not in it."""
        return self._aes.encrypt(self._next(), content, beside)

    def open(self, sealed: bytes, beside: bytes = b"") -> bytes:
        """What was sealed.

        Raises:
            NotAuthenticError: this is not what the other side has sealed next.
        """
        try:
            return self._aes.decrypt(self._next(), sealed, beside)
        except InvalidTag:
            raise _wrong() from None

    def seal_into(self, content: memoryview, sealed: memoryview) -> None:
        """As `seal`; `sealed` is longer by `TAG_BYTES`."""
        self._aes.encrypt_into(self._next(), content, None, sealed)

    def open_into(self, sealed: memoryview, content: memoryview) -> None:
        """As `open`. After an error, `content` is undefined."""
        try:
            self._aes.decrypt_into(self._next(), sealed, None, content)
        except InvalidTag:
            raise _wrong() from None

    def _next(self) -> bytes:
        number, self._number = self._number, self._number + 1
        return _NONCE.pack(number)


class PreSharedKey:
    """A secret as the greeting takes it up: computed once by a listener that has many proofs to judge.

    Args:
        secret: `SECRET_BYTES` that only the two sides know.
    """

    __slots__ = ("chain", "hashed")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes; it has to have {SECRET_BYTES}")
        self.chain, self.hashed, _ = _expand(_NAME, secret, 3)  # a first message seals nothing under the third


class Handshake:
    """The greeting of one side: the caller writes and then reads, the listener reads and then writes.

    Args:
        secret: that only the two sides know.
        prologue: what both know and want to be sure to know alike.
        ephemeral: for tests; None: a new key.
    """

    def __init__(
        self,
        secret: bytes | PreSharedKey,
        prologue: bytes,
        *,
        calls: bool,
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        key = secret if isinstance(secret, PreSharedKey) else PreSharedKey(secret)
        self._calls = calls
        self._ephemeral = ephemeral
        self._theirs = b""
        self._hash, self._chain = _NAME, key.chain
        self._cipher: Cipher
        self._mix_hash(prologue)
        self._mix_hash(key.hashed)

    def write(self, payload: bytes = b"") -> bytes:
        """Our message."""
        if self._ephemeral is None:
            self._ephemeral = X25519PrivateKey.generate()
        public = self._ephemeral.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._mix_public(public)
        if not self._calls:
            self._mix_exchange()
        sealed = self._cipher.seal(payload, self._hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """What their message says.

        Raises:
            NotAuthenticError: they do not have the secret, or it is of another conversation.
        """
        public, sealed = message[:32], message[32:]
        if len(sealed) < TAG_BYTES:
            raise _wrong()
        self._theirs = public
        self._mix_public(public)
        if self._calls:
            self._mix_exchange()
        payload = self._cipher.open(sealed, self._hash)
        self._mix_hash(sealed)
        return payload

    def ciphers(self) -> tuple[Cipher, Cipher]:
        """For what we say and for what they say, after both messages."""
        first, second = (Cipher(key) for key in _expand(self._chain, b"", 2))
        return (first, second) if self._calls else (second, first)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_public(self, public: bytes) -> None:
        self._mix_hash(public)
        self._mix_key(public)

    def _mix_exchange(self) -> None:
        assert self._ephemeral is not None
        try:
            self._mix_key(self._ephemeral.exchange(X25519PublicKey.from_public_bytes(self._theirs)))
        except ValueError:  # a point of small order: the result would be known to all
            raise _wrong() from None

    def _mix_key(self, material: bytes) -> None:
        self._chain, key = _expand(self._chain, material, 2)
        self._cipher = Cipher(key)


def _expand(chain: bytes, material: bytes, count: int) -> list[bytes]:
    """HKDF (RFC 5869) as the framework names it."""
    secret = hmac.digest(chain, material, "sha256")
    found: list[bytes] = []
    for number in range(1, count + 1):
        found.append(hmac.digest(secret, (found[-1] if found else b"") + bytes([number]), "sha256"))
    return found


def _wrong() -> NotAuthenticError:
    return NotAuthenticError("it was changed on its way, or does not come from somebody with the secret")
