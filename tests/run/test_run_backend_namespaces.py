"""Network namespaces of the local back end: hosts with addresses of their own, and nothing left afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.run.backends.backend import BackendSetup
from phalanx.run.backends.local import Network, make
from phalanx.run.config import RunConfig

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None,
    reason="needs Linux, root, ip and nsenter",
)

SUBNET = "100.64.213.0/24"

ANSWER = """\
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()[0].sendall(b"hello")
"""
ASK = """\
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) as line:
    print(line.getsockname()[0], line.recv(5).decode())
"""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path, SUBNET)
    yield made
    made.end()


def ours(network: Network) -> list[str]:
    """What there is of it on this machine."""
    prefix = network.name_of(1).partition("-")[0]
    found = [path.name for path in (*Path("/run/netns").glob("*"), *Path("/sys/class/net").iterdir())]
    return sorted(name for name in found if name.startswith(prefix))


@needs_root
def test_hosts_reach_each_other_and_the_driver_and_nothing_is_left(network: Network) -> None:
    network.begin()
    network.begin()  # a driver that is started again
    for number in (1, 2):
        network.join(number)
    network.join(2)  # anew
    python = [sys.executable, "-c"]
    with subprocess.Popen(
        network.command(1, [*python, ANSWER, network.address_of(1)]), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        asked = network.command(2, [*python, ASK, network.address_of(1), port])
        told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.split() == [network.address_of(2), "hello"]
    assert len(ours(network)) == 5  # the bridge, and for each host a namespace and its end of the link
    network.leave(1)
    assert network.name_of(1) not in ours(network)
    network.end()
    assert ours(network) == []


@needs_root
def test_the_driver_has_to_listen_where_hosts_reach_it(tmp_path: Path) -> None:
    config = RunConfig(script="train.py", backend_options={"network": "namespaces", "subnet": SUBNET})
    with pytest.raises(UserError, match=r"100\.64\.213\.1:0, with TLS"):
        make(BackendSetup(config, tmp_path, lambda host: [], {}))


@pytest.mark.parametrize("subnet", ["nothing", "100.64.0.0/28"])
def test_a_subnet_that_is_none_is_refused(tmp_path: Path, subnet: str) -> None:
    with pytest.raises(UserError, match="subnet"):
        _ = Network(tmp_path, subnet).address


def test_others_than_root_are_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="run as root"):
        Network(tmp_path, SUBNET).begin()
