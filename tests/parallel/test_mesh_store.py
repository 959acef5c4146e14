"""The store: nobody waits for anybody to open it, attempts are apart, and what cannot be reached is told."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from support.store_port import port_of

from phalanx.core.errors import UserError
from phalanx.parallel import rendezvous as store_module
from phalanx.parallel.rendezvous import open_store


def test_a_store_is_open_before_the_other_ranks_are_there() -> None:
    host = open_store("127.0.0.1", 0, 0, 64, is_host=True, timeout_s=5)
    host.set("key", "value")
    client = open_store("127.0.0.1", port_of(host), 63, 64, is_host=False, timeout_s=5)
    assert client.get("key") == b"value"


def test_keys_of_attempts_do_not_mix() -> None:
    first = open_store("127.0.0.1", 0, 0, 2, is_host=True, timeout_s=5)
    second = open_store("127.0.0.1", port_of(first), 0, 2, is_host=False, attempt=1, timeout_s=5)
    first.set("key", "old")
    assert not second.check(["key"]) and first.check(["key"])


def test_a_socket_that_listens_already_is_served() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    host = open_store("127.0.0.1", port, 0, 2, is_host=True, listen_fd=listener.detach(), timeout_s=5)
    assert port_of(host) == port
    open_store("127.0.0.1", port, 1, 2, is_host=False, timeout_s=5).set("key", "value")
    assert host.get("key") == b"value"


def test_a_local_store_is_reached_from_this_machine_alone() -> None:
    host = open_store("127.0.0.1", 0, 0, 1, is_host=True, timeout_s=5)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port_of(host)), timeout=2)


def test_a_name_that_is_loopback_here_alone_is_reached_by_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has a machine's own name at 127.0.1.1 in /etc/hosts, where no other host would find the store."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    listener = store_module._listen("node7", 0)
    assert listener is not None and listener.getsockname()[0] == "0.0.0.0"
    listener.close()
    listener = store_module._listen("localhost", 0)
    assert listener is not None and listener.getsockname()[0] == "127.0.1.1"
    listener.close()


def test_a_store_at_an_address_of_ipv6_listens_there_alone() -> None:
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))  # one at all addresses of IPv6 takes this one's port of IPv4, too
        port = kept.getsockname()[1]
        host = open_store("::1", port, 0, 2, is_host=True, timeout_s=5)
        open_store("::1", port, 1, 2, is_host=False, timeout_s=5).set("key", "value")
        assert host.get("key") == b"value"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"127.0.0.1:{port}.*rank 0 of 4 cannot serve .*choose a port that is free"
        ):
            open_store("127.0.0.1", port, 0, 4, is_host=True, timeout_s=5)


def test_a_store_that_does_not_answer_is_told_within_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(
        UserError, match=rf"127.0.0.1:{port}.*rank 3 of 4 gets no answer .*check that the process of rank 0"
    ):
        open_store("127.0.0.1", port, 3, 4, is_host=False, timeout_s=0.5)
    assert time.monotonic() - begin < 20


def test_a_key_that_nobody_sets_is_waited_for_no_longer_than_said() -> None:
    host = open_store("127.0.0.1", 0, 0, 1, is_host=True, timeout_s=30)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        host.wait(["absent"], timedelta(seconds=0.2))
    assert time.monotonic() - begin < 10


SERVE = """
import sys
from torch._C._distributed_c10d import TCPStore
from phalanx.parallel import rendezvous as store_module
from phalanx.parallel.rendezvous import look_names_up_in_files_only
assert look_names_up_in_files_only() or sys.platform != "linux"
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on IPv6, as torch does
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_server_without_name_servers_is_not_held_up_by_them() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    clients = []
    try:
        port = int(server.stdout.readline())
        begin = time.monotonic()
        for number in range(300):
            clients.append(socket.create_connection(("127.0.0.1", port)))
            clients[-1].settimeout(60.0)
            clients[-1].sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, number))
            assert struct.unpack("=I", clients[-1].recv(4)) == (number,)
            assert time.monotonic() - begin < 60  # a name server that is not there takes five seconds for each
    finally:
        for client in clients:
            client.close()
        server.stdin.close()
        server.wait(240)
