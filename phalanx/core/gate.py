"""A listening socket on which a caller gets neither thread nor memory before it has proved that it has the secret.

One thread looks after all who have not yet. The listener speaks first, 32 bytes that it never says again; the caller
answers with the first message of `phalanx.core.noise`; that is all that is read of it. Whoever has not answered in time
is dropped, and so is the one who has waited longest when too many wait, so that strangers who do nothing, or little,
keep nobody out. Nor do those who come again and again, as long as to turn one away costs less than to call: the kernel
hands connections over in the order in which they came, and whoever has the secret waits behind all that are not dealt
with yet. So a caller who speaks first, or is gone, is not even spoken to. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.noise import MESSAGE_BYTES, Handshake, NotAuthenticError, PreSharedKey
from phalanx.core.throttle import LogThrottle, and_others

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
        ValueError: it is no gate of this label.
    """
    if hello[: HELLO_BYTES - 16] != label.ljust(HELLO_BYTES - 16, b"\0"):
        raise ValueError(f"it does not speak {label.decode()}")
    handshake = Handshake(secret, hello, calls=True)
    return handshake, handshake.write()
