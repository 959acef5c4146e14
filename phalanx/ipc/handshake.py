"""One handshake for all connections between hosts: the job's secret, its proof at both ends, and sealed messages.

*The secret* is a file on each host that only its user can read. `phalanx run` makes one for each host; with another
launcher the user puts one there, the same on all hosts. It is in no argument, no environment (which has the file's name
only) and on no network. Each use takes a key of its own, with which nothing else can be done.

*The handshake* is ``Noise_NNpsk0_25519_AESGCM_SHA256`` of the Noise Protocol Framework
(https://noiseprotocol.org/noise.html, revision 34), which `cryptography` computes: two ends of a connection that share
a secret prove it to each other, and seal what they send from then on. A listener learns nothing, not even once the
secret is known later (keys come from X25519 as well); the first byte that is changed, repeated, left out or reordered
is noticed. Of the framework's limits one is not kept: a sealed piece may be longer than 65,535 bytes, up to what
AES-GCM allows. The first message of the caller proves that it has the secret. It could be recorded and replayed, so the
listener speaks first and puts into `prologue` something that it has never used before. Pure; it reads and writes
nothing.

*The gate* is a listening socket on which a caller gets neither a thread nor memory before it has proved that it has the
secret. One thread serves all callers until then. The listener sends 32 bytes that it never sends again; the caller
answers with the first message of the handshake; no more is read. A caller that has not answered in time is dropped, and
so is the one that has waited longest when too many wait, so that strangers who do nothing, or little, keep no caller
with the secret out. Nor do those who come again and again, as long as turning one away costs less than calling: the
kernel hands connections over in order, and a caller with the secret waits behind all that came before. So a caller that
speaks first, or is gone, gets no answer at all.

The driver's WebSocket has limits of its own in place of the gate (`phalanx.run.wire`), and the same handshake.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle, and_others

VARIABLE = "PHALANX_JOB_SECRET_FILE"  # names the file
_LEAST_BYTES = 32
_MOST_BYTES = 4096
_PRINTABLE = range(0x20, 0x7F)


def read_job_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret of this job, 32 bytes; None: it was given none.

    Every byte of the file counts, but for the line break at the end of one that is text.

    Raises:
        UserError: the file cannot be read, others can read it too, or what it holds can be guessed.
    """
    name = environ.get(VARIABLE, "")
    if not name:
        return None
    path = Path(name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            problem = openness(descriptor)
            if problem:
                cure = f"have the user of the job own it: chmod 600 {path}; make another if others could read it"
                raise _bad(str(path), problem, cure)
            secret = os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _bad(name, f"cannot be read ({error.strerror})", "put the file there, on every host") from None
    # The line break at the end of a text, which editors add and copying loses.
    text = secret.removesuffix(b"\n").removesuffix(b"\r")
    if all(byte in _PRINTABLE for byte in text):
        secret = text
    if len(secret) < _LEAST_BYTES:
        cure = "make one that nobody can guess: openssl rand -hex 32 > FILE"
        raise _bad(name, f"holds {len(secret)} bytes, fewer than {_LEAST_BYTES}", cure)
    return derive(secret, "job secret")


def hand_out(folder: Path, secret: bytes) -> dict[str, str]:
    """Put a secret into a folder that only its owner can enter; returns the variable for processes of this host."""
    path = folder / "job-secret"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret.hex() + "\n")
    return {VARIABLE: str(path)}


def derive(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for this purpose alone, out of a secret that cannot be guessed (HKDF-SHA256)."""
    extracted = hmac.digest(b"phalanx", secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def openness(descriptor: int) -> str:
    """Why an open file cannot keep a secret; empty: it is a plain file of this user, closed to all others."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return "is no plain file"
    if found.st_uid != os.geteuid():
        return "belongs to somebody else"
    mode = stat.S_IMODE(found.st_mode)
    return f"has the mode {mode:o}, others can read or write it" if mode & 0o077 else ""


def _bad(path: str, problem: str, cure: str) -> UserError:
    return UserError(f"the file with the job's secret {problem}", cure=cure, field=VARIABLE, value=path)


SECRET_BYTES = 32
TAG_BYTES = 16
MESSAGE_BYTES = 32 + TAG_BYTES  # of either message of the greeting, where it says nothing else
_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"
_NONCE = struct.Struct("!4xQ")


class NotAuthenticError(ValueError):
    """The sender does not have the secret, or the message was changed on its way."""

    def __init__(self) -> None:
        super().__init__("it was changed on its way, or does not come from somebody with the secret")


class Cipher:
    """Seals in order, or opens in the same order. The key and the number of each piece are the only state."""

    def __init__(self, key: bytes) -> None:
        self._aes = AESGCM(key)
        self._number = 0

    def seal(self, content: bytes, beside: bytes = b"") -> bytes:
        """The content, encrypted and authenticated; `beside` is authenticated too, but not in it."""
        return self._aes.encrypt(self._next(), content, beside)

    def open(self, sealed: bytes, beside: bytes = b"") -> bytes:
        """What was sealed. Raises NotAuthenticError: this is not what the other side has sealed next."""
        try:
            return self._aes.decrypt(self._next(), sealed, beside)
        except InvalidTag:
            raise NotAuthenticError from None

    def seal_into(self, content: memoryview, sealed: memoryview) -> None:
        """As `seal`; `sealed` is longer by `TAG_BYTES`."""
        self._aes.encrypt_into(self._next(), content, None, sealed)

    def open_into(self, sealed: memoryview, content: memoryview) -> None:
        """As `open`. After an error, `content` is undefined."""
        try:
            self._aes.decrypt_into(self._next(), sealed, None, content)
        except InvalidTag:
            raise NotAuthenticError from None

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
            raise NotAuthenticError
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
            raise NotAuthenticError from None

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


HELLO_BYTES = 32
PROOF_S = 3.0  # what a caller has for its proof
MOST_UNPROVEN = 1024
BACKLOG = 4096
_TURNS = 8  # rounds in which all places can be taken: between them, callers that wait are heard
_RANDOM_BYTES = 4096
_REST_S = 0.05  # without a descriptor for the next connection


@dataclass(eq=False, slots=True)
class _Caller:
    connection: socket.socket
    address: str
    until_s: float
    hello: bytes
    message: bytes = b""  # as much as has come of it


class Gate:
    """Admits callers that have the secret, from a thread of its own.

    Args:
        server: a listening TCP socket, which this takes over.
        secret: gives it when it is asked for; None: there is none now, and everybody is turned away.
        label: of what is spoken and in which version, `HELLO_BYTES` less 16 at most; both sides have to have the same.
        admit: called from the thread for each who is let in, with a blocking socket, the caller's address, and the
            handshake, which is ours to go on with; it must not wait.
        report: called from the thread with a line about callers that were not, a bounded number of times.
        most: callers that may wait at one time, at most.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: Callable[[], bytes | None],
        label: bytes,
        admit: Callable[[socket.socket, str, Handshake], None],
        report: Callable[[str], None],
        *,
        name: str = "gate",
        most: int = MOST_UNPROVEN,
        proof_s: float = PROOF_S,
    ) -> None:
        self._server, self._secret, self._label = server, secret, label
        self._admit, self._report = admit, report
        self._most, self._proof_s = most, proof_s
        self._throttle = LogThrottle()
        # By descriptor; the oldest is first, which a `dict` would find in linear time.
        self._callers: OrderedDict[int, _Caller] = OrderedDict()
        self._key: tuple[bytes, PreSharedKey] | None = None  # of the secret that was used last
        self._random = b""
        self._poll = select.epoll()
        self._woken, self._wake = os.pipe()
        self._closing = False
        server.setblocking(False)
        self._poll.register(server, select.EPOLLIN)
        self._poll.register(self._woken, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, hang up on all that wait, and wait for the thread to end."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake, b"x")
        self._thread.join()
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._poll.close()
        self._server.close()
        os.close(self._woken)
        os.close(self._wake)

    def _run(self) -> None:
        listening = self._server.fileno()
        while not self._closing:
            oldest = self._oldest()
            patience_s = None if oldest is None else max(0.0, oldest.until_s - time.monotonic())
            found = [descriptor for descriptor, _ in self._poll.poll(patience_s)]
            for descriptor in found:  # first those who are here: some have their proof, others are gone and make room
                caller = self._callers.get(descriptor)
                if caller is not None:
                    self._hear(caller)
            now_s = time.monotonic()
            while (oldest := self._oldest()) is not None and oldest.until_s <= now_s:
                line = f"{oldest.address} did not prove within {self._proof_s:g} s that it may call"
                self._refuse(oldest, "time", line)
            if listening in found:
                self._accept()

    def _oldest(self) -> _Caller | None:
        return next(iter(self._callers.values()), None)

    def _accept(self) -> None:
        for _ in range(max(1, self._most // _TURNS)):
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it is gone again, or there is no descriptor left
                if (oldest := self._oldest()) is not None:
                    self._refuse(oldest, "descriptors", f"{oldest.address} was dropped: {error.strerror}")
                else:
                    time.sleep(_REST_S)
                return
            try:
                early = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:  # it waits, as it should
                self._begin(connection, address[0])
                continue
            except OSError:
                early = b""
            connection.close()
            fault = "spoke before it was asked" if early else "hung up before it had proved anything"
            self._report_one("early" if early else "gone", f"{address[0]} {fault}")

    def _begin(self, connection: socket.socket, address: str) -> None:
        self._random = self._random or os.urandom(_RANDOM_BYTES)  # many at once: a system call for each would cost more
        hello, self._random = self._label.ljust(HELLO_BYTES - 16, b"\0") + self._random[:16], self._random[16:]
        caller = _Caller(connection, address, time.monotonic() + self._proof_s, hello)
        try:
            connection.send(hello, socket.MSG_DONTWAIT)
        except OSError:
            connection.close()
            return
        self._callers[connection.fileno()] = caller
        self._poll.register(connection, select.EPOLLIN)
        if len(self._callers) > self._most and (oldest := self._oldest()) is not None:
            self._hear(oldest)  # its proof may have come just now
        if len(self._callers) > self._most and (oldest := self._oldest()) is not None:
            self._refuse(oldest, "many", f"{oldest.address} was dropped: more than {self._most} call without proof")

    def _hear(self, caller: _Caller) -> None:
        try:
            piece = caller.connection.recv(MESSAGE_BYTES - len(caller.message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.message += piece
        if not piece:
            self._refuse(caller, "gone", f"{caller.address} hung up before it had proved anything")
            return
        if len(caller.message) < MESSAGE_BYTES:
            return
        secret = self._secret()
        if secret is None:
            self._refuse(caller, "secret", f"{caller.address} called before there was a secret to know it by")
            return
        if self._key is None or self._key[0] != secret:
            self._key = secret, PreSharedKey(secret)
        handshake = Handshake(self._key[1], caller.hello, calls=False)
        try:
            handshake.read(caller.message)
        except NotAuthenticError:
            self._refuse(caller, "proof", f"{caller.address} does not have the secret of this job")
            return
        del self._callers[caller.connection.fileno()]
        self._poll.unregister(caller.connection)
        self._admit(caller.connection, caller.address, handshake)

    def _refuse(self, caller: _Caller, kind: str, line: str) -> None:
        self._drop(caller)
        self._report_one(kind, line)

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.connection.fileno()]
        with contextlib.suppress(OSError):
            caller.connection.close()

    def _report_one(self, kind: str, line: str) -> None:
        others = self._throttle.due(kind)
        if others is not None:
            self._report(line + and_others(others))


def knock(hello: bytes, label: bytes, secret: bytes) -> tuple[Handshake, bytes]:
    """What a caller answers to the first `HELLO_BYTES` of a gate: the handshake to go on with, and its message.

    Raises:
        ValueError: it is not a gate of this label.
    """
    if hello[: HELLO_BYTES - 16] != label.ljust(HELLO_BYTES - 16, b"\0"):
        raise ValueError(f"it does not speak {label.decode()}")
    handshake = Handshake(secret, hello, calls=True)
    return handshake, handshake.write()
