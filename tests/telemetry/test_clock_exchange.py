"""Clocks of hosts compared over sockets: processes with shifted clocks, and what may go wrong on the way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.telemetry.clock_exchange import ClockServer, HostClock, SharedFiles, ask
from phalanx.telemetry.queries import Trace

HOST = Path(__file__).parent / "clock_host.py"
SHIFT_NS, RATE = 3_700_000_000, 1e-4


def until(path: Path, lines: int = 1) -> list[dict[str, object]]:
    """The lines of a file, as soon as there are so many."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if path.exists() and path.read_text().count("\n") >= lines:
            return [json.loads(line) for line in path.read_text().splitlines()]
        time.sleep(0.01)
    raise TimeoutError(path)


def test_two_hosts_whose_clocks_differ_end_aligned_within_the_error(tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    (tmp_path / "began").write_text(str(began_ns))
    ends = socket.socketpair()
    hosts = [
        subprocess.Popen(
            [sys.executable, str(HOST), str(tmp_path), str(rank), str(shift_ns), str(rate), str(ends[rank].fileno())],
            pass_fds=[ends[rank].fileno()],
        )
        for rank, shift_ns, rate in ((0, 0, 0.0), (1, SHIFT_NS, RATE))
    ]
    for end in ends:
        end.close()
    assert [host.wait(120) for host in hosts] == [0, 0]
    trace = Trace.open(tmp_path / "run")
    found = trace.sql("select * from clocks order by host, at_ns").to_pylist()
    assert [(row["offset_ns"], row["error_ns"]) for row in found if row["host"] == "host0"] == [(0, 0.0)]
    estimates = [row for row in found if row["host"] == "host1"]
    assert len(estimates) >= 2 and all(row["reference"] == "host0" for row in estimates)
    # The two processes' Unix clocks are one; the rest is for reading it beside the monotonic one on a busy machine.
    unix_ns = time.time_ns() - time.monotonic_ns()
    for row in estimates:
        gone_ns = (row["at_ns"] - unix_ns - began_ns - SHIFT_NS) / (1 + RATE)
        assert abs(row["offset_ns"] - SHIFT_NS - RATE * gone_ns) <= row["error_ns"] + 1e5
    transfers = trace.transfers().to_pylist()
    assert {(row["from_rank"], row["to_rank"]) for row in transfers} == {(0, 1), (1, 0)} and len(transfers) > 10
    for row in transfers:
        assert row["send_start_ns"] <= row["receive_end_ns"] + row["error_ns"]
        assert row["error_ns"] < 50e6
    raw = trace.sql("select min(start_ns) filter (rank = 1) - min(start_ns) filter (rank = 0) as ns from spans")
    assert raw.to_pylist()[0]["ns"] > SHIFT_NS / 2  # what the hosts' own clocks say is off by seconds


def test_one_host_is_its_own_reference_and_listens_nowhere(tmp_path: Path) -> None:
    clock = HostClock(tmp_path, "only", SharedFiles(tmp_path), None)
    clock.follow(3, 0, is_reference=True)
    clock.follow(3, 0, is_reference=False)
    (line,) = until(tmp_path / "clocks" / "only.jsonl")
    assert (line["offset_ns"], line["error_ns"], line["attempt"], line["reference"]) == (0, 0.0, 3, "only")
    assert [path.name for path in (tmp_path / "clocks").iterdir()] == ["only.jsonl"] and threading.active_count() >= 1
    clock.close()


def test_a_host_waits_for_the_reference_and_for_that_of_a_later_attempt(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    follower = HostClock(tmp_path, "b", files, "127.0.0.1", clock_ns=lambda: time.monotonic_ns() + 10**9)
    follower.follow(0, 0, is_reference=False)
    dead = ClockServer(time.monotonic_ns, "127.0.0.1")
    place = {"host": "gone", "address": "", "port": dead.port, "token": dead.token.hex()}
    dead.close()
    files.write("clocks/reference-a0.json", json.dumps(place).encode())  # as an earlier job left it
    reference = HostClock(tmp_path, "a", files, "127.0.0.1")
    try:
        deadline_s = time.monotonic() + 60
        while "gone" not in follower.problem and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert f":{dead.port}:" in follower.problem
        reference.follow(0, 0, is_reference=True)
        first = until(tmp_path / "clocks" / "b.jsonl")[0]
        assert abs(first["offset_ns"] - 10**9) <= first["error_ns"] and first["reference"] == "a"  # type: ignore
        for host in (reference, follower):
            host.follow(1, 5, is_reference=host is reference)
        later = until(tmp_path / "clocks" / "b.jsonl", 2)[-1]
        deadline_s = time.monotonic() + 60
        while later["attempt"] != 1 and time.monotonic() < deadline_s:
            later = until(tmp_path / "clocks" / "b.jsonl", 2)[-1]
        assert later["attempt"] == 1
    finally:
        follower.close()
        reference.close()


def test_only_who_knows_the_token_is_answered() -> None:
    server = ClockServer(time.monotonic_ns, "127.0.0.1")
    try:
        with pytest.raises(OSError):
            ask("127.0.0.1", server.port, bytes(16), clock_ns=time.monotonic_ns, count=1)
        with socket.create_connection(("127.0.0.1", server.port)) as silent:
            silent.sendall(b"half a question")
            assert len(ask("127.0.0.1", server.port, server.token, clock_ns=time.monotonic_ns, count=5)) == 5
    finally:
        server.close()
    with pytest.raises(OSError):
        ask("127.0.0.1", server.port, server.token, clock_ns=time.monotonic_ns, count=1)


def test_who_answers_something_else_is_no_reference() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(24)
                connection.sendall(bytes(7) + b"\7" * 17)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="not a reference"):
            ask("127.0.0.1", listener.getsockname()[1], bytes(16), clock_ns=time.monotonic_ns)
        thread.join()


def test_a_reference_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        ask("127.0.0.1", listener.getsockname()[1], bytes(16), clock_ns=time.monotonic_ns, timeout_s=0.1)
