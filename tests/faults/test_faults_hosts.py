"""Faults from outside, on real processes, sockets, interfaces and a small disk; all is as before afterwards."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults_helpers import GUARD_S, running, state_of, until

from phalanx.core.errors import UserError
from phalanx.faults.case_manifest import Incident, Lasts, Place, When
from phalanx.faults.fault_schedule import KINDS
from phalanx.faults.host_faults import (
    LARGEST_DISK_BYTES,
    VARIABLE,
    Machine,
    NotDoneError,
    full_disk,
    happen,
    is_time,
    jumped,
    kill,
    kill_host,
    link_down,
    marked,
    set_offset,
    small_disk,
    stopped,
    wall_clock,
)
from phalanx.faults.tcp_proxy import Link

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# A host: it starts a child in a session of its own, and says its process id.
TREE = """\
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def outside(kind: str, what: Any, numbers: tuple[int, ...] = (), **settings: Any) -> Incident:
    return Incident(
        kind=kind,
        place=Place(what=what, numbers=numbers),
        when=When(step=3),
        lasts=Lasts(unit="forever"),
        safety=KINDS[kind].safety,
        settings=settings,
    )


def sleeper(**environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env=dict(os.environ) | environ)


def test_a_process_is_killed_and_a_second_time_it_is_not_there() -> None:
    with running(sleeper()) as process:
        assert kill([process.pid]) == [process.pid]
        assert process.wait(GUARD_S) == -signal.SIGKILL
        assert kill([process.pid]) == []


def test_a_whole_host_is_killed() -> None:
    mark = f"NODE_{secrets.token_hex(4)}=3"
    name, value = mark.split("=")
    executor = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
    assert executor.stdout is not None
    child = int(executor.stdout.readline())
    with running(executor), running(sleeper()) as keeper, running(sleeper(**{name: value})) as stray:
        until(lambda: marked(mark) == [stray.pid], "its environment")
        killed = kill_host(Machine(executor.pid, (keeper.pid,), mark))
        assert set(killed) == {executor.pid, child, keeper.pid, stray.pid}
        assert [process.wait(GUARD_S) for process in (executor, keeper, stray)] == [-signal.SIGKILL] * 3
        until(lambda: state_of(child) in ("", "Z"), "the end of the grandchild")


def test_a_process_is_stopped_for_a_while() -> None:
    with running(sleeper()) as process:
        with stopped(process.pid):
            assert state_of(process.pid) == "T"
        until(lambda: state_of(process.pid) == "S", "that it goes on")


def test_one_that_ends_while_it_is_stopped() -> None:
    with running(sleeper()) as process, stopped(process.pid):
        process.kill()
        process.wait(GUARD_S)


@needs_root
def test_a_disk_is_full_for_a_while(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "file").write_bytes(b"x" * 100_000)
        with full_disk(disk), pytest.raises(OSError, match="No space") as caught:
            (disk / "more").write_bytes(b"x" * 8192)
        assert caught.value.errno == errno.ENOSPC
        (disk / "more").write_bytes(b"x" * 8192)
        assert sorted(path.name for path in disk.iterdir()) == ["file", "more"]
    assert list((tmp_path / "disk").iterdir()) == []
    assert str(tmp_path / "disk") not in {part.mountpoint for part in psutil.disk_partitions(all=True)}


def test_no_other_disk_is_filled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no small disk of its own"), full_disk(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, -1, LARGEST_DISK_BYTES + 1])
def test_a_small_disk_is_small(size: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no small disk"), small_disk(tmp_path, size):
        pass


@contextmanager
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace with one end of a pair of interfaces in it."""
    name = f"n{secrets.token_hex(4)}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    try:
        add = ["ip", "-n", name, "link", "add", "a0", "type", "veth", "peer", "name", "a1"]
        if subprocess.run(add, check=False).returncode:
            pytest.skip("no pair of interfaces can be made here")
        for end in ("a0", "a1"):
            subprocess.run(["ip", "-n", name, "link", "set", end, "up"], check=True)
        yield name, "a0"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@needs_root
def test_a_link_is_down_for_a_while() -> None:
    with namespace() as (name, interface):
        show = ["ip", "-n", name, "-br", "link", "show", interface]
        with link_down(interface, name):
            assert " DOWN " in subprocess.run(show, capture_output=True, text=True, check=True).stdout
        shown = until(
            lambda: out if " UP " in (out := subprocess.run(show, capture_output=True, text=True).stdout) else "", "UP"
        )
        assert interface in shown
        with pytest.raises(NotDoneError, match="none0"), link_down("none0", name):
            pass


def test_the_interfaces_of_the_machine_are_left_alone() -> None:
    with pytest.raises(UserError, match="namespace"), link_down("lo", ""):
        pass


def test_a_clock_jumps_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "offset"
    set_offset(file, 0.0)
    now = wall_clock({VARIABLE: str(file)})
    assert abs(now() - time.time()) < GUARD_S
    with jumped(file, -86_400.0):
        assert abs(now() + 86_400 - time.time()) < GUARD_S
    assert abs(now() - time.time()) < GUARD_S


def test_without_a_file_it_is_the_clock_of_the_machine(tmp_path: Path) -> None:
    assert wall_clock({}) is time.time
    with pytest.raises(UserError, match=r"PHALANX_CLOCK = .*unset it"):
        wall_clock({VARIABLE: str(tmp_path / "none")})
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="set_offset"):
        wall_clock({VARIABLE: str(tmp_path / "empty")})
    with pytest.raises(ValueError, match="nan"):
        set_offset(tmp_path / "x", float("nan"))


@contextmanager
def echo() -> Iterator[int]:
    """A server that says back what it hears; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def answer(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            pass


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), GUARD_S)


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return hear(connection, len(data))


def hear(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(1 << 16)):
        data += piece
    return data


def test_a_link_passes_on_what_is_said_both_ways() -> None:
    with echo() as port, Link("127.0.0.1", port) as link, connect(link.port) as connection:
        data = os.urandom(300_000)
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert hear(connection, len(data)) == data
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
        assert link.passed_bytes == 2 * len(data)


def test_a_link_is_cut_and_comes_back_on_its_port() -> None:
    with echo() as port, Link("127.0.0.1", port) as link:
        with connect(link.port) as connection:
            assert ask(connection, b"one") == b"one"
            with link.cut():
                with pytest.raises(ConnectionResetError):
                    ask(connection, b"two")
                with pytest.raises(ConnectionRefusedError):
                    connect(link.port)
        with connect(link.port) as connection:
            assert ask(connection, b"three") == b"three"


def test_a_silent_link_holds_what_is_said() -> None:
    with echo() as port, Link("127.0.0.1", port) as link, connect(link.port) as connection:
        assert ask(connection, b"one") == b"one"
        with link.silent():
            connection.sendall(b"two")
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            assert link.passed_bytes == 6
        connection.settimeout(GUARD_S)
        assert hear(connection, 3) == b"two"


def test_a_delayed_link_is_late() -> None:
    with echo() as port, Link("127.0.0.1", port) as link, connect(link.port) as connection:
        with link.delayed(0.1):
            begin_s = time.monotonic()
            assert ask(connection, b"one") == b"one"
            assert time.monotonic() - begin_s >= 0.19
        assert ask(connection, b"two") == b"two"


def test_a_link_to_nobody_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with Link("127.0.0.1", port) as link, connect(link.port) as connection, suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_incidents_happen_where_they_should(tmp_path: Path) -> None:
    with running(sleeper()) as driver, running(sleeper()) as one, running(sleeper()) as other:
        machines = [Machine(one.pid, clock=tmp_path / "offset"), Machine(other.pid)]
        with happen(outside("driver-stopped", "driver"), machines, driver.pid):
            assert state_of(driver.pid) == "T"
        with happen(outside("clock-jump", "hosts", (0,), offset_s=60.0), machines, driver.pid):
            assert wall_clock({VARIABLE: str(tmp_path / "offset")})() > time.time() + 30
        with happen(outside("spare-bad", "spares", (1,), how="stops"), machines, driver.pid):
            assert state_of(other.pid) == "T"
        with happen(outside("executor-killed", "hosts", (1,)), machines, driver.pid):
            assert other.wait(GUARD_S) == -signal.SIGKILL
        with happen(outside("driver-killed", "driver"), machines, driver.pid):
            assert driver.wait(GUARD_S) == -signal.SIGKILL
        with happen(outside("host-killed", "hosts", (0,)), machines, driver.pid):
            assert one.wait(GUARD_S) == -signal.SIGKILL


TIMES: list[tuple[dict[str, Any], int, int, bool, bool]] = [
    ({"step": 5}, 1, 4, False, False),
    ({"step": 5}, 1, 5, False, True),
    ({"step": 5}, 1, 9, True, True),
    ({"step": 5, "attempt": 2}, 1, 9, False, False),
    ({"step": 5, "phase": "checkpoint"}, 1, 5, False, False),
    ({"step": 5, "phase": "checkpoint"}, 1, 4, True, False),
    ({"step": 5, "phase": "checkpoint"}, 1, 6, True, True),
    ({"phase": "start"}, 1, -1, False, True),
    ({"phase": "recovery", "attempt": 2}, 1, 9, False, False),
    ({"phase": "recovery", "attempt": 2}, 2, -1, False, True),
]


@pytest.mark.parametrize(("when", "attempt", "step", "is_saving", "due"), TIMES)
def test_when_it_is_time(when: dict[str, Any], attempt: int, step: int, is_saving: bool, due: bool) -> None:
    incident = outside("driver-killed", "driver").model_copy(update={"when": When(**when)})
    assert is_time(incident, attempt, step, is_saving=is_saving) is due


def test_what_did_not_happen_is_an_error() -> None:
    with running(sleeper()) as process:
        process.kill()
        process.wait(GUARD_S)
        gone = [Machine(process.pid)]
        for kind, what in (("executor-killed", "hosts"), ("host-killed", "hosts"), ("spare-bad", "spares")):
            with (
                pytest.raises(NotDoneError, match=r"gone before|was there"),
                happen(outside(kind, what, (0,)), gone, 0),
            ):
                pass
        with pytest.raises(NotDoneError, match="driver"), happen(outside("driver-killed", "driver"), gone, process.pid):
            pass


@pytest.mark.parametrize(("kind", "what"), [("disk-full", "hosts"), ("clock-jump", "hosts"), ("link-cut", "links")])
def test_a_machine_must_have_what_an_incident_needs(kind: str, what: str) -> None:
    with pytest.raises(UserError, match=f"leave out {kind}"), happen(outside(kind, what, (0,)), [Machine(1)], 0):
        pass
