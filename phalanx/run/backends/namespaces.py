"""A network of its own for each host that is emulated on this machine: namespaces on a bridge. Linux, root, torch-free.

Nothing of the machine's own network is touched: bridge, namespaces and the interfaces between them are new, their names
come from the folder of the job, and they go with it. In each namespace the interface is called ``eth0``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError

INTERFACE = "eth0"
"""What a host's interface is called inside of its namespace."""

_FIRST_HOST = 10  # of the subnet; the bridge, where the driver listens, is the first


@dataclass(frozen=True)
class Network:
    """The namespaces of one job.

    Args:
        folder: of the job, from which names are made.
        subnet: addresses that nothing else on this machine uses, such as ``100.64.7.0/24``.
    """

    folder: Path
    subnet: str

    @property
    def address(self) -> str:
        """Where hosts reach the driver."""
        return str(self._addresses[1])

    def address_of(self, number: int) -> str:
        """Of the host with this number, from 1."""
        return str(self._addresses[_FIRST_HOST + number])

    def name_of(self, number: int) -> str:
        """The namespace of the host with this number."""
        return f"{self._prefix}-{number}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """A command that runs on that host; only its network is another one."""
        return ["nsenter", f"--net=/run/netns/{self.name_of(number)}", *command]

    def begin(self) -> None:
        """Make the bridge; it may be there already.

        Raises:
            UserError: this user, or this machine, cannot.
        """
        self._check()
        if not _exists(self._bridge):
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            bits = ipaddress.ip_network(self.subnet).prefixlen
            _run("ip", "address", "add", f"{self.address}/{bits}", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")

    def join(self, number: int) -> None:
        """Make a namespace for a host, anew where an old one is there.

        Raises:
            UserError: it cannot be made.
        """
        self.leave(number)
        name, outside = self.name_of(number), f"{self._prefix}v{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", outside, "master", self._bridge, "up")
        bits = ipaddress.ip_network(self.subnet).prefixlen
        inside = ("ip", "-n", name)
        _run(*inside, "address", "add", f"{self.address_of(number)}/{bits}", "dev", INTERFACE)
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")

    def leave(self, number: int) -> None:
        """Let go of a host's namespace and, with it, of its interface."""
        _try("ip", "link", "delete", f"{self._prefix}v{number}")
        _try("ip", "netns", "delete", self.name_of(number))

    def end(self) -> None:
        """Let go of all that there is of this job."""
        for path in sorted(Path("/run/netns").glob(f"{self._prefix}-*")):
            self.leave(int(path.name.rpartition("-")[2]))
        _try("ip", "link", "delete", self._bridge)

    @property
    def _prefix(self) -> str:
        return "px" + hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]

    @property
    def _bridge(self) -> str:
        return f"{self._prefix}br"

    @property
    def _addresses(self) -> ipaddress.IPv4Network:
        try:
            found = ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            raise _bad(f"is no network ({error})", self.subnet) from None
        if found.prefixlen > 24:
            raise _bad("has too few addresses", self.subnet)
        return found

    def _check(self) -> None:
        cure = "run as root, with iproute2 and util-linux installed, or leave run.backend_options.network out"
        field = "run.backend_options.network"
        if os.geteuid() != 0:
            raise UserError("network namespaces are for root", cure=cure, field=field, value="namespaces")
        missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
        if missing:
            problem = f"{' and '.join(missing)} is not installed"
            raise UserError(problem, cure=cure, field=field, value="namespaces")


def _bad(problem: str, value: str) -> UserError:
    cure = "give one such as 100.64.7.0/24, that nothing on this machine uses"
    return UserError(problem, cure=cure, field="run.backend_options.subnet", value=value)


def _exists(interface: str) -> bool:
    return Path("/sys/class/net", interface).exists()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"{' '.join(command)}: {done.stderr.strip()}"
        cure = "leave run.backend_options.network out, or let this user make network namespaces"
        raise UserError(problem, cure=cure, field="run.backend_options.network", value="namespaces")


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
