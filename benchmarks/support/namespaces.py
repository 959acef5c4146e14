"""Two hosts on one machine: network namespaces joined by virtual interfaces with a limited rate. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Where one rank runs: `prefix` goes before its command; it listens on `address` of `interface`."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def cannot() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} (Debian: iproute2) must be installed" if missing else None


@contextmanager
def loopback() -> Iterator[list[Host]]:
    """Both ranks on this host, without a limit."""
    yield [Host((), "127.0.0.1", "lo")] * 2


@contextmanager
def two_hosts(rate_mbit_s: float) -> Iterator[list[Host]]:
    """Two namespaces whose link carries `rate_mbit_s` in each direction (tc tbf); removed at the end.

    Raises:
        RuntimeError: this kernel or this user cannot.
    """
    names = [f"overlap-{os.getpid()}-{side}" for side in "ab"]
    hosts = [Host(("ip", "netns", "exec", name), f"10.83.0.{i + 1}", f"ov{i}") for i, name in enumerate(names)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [f"ov{os.getpid()}{side}" for side in "ab"]
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, host in zip(names, ends, hosts, strict=True):
            _set_up(name, end, host, rate_mbit_s)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _set_up(name: str, end: str, host: Host, rate_mbit_s: float) -> None:
    _run("ip", "link", "set", end, "netns", name, "name", host.interface)
    inside = ("ip", "-n", name)
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _run(*inside, "link", "set", host.interface, "up")
    _run(*inside, "link", "set", "lo", "up")
    # A burst of 0.1 ms or so keeps the rate even; the queue is long enough for a window of TCP.
    limit = ("rate", f"{rate_mbit_s}mbit", "burst", "128kb", "limit", "8mb")
    _run("tc", "-n", name, "qdisc", "add", "dev", host.interface, "root", "tbf", *limit)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
