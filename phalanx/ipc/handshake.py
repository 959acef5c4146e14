"""One handshake for all connections between hosts: the job's secret, its proof at both ends, and sealed messages.

*The secret* is a file on each host that only its user can read.

`phalanx run` makes one for each host; whoever starts ranks otherwise puts one there himself, the same on all hosts. It
is in no argument, no environment (which has the file's name only) and on no network. Each use takes a key of its own,
with which nothing else can be done.

*The seal.* Two ends of a connection that share a secret prove it to each other; what they then say is sealed.

This is ``Noise_NNpsk0_25519_AESGCM_SHA256`` of the Noise Protocol Framework (https://noiseprotocol.org/noise.html,
revision 34), which `cryptography` computes. Whoever listens learns nothing, not even once the secret is known later
(keys come from X25519 as well); whoever changes, repeats, leaves out or reorders anything is noticed at the first byte
that he touched. Of the framework's limits one is not kept: what is sealed at once may be longer than 65,535 bytes, up
to what AES-GCM allows. Pure; it reads and writes nothing.

The first message of the caller proves that it has the secret. It could be recorded and said again, so the listener
speaks first and gives `prologue` something that it has never given before.

*The gate* is a listening socket on which a caller gets neither thread nor memory before it has proved that it has the
secret.

One thread looks after all who have not yet. The listener speaks first, 32 bytes that it never says again; the caller
answers with the first message of the handshake; that is all that is read of it. Whoever has not answered in time is
dropped, and so is the one who has waited longest when too many wait, so that strangers who do nothing, or little, keep
nobody out. Nor do those who come again and again, as long as to turn one away costs less than to call: the kernel hands
connections over in the order in which they came, and whoever has the secret waits behind all that are not dealt with
yet. So a caller who speaks first, or is gone, is not even spoken to.
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

VARIABLE = "PHALANX_JOB_SECRET_FILE"
"""Names the file."""

HANDED_OUT = "job-secret"
"""What `hand_out` calls it."""

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
    try:
        content = _read(Path(name))
    except OSError as error:
        raise _bad(name, f"cannot be read ({error.strerror})", "put the file there, on every host") from None
    secret = _without_line_break(content)
    if len(secret) < _LEAST_BYTES:
        cure = "make one that nobody can guess: openssl rand -hex 32 > FILE"
        raise _bad(name, f"holds {len(secret)} bytes, fewer than {_LEAST_BYTES}", cure)
    return derive(secret, "job secret")


def hand_out(folder: Path, secret: bytes) -> dict[str, str]:
    """Put a secret into a folder that only its owner can enter; the variable that tells processes of this host."""
    path = folder / HANDED_OUT
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
    """Why an open file keeps no secret; empty: it is a plain one of this user that nobody else can read or write."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return "is no plain file"
    if found.st_uid != os.geteuid():
        return "belongs to somebody else"
    mode = stat.S_IMODE(found.st_mode)
    return f"has the mode {mode:o}, others can read or write it" if mode & 0o077 else ""


def _without_line_break(content: bytes) -> bytes:
    """Of text (printable ASCII) what stands before the line break at its end, which editors add and copying loses; of
    anything else every byte."""
    text = content.removesuffix(b"\n").removesuffix(b"\r")
    return text if all(byte in _PRINTABLE for byte in text) else content


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        problem = openness(descriptor)
        if problem:
            cure = f"have the user of the job own it: chmod 600 {path}; make another if others could read it"
            raise _bad(str(path), problem, cure)
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _bad(path: str, problem: str, cure: str) -> UserError:
    return UserError(f"the file with the job's secret {problem}", cure=cure, field=VARIABLE, value=path)


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


HELLO_BYTES = 32
PROOF_S = 3.0
"""What a caller has for its proof."""

MOST_UNPROVEN = 1024
BACKLOG = 4096
_TURNS = 8  # in which all places can be taken: between them, those who wait are heard
_RANDOM_BYTES = 4096
_REST_S = 0.05  # without a descriptor for the next connection


@dataclass(eq=False, slots=True)
class _Caller:
    """Somebody who has not proved anything yet."""

    connection: socket.socket
    address: str
    until_s: float
    hello: bytes
    said: bytes = b""


Admit = Callable[[socket.socket, str, Handshake], None]
"""Is given a blocking socket, the caller's address, and the handshake, which is ours to go on with."""


class Gate:
    """Lets in, from a thread of its own, who has the secret.

    Args:
        server: a listening TCP socket, which this takes over.
        secret: gives it when it is asked for; None: there is none now, and everybody is turned away.
        label: of what is spoken and in which version, `HELLO_BYTES` less 16 at most; both sides have to have the same.
        admit: called from the thread for each who is let in; it must not wait.
        report: called from the thread with a line about those who were not, a bounded number of them.
        name: of the thread.
        most: callers that may wait at one time, at most.
        proof_s: see `PROOF_S`.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: Callable[[], bytes | None],
        label: bytes,
        admit: Admit,
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
        # By descriptor; those who came first are first, which a `dict` would find in linear time.
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
        """Let nobody in any more, hang up on those who wait, and wait for the thread to be gone."""
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
            found = [descriptor for descriptor, _ in self._poll.poll(self._patience_s())]
            for descriptor in found:  # first those who are here: some have their proof, others are gone and make room
                caller = self._callers.get(descriptor)
                if caller is not None:
                    self._hear(caller)
            self._drop_late()
            if listening in found:
                self._accept()

    def _patience_s(self) -> float | None:
        oldest = self._oldest()
        return None if oldest is None else max(0.0, oldest.until_s - time.monotonic())

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        while (oldest := self._oldest()) is not None and oldest.until_s <= now_s:
            self._refuse(oldest, "time", f"{oldest.address} did not prove within {self._proof_s:g} s that it may call")

    def _accept(self) -> None:
        for _ in range(max(1, self._most // _TURNS)):
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it is gone again, or there is no descriptor left
                self._make_room(error)
                return
            early = _heard_early(connection)
            if early is None:
                self._begin(connection, address[0])
            else:
                connection.close()
                fault = "spoke before it was asked" if early else "hung up before it had proved anything"
                self._say("early" if early else "gone", f"{address[0]} {fault}")

    def _begin(self, connection: socket.socket, address: str) -> None:
        self._random = self._random or os.urandom(_RANDOM_BYTES)
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

    def _oldest(self) -> _Caller | None:
        return next(iter(self._callers.values()), None)

    def _hear(self, caller: _Caller) -> None:
        try:
            piece = caller.connection.recv(MESSAGE_BYTES - len(caller.said), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        caller.said += piece
        if not piece:
            self._refuse(caller, "gone", f"{caller.address} hung up before it had proved anything")
        elif len(caller.said) == MESSAGE_BYTES:
            self._judge(caller)

    def _judge(self, caller: _Caller) -> None:
        secret = self._secret()
        if secret is None:
            self._refuse(caller, "secret", f"{caller.address} called before there was a secret to know it by")
            return
        if self._key is None or self._key[0] != secret:
            self._key = secret, PreSharedKey(secret)
        handshake = Handshake(self._key[1], caller.hello, calls=False)
        try:
            handshake.read(caller.said)
        except NotAuthenticError:
            self._refuse(caller, "proof", f"{caller.address} does not have the secret of this job")
            return
        del self._callers[caller.connection.fileno()]
        self._poll.unregister(caller.connection)
        self._admit(caller.connection, caller.address, handshake)

    def _make_room(self, error: OSError) -> None:
        oldest = self._oldest()
        if oldest is not None:
            self._refuse(oldest, "descriptors", f"{oldest.address} was dropped: {error.strerror}")
        else:
            time.sleep(_REST_S)

    def _refuse(self, caller: _Caller, kind: str, line: str) -> None:
        self._drop(caller)
        self._say(kind, line)

    def _drop(self, caller: _Caller) -> None:
        del self._callers[caller.connection.fileno()]
        with contextlib.suppress(OSError):
            caller.connection.close()

    def _say(self, kind: str, line: str) -> None:
        others = self._throttle.due(kind)
        if others is not None:
            self._report(line + and_others(others))


def _heard_early(connection: socket.socket) -> bytes | None:
    """What has come of somebody who was not spoken to yet; nothing: it has hung up; None: it waits, as it should."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def knock(hello: bytes, label: bytes, secret: bytes) -> tuple[Handshake, bytes]:
    """What a caller answers to the first `HELLO_BYTES` of a gate: the handshake to go on with, and its message.

    Raises:
        ValueError: it is not a gate of this label.
    """
    if hello[: HELLO_BYTES - 16] != label.ljust(HELLO_BYTES - 16, b"\0"):
        raise ValueError(f"it does not speak {label.decode()}")
    handshake = Handshake(secret, hello, calls=True)
    return handshake, handshake.write()
