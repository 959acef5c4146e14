"""Strangers before a gate: however many, however slow, they get no thread, and keep nobody out who has the secret."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from phalanx.ipc.handshake import HELLO_BYTES, MESSAGE_BYTES, Gate, Handshake, knock

SECRET = bytes(range(32))
LABEL = b"test 1"
GUARD_S = 240.0
MOST = 50


class House:
    """What is behind a gate: who was let in, and what was said of the others."""

    def __init__(self, proof_s: float = GUARD_S, secret: bytes | None = SECRET) -> None:
        self.guests: queue.SimpleQueue[tuple[socket.socket, Handshake]] = queue.SimpleQueue()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.secret = secret
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address = self.server.getsockname()
        self.gate = Gate(
            self.server, lambda: self.secret, LABEL, self._admit, self.lines.put, most=MOST, proof_s=proof_s
        )

    def _admit(self, connection: socket.socket, address: str, handshake: Handshake) -> None:
        assert address == "127.0.0.1"
        self.guests.put((connection, handshake))
        assert self.goes_on.wait(GUARD_S)

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, GUARD_S)

    def come_in(self, secret: bytes = SECRET) -> bytes:
        """Call with a secret; what is heard behind the gate."""
        with self.call() as connection:
            handshake, proof = knock(connection.recv(HELLO_BYTES, socket.MSG_WAITALL), LABEL, secret)
            connection.sendall(proof)
            guest, theirs = self.guests.get(timeout=GUARD_S)
            with guest:
                guest.sendall(theirs.write(b"come in"))
                return handshake.read(connection.recv(MESSAGE_BYTES + 7, socket.MSG_WAITALL))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this lasts, the gate does nothing, and who calls has to wait."""
        self.goes_on.clear()
        assert self.come_in() == b"come in"
        try:
            yield
        finally:
            self.goes_on.set()

    def cpu_s(self) -> float:
        """That the gate has used."""
        assert self.gate._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.gate._thread.ident))

    def said(self) -> list[str]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self.lines.get_nowait())
        return found


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.gate.close()


def is_dropped(connection: socket.socket) -> bool:
    """Whether it is hung up on, after the first words."""
    connection.settimeout(GUARD_S)
    with suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return True


def test_who_has_the_secret_comes_in_and_nobody_else(house: House) -> None:
    assert house.come_in() == b"come in"
    with house.call() as connection:
        connection.sendall(knock(connection.recv(HELLO_BYTES, socket.MSG_WAITALL), LABEL, bytes(32))[1])
        assert is_dropped(connection)
    assert "127.0.0.1 does not have the secret" in house.lines.get(timeout=GUARD_S)
    assert house.guests.empty()


def test_idle_ones_take_no_thread_and_keep_nobody_out(house: House) -> None:
    threads = set(threading.enumerate())
    with ExitStack() as stack:
        idle = [stack.enter_context(house.call()) for _ in range(4 * MOST)]
        assert house.come_in() == b"come in"
        assert all(is_dropped(connection) for connection in idle[: 3 * MOST])  # those who came first
        assert set(threading.enumerate()) <= threads
        assert house.come_in() == b"come in"
    assert any("more than 50 call without proof" in line for line in house.said())


def test_those_who_come_again_and_again_keep_nobody_out(house: House) -> None:
    stopping = threading.Event()

    def come_again() -> None:
        while not stopping.is_set():
            with suppress(OSError), house.call() as connection:
                connection.sendall(b"x" * 47)

    threads = [threading.Thread(target=come_again, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert house.come_in() == b"come in"
    finally:
        stopping.set()
    for thread in threads:
        thread.join()


def test_who_speaks_before_it_is_asked_is_not_spoken_to(house: House) -> None:
    with house.busy():
        connection = house.call()
        connection.sendall(bytes(MESSAGE_BYTES))
    with connection:
        connection.settimeout(GUARD_S)
        heard = b""
        with suppress(ConnectionResetError):
            heard = connection.recv(1000)
        assert heard == b""
    assert "127.0.0.1 spoke before it was asked" in house.lines.get(timeout=GUARD_S)
    assert house.come_in() == b"come in"


@pytest.mark.parametrize("words", [b"", b"x", bytes(MESSAGE_BYTES)])
def test_to_turn_somebody_away_costs_no_more_than_to_come(house: House, words: bytes) -> None:
    """Else strangers of one machine fill the queue of calls, which is served in the order in which they came."""
    with house.busy():
        before_s, began_s = time.thread_time(), house.cpu_s()
        for _ in range(1000):
            with house.call() as connection:
                connection.sendall(words)
        theirs_s = time.thread_time() - before_s
    assert house.come_in() == b"come in"
    ours_s = house.cpu_s() - began_s
    assert ours_s < theirs_s


def test_slow_ones_are_dropped_however_slowly_they_speak() -> None:
    """A byte now and then does not buy time."""
    house = House(proof_s=0.3)
    try:
        with house.call() as silent, house.call() as slow:
            stopping = threading.Event()

            def dribble() -> None:
                while not stopping.wait(0.05):
                    with suppress(OSError):
                        slow.sendall(b"x")

            thread = threading.Thread(target=dribble, daemon=True)
            thread.start()
            assert is_dropped(silent) and is_dropped(slow)
            stopping.set()
            thread.join()
        assert "did not prove within 0.3 s" in house.lines.get(timeout=GUARD_S)
    finally:
        house.gate.close()


def test_lines_come_at_a_bounded_rate(house: House) -> None:
    for _ in range(300):
        with house.call() as connection:
            connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
            connection.sendall(bytes(MESSAGE_BYTES))
            assert is_dropped(connection)
    assert house.come_in() == b"come in"
    assert 1 <= len(house.said()) <= 6


def test_before_there_is_a_secret_nobody_comes_in(house: House) -> None:
    house.secret = None
    with house.call() as connection:
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(bytes(MESSAGE_BYTES))
        assert is_dropped(connection)
    assert "before there was a secret" in house.lines.get(timeout=GUARD_S)
    house.secret = SECRET
    assert house.come_in() == b"come in"


def test_what_is_no_gate_of_this_kind_is_said() -> None:
    with pytest.raises(ValueError, match="it does not speak test 1"):
        knock(bytes(HELLO_BYTES), LABEL, SECRET)


def test_closing_hangs_up_on_those_who_wait(house: House) -> None:
    with house.call() as connection:
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        house.gate.close()
        assert is_dropped(connection)
