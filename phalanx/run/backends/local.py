"""The local back end: emulated hosts as processes of this machine, each in a network namespace where that is asked for.

Executors have sessions of their own, and outlive the driver. What has been started is written down in a folder of the
job, one file per host, so that a driver that is started again finds its executors. A file is written before the
executor can connect, and removed when it is gone.

Namespaces are on a bridge; Linux only, as root. Nothing of the machine's own network is touched: bridge, namespaces and
the interfaces between them are new, their names come from the folder of the job, and they go with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from phalanx.core.addresses import host_of
from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.ipc.processes import Identity, Watched, identity_of
from phalanx.launch.rank_failures import signal_name
from phalanx.run import messages
from phalanx.run.backends.backend import BackendSetup, ExecutorCommand, Listener, last_line, options_of
from phalanx.run.config import RunConfig
from phalanx.run.wire import driver_address
from phalanx.run.wire.driver_address import Address

INTERFACE = "eth0"  # what a host's interface is called inside of its namespace
_FIRST_HOST = 10  # of the subnet; the bridge, where the driver listens, is the first


@dataclass(frozen=True)
class Network:
    """The namespaces of one job, named after its folder; nothing else here uses the addresses of `subnet`."""

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
        """Make the bridge; it may be there already. Raises UserError: this user, or this machine, cannot."""
        cure = "run as root, with iproute2 and util-linux installed, or leave run.backend_options.network out"
        field = "run.backend_options.network"
        if os.geteuid() != 0:
            raise UserError("network namespaces are for root", cure=cure, field=field, value="namespaces")
        missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
        if missing:
            problem = f"{' and '.join(missing)} is not installed"
            raise UserError(problem, cure=cure, field=field, value="namespaces")
        if not Path("/sys/class/net", self._bridge).exists():
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            bits = ipaddress.ip_network(self.subnet).prefixlen
            _run("ip", "address", "add", f"{self.address}/{bits}", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")

    def join(self, number: int) -> None:
        """Make a namespace for a host, anew where an old one is there. Raises UserError: it cannot be made."""
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
        problem = ""
        try:
            found = ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            problem = f"is no network ({error})"
        else:
            if found.prefixlen <= 24:
                return found
        cure = "give one such as 100.64.7.0/24, that nothing on this machine uses"
        field = "run.backend_options.subnet"
        raise UserError(problem or "has too few addresses", cure=cure, field=field, value=self.subnet)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"{' '.join(command)}: {done.stderr.strip()}"
        cure = "leave run.backend_options.network out, or let this user make network namespaces"
        raise UserError(problem, cure=cure, field="run.backend_options.network", value="namespaces")


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)


_log = logging.getLogger(__name__)

GRACE_S = 10.0  # what an executor has after SIGTERM to end its workers and itself


class Options(Config):
    """``run.backend_options``."""

    network: Literal["loopback", "namespaces"] = Field(
        "loopback", description="where hosts reach each other; namespaces: each has a network of its own (root)"
    )
    subnet: str = Field(
        "100.64.7.0/24", description="addresses for namespaces; the first is the driver's, for run.listen"
    )
    total_hosts: int = Field(
        0, ge=0, description="hosts that are given in all, so that what is lost beyond is not replaced; 0: any number"
    )
    environment: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="variables of single hosts: a table by the name of the host, host-1 and on"
    )
    driver_files: str = Field(
        "", description="folder with a file per host that says where it reaches the driver, as through a tunnel"
    )


def make(setup: BackendSetup) -> LocalBackend:
    """For `phalanx.run.backends.backend`. Raises UserError: an option is wrong."""
    config, options = setup.config, options_of(Options, setup.config)
    network = None
    if options.network == "namespaces":
        network = _network_of(config, options, setup.folder)
        network.begin()  # here, since the driver listens there before the back end begins

    def command(host: str) -> list[str]:
        changes = {"driver": str(Path(options.driver_files).absolute() / host)} if options.driver_files else {}
        if network is None:
            return _with_settings(setup.command(host), changes)
        number = number_of(host)
        changes["address"] = network.address_of(number)
        return network.command(number, _with_settings(setup.command(host), changes))

    most = config.hosts + config.spares + 1
    # Gloo would take the address that the machine's name stands for.
    # Hosts that are processes of one machine meet where nothing comes and goes; those of their own network on its link.
    meet = {"PHALANX_INTERFACE": "lo"} if network is None else {"GLOO_SOCKET_IFNAME": INTERFACE}
    environment = {**meet, **setup.environment}
    return LocalBackend(setup.folder / "executors", command, most, environment, options=options, network=network)


def check(config: RunConfig) -> None:
    """For `phalanx.run.backends.backend`.

    Raises:
        UserError: an option is wrong; or, of hosts on this machine's own network, an address cannot be listened at.
    """
    options = options_of(Options, config)
    if options.network == "namespaces":  # which is made first
        _network_of(config, options, config.run_folder.absolute())
        return
    for name, text in (("run.listen", config.listen), ("run.http", config.http)):
        host, _, port = text.rpartition(":")  # checked by the config
        driver_address.bound(Address(host.strip("[]"), int(port)), name).close()


def _network_of(config: RunConfig, options: Options, folder: Path) -> Network:
    network = Network(folder, options.subnet)
    if host_of(config.listen) != network.address:
        cure = f"set it to {network.address}:0, with TLS (run.tls)"
        raise UserError("hosts in namespaces do not reach it", cure=cure, field="run.listen", value=config.listen)
    return network


def _with_settings(command: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """The command of an executor, whose last argument is its settings as JSON, with some of them changed."""
    *rest, settings = command
    return [*rest, json.dumps({**json.loads(settings), **changes})] if changes else list(command)


@dataclass
class LocalBackend:
    """Implements `phalanx.run.backends.backend.Backend`.

    Args:
        folder: where it keeps what was started, and what executors write to stderr.
        most: hosts that may be there at one time.
        network: of the hosts; None: the machine's own.
    """

    folder: Path
    command: ExecutorCommand
    most: int
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = GRACE_S
    options: Options = field(default_factory=Options)
    network: Network | None = None

    def __post_init__(self) -> None:
        if self.most < 1:
            raise UserError("needs at least one host", cure="give run.hosts", field="run.hosts", value=self.most)
        self._hosts: dict[str, Watched] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._coming: set[str] = set()
        self._other_versions: dict[str, int] = {}
        self._listener: Listener | None = None
        self._last = 0

    @property
    def hosts(self) -> list[str]:
        """Those that are there, in the order in which they were started."""
        return list(self._hosts)

    async def begin(self, listener: Listener) -> None:
        """Take over the executors that an earlier driver has started. Raises UserError: the folder cannot be used."""
        self._listener = listener
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cure = "give run.folder a place where files can be made"
            raise UserError(f"cannot be used ({error.strerror})", cure=cure, value=str(self.folder)) from error
        self._last = max((number_of(path.stem) for path in self.folder.glob("host-*")), default=0)
        for path in sorted(self.folder.glob("host-*.json"), key=lambda path: number_of(path.stem)):
            name = path.stem
            known = _read(path)
            if known is not None and identity_of(known.pid) == known:
                self._watch(name, known)
                if (version := _version(path)) != messages.VERSION:
                    # The driver would refuse it, and wait for it in vain.
                    self._other_versions[name] = version
                    self._coming.discard(name)
                    self._end(name)
            else:
                self._forget(name)
                self._report_gone(name, "its executor had ended before the driver was started again")

    async def ask(self, count: int) -> None:
        """Start so many executors, less those that are on their way, as far as there is room for them."""
        total = self.options.total_hosts
        rooms = [self.most - len(self._hosts), *([total - self._last] if total else [])]
        for _ in range(min(count - len(self._coming), *rooms)):
            self._start()

    def arrived(self, host: str) -> None:
        """It is not on its way any more."""
        self._coming.discard(host)

    async def evict(self, host: str, why: str) -> None:
        """End the executor; another one gets another name."""
        self._end(host)

    async def release(self, host: str, why: str) -> None:
        """As `evict`: one machine has no other to give."""
        self._end(host)

    async def leave(self) -> None:
        """Let go of all executors; they go on."""
        for task in self._ending.values():
            task.cancel()
        for watched in self._hosts.values():
            watched.close()
        self._hosts.clear()

    async def end(self) -> None:
        """End all executors, and wait until they are gone."""
        for host in list(self._hosts):
            self._end(host)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)  # each has reported
        if self.network is not None:
            self.network.end()

    def _start(self) -> None:
        self._last += 1
        name = f"host-{self._last}"
        if self.network is not None:
            self.network.join(self._last)
        with (self.folder / f"{name}.err").open("ab") as errors:
            process = subprocess.Popen(
                list(self.command(name)),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**self.environment, **self.options.environment.get(name, {})},
                start_new_session=True,
            )
        identity = identity_of(process.pid)
        process.returncode = 0  # it is watched by its descriptor; subprocess is not to wait for it
        if identity is None:
            self._report_gone(name, f"its executor did not start: {self._last_line(name)}")
            return
        write_json(self.folder / f"{name}.json", {**asdict(identity), "version": messages.VERSION})
        self._watch(name, identity)

    def _watch(self, name: str, identity: Identity) -> None:
        try:
            self._hosts[name] = Watched(identity, lambda: self._gone(name))
            self._coming.add(name)
        except ProcessLookupError:
            self._forget(name)
            self._report_gone(name, f"its executor has ended: {self._last_line(name)}")

    def _end(self, name: str) -> None:
        watched = self._hosts.get(name)
        if watched is not None and name not in self._ending:
            ending = asyncio.get_running_loop().create_task(self._terminate(name, watched))
            self._ending[name] = report_failure(ending, f"ending the executor of {name}")

    async def _terminate(self, name: str, watched: Watched) -> None:
        watched.send(signal.SIGTERM)
        watched.send(signal.SIGCONT)  # a stopped process takes no other signal
        if not await watched.wait(self.grace_s):
            watched.send(signal.SIGKILL)
            await watched.wait()

    def _gone(self, name: str) -> None:
        watched = self._hosts.pop(name, None)
        self._coming.discard(name)
        self._forget(name)
        ending, version = self._ending.pop(name, None), self._other_versions.pop(name, None)
        if ending is not None and version is not None:
            speaks = f"version {version} of the wire" if version else "another version of the wire"
            self._report_gone(name, f"its executor spoke {speaks}, the driver {messages.VERSION}: it was ended")
        elif ending is not None:
            self._report_gone(name, "it was ended")
        elif watched is not None and watched.code is not None and watched.code < 0:
            self._report_gone(name, f"its executor was killed by {signal_name(-watched.code)}")
        else:
            self._report_gone(name, f"its executor has ended: {self._last_line(name)}")

    def _report_gone(self, name: str, why: str) -> None:
        if self._listener is not None:
            self._listener.gone(name, why)

    def _forget(self, name: str) -> None:
        try:
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            if self.network is not None:
                self.network.leave(number_of(name))
        except Exception:  # the driver has to hear all the same that it is gone
            _log.exception("what was left of %s could not be removed", name)

    def _last_line(self, name: str) -> str:
        return last_line(self.folder / f"{name}.err")


def number_of(host: str) -> int:
    """The number in the name of a host; 0: there is none."""
    digits = host.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _version(path: Path) -> int:
    """Of the wire that an executor speaks; 0: it is of one that did not write it down."""
    try:
        return int(json.loads(path.read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read(path: Path) -> Identity | None:
    """Who was started; None where the file says nothing, as after a power cut."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        return Identity(int(fields["pid"]), int(fields["started_ticks"]), str(fields["boot_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
