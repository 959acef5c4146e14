"""Hosts' clocks compared over the network: rank 0's host answers, the writers of all others ask it now and then.

The writer of the host of rank 0 listens and writes where to ``clocks/reference-aATTEMPT.json``; those of the other
hosts read that, ask some dozens of times in a row, and append what they find (`phalanx.telemetry.host_clocks`) to
``clocks/HOST.jsonl``. All of it goes on in threads of the writers: no rank takes part, no step waits.

Only who has read the file is answered. What is said are times of day, in the clear.
"""

from __future__ import annotations

import hmac
import json
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.core.addresses import is_loopback, own_address
from phalanx.core.files import write_bytes
from phalanx.telemetry.host_clocks import ClockExchange, ClockTracker

EXCHANGES = 24
"""In a round: about 3 ms within a data centre."""

PERIOD_S = 60.0
_FIRST_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # between the first rounds, which find the drift
_LOOK_S = 0.5  # between two looks for the reference
_TIMEOUT_S = 5.0
_MOST_CONNECTIONS = 1024

_TOKEN_BYTES = 16
_QUESTION = struct.Struct("!16sQ")  # token, number
_ANSWER = struct.Struct("!Qqq")  # number, heard, answered


class ClockServer:
    """Says what time it is, in a thread of its own.

    Args:
        clock_ns: Unix nanoseconds.
        address: where it listens; its port is found.
    """

    def __init__(
        self, clock_ns: Callable[[], int], address: str, family: socket.AddressFamily = socket.AF_INET
    ) -> None:
        self._clock_ns = clock_ns
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((address, 0), family=family, backlog=512)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._awake = socket.socketpair()
        self._poll = selectors.DefaultSelector()
        self._poll.register(self._listener, selectors.EVENT_READ)
        self._poll.register(self._awake, selectors.EVENT_READ)
        self._connections: dict[socket.socket, bytearray] = {}
        self._thread = threading.Thread(target=self._serve, name="clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._poll.select():
                if key.fileobj is self._awake:
                    self._poll.close()
                    for one in (*self._connections, self._listener, self._awake):
                        one.close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                    self._answer(key.fileobj)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._connections) >= _MOST_CONNECTIONS:
                self._end(next(iter(self._connections)))  # the oldest: a round takes milliseconds
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[connection] = bytearray()
            self._poll.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        got = self._connections[connection]
        try:
            chunk = connection.recv(_QUESTION.size - len(got))
            heard_ns = self._clock_ns()
            got += chunk
            if len(got) == _QUESTION.size:
                token, number = _QUESTION.unpack(got)
                got.clear()
                if hmac.compare_digest(token, self.token):
                    connection.sendall(_ANSWER.pack(number, heard_ns, self._clock_ns()))
                    return
                chunk = b""
            if not chunk:
                self._end(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        del self._connections[connection]
        self._poll.unregister(connection)
        connection.close()


def ask(
    address: str,
    port: int,
    token: bytes,
    *,
    clock_ns: Callable[[], int],
    count: int = EXCHANGES,
    timeout_s: float = _TIMEOUT_S,
) -> list[ClockExchange]:
    """One round of exchanges with a `ClockServer`.

    Raises:
        OSError: it cannot be reached, does not answer within `timeout_s`, or says something else.
    """
    found = []
    deadline_s = time.monotonic() + timeout_s
    with socket.create_connection((address, port), timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(count):
            sent_ns = clock_ns()
            connection.sendall(_QUESTION.pack(token, number))
            answer = connection.recv(_ANSWER.size, socket.MSG_WAITALL)
            returned_ns = clock_ns()
            if len(answer) < _ANSWER.size:
                raise ConnectionError("the reference has hung up")
            said, heard_ns, answered_ns = _ANSWER.unpack(answer)
            if said != number:
                raise ConnectionError("not a reference of clocks")
            found.append(ClockExchange(sent_ns, heard_ns, answered_ns, returned_ns))
            if time.monotonic() > deadline_s:
                break
    return found


class SharedFiles:
    """Small files that all hosts of a run see, by name below its folder of telemetry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, content: bytes) -> None:
        """Write one whole. OSError: it cannot be written."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)

    def read(self, name: str) -> bytes | None:
        """One; None: it is not there, or cannot be read now."""
        try:
            return (self._folder / name).read_bytes()
        except OSError:
            return None


class HostClock:
    """One host's part in it, for its writer.

    Args:
        folder: of telemetry, for this host's estimates.
        files: by which hosts find each other.
        store_host: where the job's store is, as this host reaches it: by that network others reach this host. None: the
            job has no other host.
        period_s: between two rounds, after some that come sooner.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        files: SharedFiles,
        store_host: str | None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        period_s: float = PERIOD_S,
    ) -> None:
        self._path = folder / "clocks" / f"{host}.jsonl"
        self._host, self._files, self._store_host, self._period_s = host, files, store_host, period_s
        self._read_ns = clock_ns
        self._attempt: int | None = None
        self._is_reference = False
        self._server: ClockServer | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.problem = ""  # why there is no estimate, for people

    def follow(self, attempt: int, unix_offset_ns: int, *, is_reference: bool) -> None:
        """Take part in an attempt of the job, from now on; returns at once, and does nothing when called again.

        Args:
            unix_offset_ns: what is added to the monotonic clock, for spans of this host and attempt as well.
            is_reference: rank 0 is on this host.
        """
        if attempt == self._attempt and (self._is_reference or not is_reference):
            return  # rank 0 may end before others do
        self.close()
        self._attempt, self._is_reference, self._ended = attempt, is_reference, threading.Event()

        def clock_ns() -> int:
            return self._read_ns() + unix_offset_ns

        if is_reference or self._store_host is None:
            # By its own clock it is not ahead.
            self._note({"at_ns": clock_ns(), "offset_ns": 0, "error_ns": 0.0, "reference": self._host})
            if self._store_host is not None:
                self._serve(clock_ns, self._store_host)
        else:
            given = (attempt, clock_ns, self._store_host, self._ended)
            self._thread = threading.Thread(target=self._compare, args=given, name="clock", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Take part no more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)
            self._thread = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _serve(self, clock_ns: Callable[[], int], store_host: str) -> None:
        try:
            address, family = own_address(store_host)
            # Others know this host by the store's name alone where that leads back to itself.
            is_stores = is_loopback(address) and not is_loopback(store_host)
            self._server = server = ClockServer(clock_ns, "" if is_stores else address, family)
            place = {
                "host": self._host,
                "address": "" if is_loopback(address) else address,
                "port": server.port,
                "token": server.token.hex(),
            }
            self._files.write(_reference_name(self._attempt), json.dumps(place).encode())
        except OSError as error:
            self.problem = f"this host cannot be the reference: {error}"

    def _compare(self, attempt: int, clock_ns: Callable[[], int], store_host: str, ended: threading.Event) -> None:
        tracker, waits_s = ClockTracker(), iter(_FIRST_WAITS_S)
        wait_s = 0.0
        while not ended.wait(wait_s * random.uniform(0.8, 1.2)):  # hosts do not all come at once
            wait_s = _LOOK_S
            place = self._reference(attempt)
            if place is None:
                continue
            try:
                token = bytes.fromhex(place["token"])
                exchanges = ask(place["address"] or store_host, int(place["port"]), token, clock_ns=clock_ns)
                found = tracker.add(exchanges)
            except (OSError, ValueError) as error:
                self.problem = f"{place['host']} at {place['address'] or store_host}:{place['port']}: {error}"
                if isinstance(error, ValueError):
                    tracker = ClockTracker()
                continue
            self.problem = ""
            if found.bend_ns:
                waits_s = iter(_FIRST_WAITS_S)
            with suppress(OSError):  # a full disk: the next one may be written
                self._note(asdict(found) | {"reference": place["host"]})
            wait_s = min(next(waits_s, self._period_s), self._period_s)

    def _reference(self, attempt: int) -> dict[str, Any] | None:
        content = self._files.read(_reference_name(attempt))
        try:
            place = json.loads(content or b"")
            return place if {"host", "address", "port", "token"} <= place.keys() else None
        except (ValueError, AttributeError):
            return None

    def _note(self, line: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"host": self._host, "attempt": self._attempt, **line}) + "\n")


def _reference_name(attempt: int | None) -> str:
    return f"clocks/reference-a{attempt}.json"
