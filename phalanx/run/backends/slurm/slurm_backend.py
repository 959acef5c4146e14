"""The Slurm back end: hosts that are nodes of the allocation in which the driver runs.

A host is a name that is given once: a node's name, and ``n3.2`` where node n3 is used for the second time. What is
started is written down before, so that the next driver, also that of a requeued job, knows it.

Each executor is a step of its own on one node, kept by one ``srun`` on the driver's machine. srun's outlive the driver.
A node that Slurm takes out of the job is gone; a step that ends is gone as soon as Slurm does not list it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.ipc.processes import Identity, Watched, identity_of
from phalanx.run.backends.backend import BackendSetup, Listener, last_line
from phalanx.run.backends.slurm import commands
from phalanx.run.backends.slurm.commands import Allocation, SlurmError, SlurmOptions, StepList, read_options
from phalanx.run.config import RunConfig

FIRST_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 300.0


@dataclass
class Started:
    """A host on `node`, and the srun on `machine` that keeps its step; None: it was not started yet."""

    node: str
    srun: Identity | None = None
    machine: str = ""


@dataclass
class Notes:
    """A file of the run folder: hosts that may be there, how often nodes were used, and which were evicted, and why."""

    path: Path
    hosts: dict[str, Started] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Notes:
        """What an earlier driver has left; nothing, at the first start.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if not path.exists():
            return cls(path)
        found: dict[str, Any] = json.loads(path.read_text())
        hosts = {}
        for name, fields in found["hosts"].items():
            srun = None if fields["srun"] is None else Identity(**fields["srun"])
            hosts[name] = Started(fields["node"], srun, fields["machine"])
        return cls(path, hosts, dict(found["uses"]), dict(found["evicted"]))

    def write(self) -> None:
        """Keep it; raises OSError."""
        hosts = {name: asdict(started) for name, started in self.hosts.items()}
        write_json(self.path, {"hosts": hosts, "uses": self.uses, "evicted": self.evicted})

    def begin(self, node: str) -> str:
        """The name of a new host on this node."""
        count = self.uses[node] = self.uses.get(node, 0) + 1
        name = node if count == 1 else f"{node}.{count}"
        self.hosts[name] = Started(node)
        return name

    @property
    def busy(self) -> set[str]:
        """Nodes on which there is a host, or its end is not certain yet."""
        return {started.node for started in self.hosts.values()}


@dataclass
class NodeBackoff:
    """Nodes that have failed or been given back are left alone, the longer the more often; others are taken first."""

    until_s: dict[str, float] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def add(self, node: str, now_s: float) -> None:
        """Leave it alone for a while."""
        count = self.times[node] = self.times.get(node, 0) + 1
        self.until_s[node] = now_s + min(FIRST_BACKOFF_S * 2.0 ** (count - 1), LONGEST_BACKOFF_S)

    def reset(self, node: str) -> None:
        """It has brought a host that works: what was before does not count."""
        self.times.pop(node, None)

    def ready(self, nodes: list[str], now_s: float) -> list[str]:
        """Those of `nodes` that may be used; those that have failed least often come first."""
        ready = [node for node in nodes if self.until_s.get(node, 0.0) <= now_s]
        return sorted(ready, key=lambda node: self.times.get(node, 0))  # stable: else in Slurm's order


_log = logging.getLogger(__name__)

GRACE_S = 10.0  # what an executor has after SIGTERM to end its workers and itself
CERTAIN_S = 20.0  # for the end of a killed step; a node on which it takes longer does not answer
_POLL_S = 0.2
_LONGEST_POLL_S = 2.0

# Which signal a step is sent after so many seconds.
Stages = tuple[tuple[float, str], ...]
_AT_REQUEST: Stages = ((0.0, "TERM"), (GRACE_S, "KILL"))
_AT_JOB_END: Stages = ((3.0, "TERM"), (GRACE_S, "KILL"))  # the driver has sent it to the executors too
_AT_ONCE: Stages = ((0.0, "KILL"),)


def check(config: RunConfig) -> None:
    """For `phalanx.run.backends.backend`; raises UserError where an option is wrong."""
    read_options(config)


def make(setup: BackendSetup) -> SlurmBackend:
    """For `phalanx.run.backends.backend`. Raises UserError: this is not an allocation, or an option is wrong."""
    options = read_options(setup.config)
    job = commands.in_allocation(os.environ)
    if not job:
        cure = "run this inside sbatch or salloc; `phalanx run` on a login node submits the job by itself"
        raise UserError("there is no allocation here (SLURM_JOB_ID)", cure=cure, field="run.backend", value="slurm")
    commands.require_programs("srun", "squeue", "scancel")
    backend = SlurmBackend(setup, options, job)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, backend.warn)
    return backend


@dataclass
class SlurmBackend:
    """Implements `phalanx.run.backends.backend.Backend` and `Movable`, for the Slurm job of the id `job`."""

    setup: BackendSetup
    options: SlurmOptions
    job: str
    _coming: dict[str, float] = field(default_factory=dict)
    _watched: dict[str, Watched] = field(default_factory=dict)
    _ending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _beside: set[asyncio.Task[None]] = field(default_factory=set)
    _backoff: NodeBackoff = field(default_factory=NodeBackoff)
    _wanted: int = 0
    _is_closing: bool = False

    def __post_init__(self) -> None:
        self.folder: Path = self.setup.folder / "executors"
        self._notes = Notes(self.folder / "slurm.json")
        self._allocation = Allocation("RUNNING", (), float("inf"))
        self._listener = Listener(lambda host, why: None, lambda left_s: None)
        self._is_short = False
        self._begun = asyncio.Event()
        self._steps = StepList(self.job)

    @property
    def hosts(self) -> list[str]:
        """Those that are there, or whose end is not certain."""
        return list(self._notes.hosts)

    async def begin(self, listener: Listener) -> None:
        """Read the allocation, and take over the steps that an earlier driver has started.

        Raises:
            UserError: the allocation or the folder cannot be used.
        """
        self._listener = listener
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._notes = Notes.read(self._notes.path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            cure = "give run.folder a place on a file system that all nodes share"
            raise UserError(f"cannot be used ({error})", cure=cure, value=str(self.folder)) from error
        self._allocation = self._usable(await commands.allocation(self.job))
        for host, started in list(self._notes.hosts.items()):
            self._coming[host] = time.monotonic() + self.options.start_s
            self._watch(host, started.srun if started.machine == socket.gethostname() else None)
        self._do(self._poll())
        self._begun.set()

    async def ask(self, count: int) -> None:
        """Start so many executors, less those on their way, as far as there are nodes; the rest when there are."""
        self._wanted = count
        self._fill()

    def arrived(self, host: str) -> None:
        """It is not on its way any more."""
        if self._coming.pop(host, None) is not None:
            self._wanted = max(self._wanted - 1, 0)
            self._backoff.reset(self._notes.hosts[host].node)

    async def evict(self, host: str, why: str) -> None:
        """End the step; its node is not used again for this job."""
        node = self._notes.hosts[host].node if host in self._notes.hosts else host
        if node not in self._notes.evicted and node in self._notes.uses:
            self._notes.evicted[node] = why
            self._notes.write()
        self._end(host, "it was ended", _AT_REQUEST)

    async def release(self, host: str, why: str) -> None:
        """End the step; its node may be used again, after others."""
        if host in self._notes.hosts:
            self._backoff.add(self._notes.hosts[host].node, time.monotonic())
        self._end(host, "it was ended", _AT_REQUEST)

    async def leave(self) -> None:
        """Let go of all steps; they go on."""
        self._close()
        for task in self._ending.values():
            task.cancel()

    async def end(self) -> None:
        """End all steps, and wait until they are gone."""
        self._wanted = 0
        for host in list(self._notes.hosts):
            self._end(host, "it was ended", _AT_JOB_END)
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        self._close()

    def warn(self) -> None:
        """Slurm, or what passes its signal on, says that the time is short."""
        self._do(self._on_warning())

    async def goes_on(self) -> bool:
        """As `phalanx.run.backends.backend.Movable`: Slurm ends the whole job: a person did not mean this driver."""
        with suppress(SlurmError):
            now = await commands.allocation(self.job)
            return now is None or now.state != "RUNNING"
        return True

    def _fill(self) -> None:
        """Start what is wanted and not on its way, as far as there are nodes."""
        lacking = self._wanted - len(self._coming)
        if lacking <= 0 or self._is_closing:
            return
        free = [node for node in self._allocation.nodes if node not in self._notes.busy | self._notes.evicted.keys()]
        names = [self._notes.begin(node) for node in self._backoff.ready(free, time.monotonic())[:lacking]]
        if names:
            self._notes.write()
            for name in names:
                self._start(name)
            self._notes.write()

    def _start(self, host: str) -> None:
        node = self._notes.hosts[host].node
        srun = commands.srun_command(self.job, node, self._step(host), self.options.srun)
        with (self.folder / f"{host}.err").open("ab") as output:
            process = subprocess.Popen(
                [*srun, *self.setup.command(host)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=commands.srun_environment(self.setup.environment),
                start_new_session=True,
            )
        identity = identity_of(process.pid)
        process.returncode = 0  # it is watched by its descriptor; subprocess is not to wait for it
        self._notes.hosts[host].srun = identity
        self._notes.hosts[host].machine = socket.gethostname()
        self._coming[host] = time.monotonic() + self.options.start_s
        self._watch(host, identity)

    def _watch(self, host: str, identity: Identity | None) -> None:
        with suppress(ProcessLookupError):
            if identity is not None:
                self._watched[host] = Watched(identity, lambda: self._on_srun_ended(host))
                return
        self._on_srun_ended(host)

    def _end(self, host: str, why: str, stages: Stages) -> None:
        if host in self._notes.hosts and host not in self._ending:
            ending = asyncio.get_running_loop().create_task(self._terminate(host, why, stages))
            self._ending[host] = report_failure(ending, f"ending the step of {host}")

    def _on_srun_ended(self, host: str) -> None:
        """Its step has ended, or will, or runs on without a keeper: see that it is gone."""
        self._watched.pop(host, None)
        if not self._is_closing:
            self._end(host, f"its executor has ended: {last_line(self.folder / f'{host}.err')}", _AT_ONCE)

    async def _terminate(self, host: str, why: str, stages: Stages) -> None:
        """Signal the step until it is gone, or the node does not answer; then say so."""
        began_s, poll_s, signalled = time.monotonic(), _POLL_S, ""
        while (number := await self._step_of(host)) is not None:
            spent_s = time.monotonic() - began_s
            if spent_s > stages[-1][0] + CERTAIN_S:
                why += "; its step does not end" if number else "; Slurm does not say whether its step has ended"
                break
            name = next((name for after_s, name in reversed(stages) if spent_s >= after_s), "")
            if name != signalled and await self._signal(host, number, name):
                signalled = name
            await asyncio.sleep(poll_s)
            poll_s = min(1.5 * poll_s, _LONGEST_POLL_S)
        self._gone(host, why)

    async def _signal(self, host: str, number: str, name: str) -> bool:
        """Send a signal to a step, or to what wants to begin it; whether it was sent."""
        if not number:
            watched = self._watched.get(host)
            if watched is not None and name == "KILL":
                watched.send(signal.SIGKILL)
            return False
        with suppress(SlurmError):
            await commands.signal_step(number, name)
            return True
        return False

    async def _step_of(self, host: str) -> str | None:
        """Id of the step of this host; empty: not known; None: there is none any more."""
        if self._notes.hosts[host].node not in self._allocation.nodes:
            return None
        try:
            found = (await self._steps.read()).get(self._step(host))
        except SlurmError as error:
            return None if "Invalid job id" in str(error) else ""
        # While its srun lives, a step that is not listed yet will be.
        return found if found is not None or host not in self._watched else ""

    def _gone(self, host: str, why: str) -> None:
        watched = self._watched.pop(host, None)
        if watched is not None:
            watched.send(signal.SIGKILL)
            watched.close()
        node = self._notes.hosts.pop(host).node
        self._notes.write()
        self._ending.pop(host, None)
        if self._coming.pop(host, None) is not None:
            self._backoff.add(node, time.monotonic())
        self._listener.gone(host, why)
        self._fill()

    async def _poll(self) -> None:
        """Ask Slurm for news, for ever."""
        while not self._is_closing:
            try:
                now = await commands.allocation(self.job)
            except SlurmError as error:
                _log.warning("Slurm cannot be asked for news of job %s: %s", self.job, error)
            else:
                try:
                    self._on_news(now)
                except Exception as error:  # must not be the last that is heard of Slurm
                    context = {"message": "what follows from Slurm's news could not be done", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)
            left_s = self._allocation.left_s - self.options.stop_before_s
            await asyncio.sleep(min(self.options.poll_s, max(left_s, _POLL_S)))

    def _on_news(self, now: Allocation | None) -> None:
        if now is None or (now.state != "RUNNING" and not now.nodes):
            return  # the whole job ends: Slurm ends this process too, and what it says of nodes means nothing
        self._allocation = now
        for host, started in list(self._notes.hosts.items()):
            if started.node not in now.nodes:
                self._end(host, f"Slurm has taken node {started.node} out of the job", _AT_ONCE)
        for host, limit_s in list(self._coming.items()):
            if time.monotonic() > limit_s:
                line = last_line(self.folder / f"{host}.err")
                why = f"its executor has not connected within {self.options.start_s:.0f} s: {line}"
                self._end(host, why, _AT_REQUEST)
        self._fill()
        if now.left_s <= self.options.stop_before_s:
            self._report_short(now.left_s)

    async def _on_warning(self) -> None:
        await self._begun.wait()
        left_s = self._allocation.left_s
        with suppress(SlurmError):
            now = await commands.allocation(self.job)
            left_s = now.left_s if now is not None else 0.0
        self._report_short(min(left_s, self.options.stop_before_s))

    def _report_short(self, left_s: float) -> None:
        if not self._is_short:
            self._is_short = True
            self._listener.time_is_short(left_s)

    def _usable(self, found: Allocation | None) -> Allocation:
        """The allocation, if the job can begin in it."""
        job, options = self.setup.config, self.options
        if found is None or not found.nodes:
            cure = "run this inside a job that runs, and unset SLURM_JOB_ID elsewhere"
            raise UserError("is no Slurm job that has nodes", cure=cure, field="SLURM_JOB_ID", value=self.job)
        if found.left_s <= options.stop_before_s:
            cure = "give the allocation more time, or lower run.backend_options.stop_before_s"
            raise UserError(f"only {found.left_s:.0f} s of the allocation are left", cure=cure, value=self.job)
        usable = [node for node in found.nodes if node not in self._notes.evicted]
        if len(found.nodes) < job.hosts:
            cure = f"ask Slurm for {job.hosts + job.spares} nodes, or lower run.hosts"
            raise UserError(
                f"the allocation has {len(found.nodes)} nodes", cure=cure, field="run.hosts", value=job.hosts
            )
        if len(usable) < job.hosts + job.spares:
            _log.warning("%d of the allocation's nodes can be used, for %d hosts", len(usable), job.hosts)
        return found

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = report_failure(asyncio.get_running_loop().create_task(work), "what goes on beside the orders to Slurm")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _close(self) -> None:
        self._is_closing = True
        for task in self._beside:
            task.cancel()
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()

    def _step(self, host: str) -> str:
        """Name of a host's step, by which it is found again; no other job in this allocation has it."""
        mark = hashlib.sha256(str(self.setup.folder).encode()).hexdigest()[:8]
        return f"phalanx:{self.setup.config.job_name}:{host}:{mark}"
