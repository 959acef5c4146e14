"""Thousands of members in one thread: each has its own socket and says its script, waiting for every answer before it
says the next thing, as a TCPStore client does. They leave out what a member does beside talking to the store."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rendezvous.wire import Request


@dataclass
class Outcome:
    """What replaying cost."""

    connect_s: float
    seconds: float
    members: int
    requests: int
    sent_bytes: int
    received_bytes: int

    @property
    def total_s(self) -> float:
        """Connecting and meeting."""
        return self.connect_s + self.seconds


class _Member:
    __slots__ = ("answer", "at", "got", "said", "script", "socket")

    def __init__(self, script: Sequence[tuple[Request, bytes]]) -> None:
        self.script, self.at, self.got = script, 0, bytearray()
        self.answer, self.said = b"", False
        self.socket = socket.socket()


class Crowd:
    """Members of a store at `target`, one for each of `scripts`."""

    def __init__(self, target: tuple[str, int], scripts: Sequence[Sequence[Request]]) -> None:
        self._target = target
        encoded: dict[int, tuple[Request, bytes]] = {}  # requests are shared between members, so their bytes are too
        for script in scripts:
            for request in script:
                if id(request) not in encoded:
                    encoded[id(request)] = (request, request.encode())
        self._members = [_Member([encoded[id(request)] for request in script]) for script in scripts]
        self._poll = selectors.EpollSelector()
        self._sent = self._received = self._requests = 0

    def run(self, timeout_s: float = 600.0) -> Outcome:
        """Connect all, then let all say what they have to say, each as fast as it gets answers.

        Raises:
            TimeoutError: not all were done within `timeout_s`.
            ConnectionError: the store closed a connection.
        """
        begin = time.perf_counter()
        for member in self._members:
            member.socket.connect(self._target)
            member.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            member.socket.setblocking(False)
        connected = time.perf_counter()
        waiting = 0
        for member in self._members:
            if not self._speak(member):
                self._poll.register(member.socket, selectors.EVENT_READ, member)
                waiting += 1
        while waiting:
            if time.perf_counter() - begin > timeout_s:
                raise TimeoutError(f"{waiting} members still wait after {timeout_s} s")
            for key, _ in self._poll.select(1.0):
                if self._listen(key.data):
                    self._poll.unregister(key.fileobj)
                    waiting -= 1
        end = time.perf_counter()
        return Outcome(
            connected - begin, end - connected, len(self._members), self._requests, self._sent, self._received
        )

    def close(self) -> None:
        """Hang up."""
        for member in self._members:
            member.socket.close()
        self._poll.close()

    def _speak(self, member: _Member) -> bool:
        """Say what can be said without waiting for an answer; True when there is nothing more to say or hear."""
        while member.at < len(member.script):
            request, encoded = member.script[member.at]
            if request.only_after not in (None, member.answer):
                member.at += 1
                continue
            if not member.said:
                self._send(member.socket, encoded)
                member.said = True
            needed = request.answer_bytes(member.got)
            if needed is None or len(member.got) < needed:
                return False
            member.answer = bytes(member.got[:needed])
            del member.got[:needed]
            member.at += 1
            member.said = False
        return True

    def _send(self, sink: socket.socket, data: bytes) -> None:
        sent = sink.send(data)
        if sent < len(data):  # a full socket, which only large values meet: the rest may block
            sink.setblocking(True)
            sink.sendall(data[sent:])
            sink.setblocking(False)
        self._requests += 1
        self._sent += len(data)

    def _listen(self, member: _Member) -> bool:
        chunk = member.socket.recv(1 << 18)
        if not chunk:
            raise ConnectionError("the store closed the connection")
        self._received += len(chunk)
        member.got += chunk
        return self._speak(member)
