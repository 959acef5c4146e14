"""Rank, world size and rendezvous of a worker from the environment: ours, torchrun's or Slurm's; and its device.

Slurm's short lists: of hosts, such as ``node[01-03,07],gpu5``, and of counts, such as ``4(x2),3``.

What a worker process is told by whoever started it: our own launcher, torchrun, or Slurm's srun.

torchrun's variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. Slurm's: srun(1),
"output environment variables".

Which of the host's devices a worker computes on. Torch-free: the caller knows how many are visible.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.core.errors import UserError

# One host expression: anything but commas, where commas inside brackets do not count.
_EXPRESSION = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

# As in Slurm's hostlist.h.
_LONGEST_RANGE = 1 << 16

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(hosts: str) -> Iterator[str]:
    """The names in a host list, in order; several brackets in one name vary like digits, the last one fastest.

    Raises:
        UserError: it is not a host list.
    """
    expressions = _EXPRESSION.findall(hosts)
    if not hosts or ",".join(expressions) != hosts:
        raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
    for expression in expressions:
        pieces = [_numbers(inner, hosts) if inner else [text] for inner, text in _PIECE.findall(expression)]
        yield from map("".join, itertools.product(*pieces))


def expand_counts(counts: str) -> list[int]:
    """Tasks of every node: ``4(x2),3`` is 4, 4, 3.

    Raises:
        UserError: it is not a list of counts.
    """
    result: list[int] = []
    for item in counts.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise _unreadable("list of counts", "SLURM_STEP_TASKS_PER_NODE", counts)
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _numbers(inner: str, hosts: str) -> list[str]:
    """What stands between two brackets, one string per number; leading zeros are kept."""
    result: list[str] = []
    for item in inner.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _LONGEST_RANGE:
            raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
        result += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return result


def _unreadable(what: str, field: str, value: str) -> UserError:
    return UserError(f"is not a {what} of Slurm's", cure="start with srun", field=field, value=value)


Launcher = Literal["phalanx", "torchrun", "srun"]

_PREFIX = "PHALANX_"
_MARK = "PHALANX_RANK"
_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "STORE_HOST",
    "STORE_PORT",
    "ATTEMPT",
    "PHASES",
    "STORE_FD",
)

# Slurm gives no port, so it is derived from the numbers of job, step and restart. The range lies below the ephemeral
# ports of Linux (32768 and up), out of which other programs' connections are served.
_FIRST_PORT, _PORTS = 15_000, 15_000


@dataclass(frozen=True)
class Worker:
    """One rank: who it is, and where all ranks meet.

    Attributes:
        rank, local_rank: number among all processes of the job, and among those of this host.
        world_size, local_world_size: how many there are of either.
        host, port: of the rendezvous store.
        attempt: how often the job was started before.
        launcher: who started this process.
        hosts_store: whether this process is to open the store's server; else it is a client only.
        listen_fd: a socket that already listens at `port`, to be handed to the store's server (TCPStore's
            `master_listen_fd`), so that nobody can take the port in between; None: the server binds it itself.
        phases_s: seconds that each phase of starting took, in order; empty where nobody timed them.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    attempt: int = 0
    launcher: Launcher = "phalanx"
    hosts_store: bool = False
    listen_fd: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)

    def with_phase(self, name: str, seconds: float) -> Worker:
        """The same worker with one more phase of its start-up, to the microsecond."""
        return replace(self, phases_s={**self.phases_s, name: round(seconds, 6)})

    def to_environment(self) -> dict[str, str]:
        """Variables out of which `worker_environment` makes this worker again; only for our own launcher."""
        values = (
            self.rank,
            self.local_rank,
            self.world_size,
            self.local_world_size,
            self.host,
            self.port,
            self.attempt,
            " ".join(f"{name}={seconds}" for name, seconds in self.phases_s.items()),
            self.listen_fd,
        )
        pairs = zip(_NAMES, values, strict=True)
        return {_PREFIX + name: str(value) for name, value in pairs if value is not None}


def worker_environment(environ: Mapping[str, str] | None = None) -> Worker | None:
    """The worker that this process is, or None if nobody started it as one.

    Our own variables go before torchrun's, and those before srun's. A Slurm step of one task is not a worker: the
    process may start what it needs by itself. Nor is a batch script, which Slurm tells of the job's tasks but which is
    none.

    Args:
        environ: environment variables; None: those of this process.

    Raises:
        UserError: the environment is incomplete or contradicts itself.
    """
    environ = os.environ if environ is None else environ
    if _MARK in environ:
        return _checked(_from_phalanx(_Variables(environ, "unset the PHALANX_ variables")), _MARK)
    if "RANK" in environ or "LOCAL_RANK" in environ:
        return _checked(
            _from_torchrun(_Variables(environ, "start with torchrun, or unset RANK and LOCAL_RANK")), "RANK"
        )
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        worker = _from_slurm(_Variables(environ, "start with srun, or unset SLURM_PROCID"))
        return _checked(worker, "SLURM_PROCID") if worker.world_size > 1 else None
    return None


def without_worker(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that our own launcher sets."""
    ours = {_PREFIX + name for name in _NAMES}
    return {name: value for name, value in environ.items() if name not in ours}


@dataclass(frozen=True)
class _Variables:
    """Environment variables, read with errors that name them."""

    environ: Mapping[str, str]
    cure: str

    def text(self, *names: str) -> str:
        """The first of `names` that is set and not empty."""
        for name in names:
            if self.environ.get(name):
                return self.environ[name]
        raise UserError("is not set, though others of its kind are", cure=self.cure, field=" or ".join(names))

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of `names` as a whole number from 0."""
        if default is not None and not any(self.environ.get(name) for name in names):
            return default
        text = self.text(*names)
        if not (text.isascii() and text.isdigit()):
            field = next(name for name in names if self.environ.get(name))
            raise UserError("is not a whole number from 0", cure=self.cure, field=field, value=text)
        return int(text)


def _from_phalanx(variables: _Variables) -> Worker:
    listen_fd = variables.number("PHALANX_STORE_FD", default=-1)
    phases = (item.partition("=") for item in variables.environ.get("PHALANX_PHASES", "").split())
    rank = variables.number(_MARK)
    return Worker(
        rank=rank,
        local_rank=variables.number("PHALANX_LOCAL_RANK"),
        world_size=variables.number("PHALANX_WORLD_SIZE"),
        local_world_size=variables.number("PHALANX_LOCAL_WORLD_SIZE"),
        host=variables.text("PHALANX_STORE_HOST"),
        port=variables.number("PHALANX_STORE_PORT"),
        attempt=variables.number("PHALANX_ATTEMPT", default=0),
        hosts_store=rank == 0,
        listen_fd=None if listen_fd < 0 else listen_fd,
        phases_s={name: float(seconds) for name, _, seconds in phases},
    )


def _from_torchrun(variables: _Variables) -> Worker:
    agent_hosts = variables.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank = variables.number("RANK")
    return Worker(
        rank=rank,
        local_rank=variables.number("LOCAL_RANK"),
        world_size=variables.number("WORLD_SIZE"),
        local_world_size=variables.number("LOCAL_WORLD_SIZE"),
        host=variables.text("MASTER_ADDR"),
        port=variables.number("MASTER_PORT"),
        attempt=variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
        launcher="torchrun",
        hosts_store=rank == 0 and not agent_hosts,
    )


def _from_slurm(variables: _Variables) -> Worker:
    environ = variables.environ
    attempt = variables.number("SLURM_RESTART_COUNT", default=0)
    rank = variables.number("SLURM_PROCID")
    per_node = expand_counts(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = variables.number("SLURM_NODEID", default=0)
    if node >= len(per_node):
        raise UserError(f"there are only {len(per_node)} nodes", cure=variables.cure, field="SLURM_NODEID", value=node)
    return Worker(
        rank=rank,
        local_rank=variables.number("SLURM_LOCALID"),
        world_size=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_world_size=per_node[node],
        host=environ.get("MASTER_ADDR") or _first_host(variables),
        port=variables.number("MASTER_PORT", default=_slurm_port(variables, attempt)),
        attempt=attempt,
        launcher="srun",
        hosts_store=rank == 0,
    )


def _first_host(variables: _Variables) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next(expand_hosts(variables.text(*names)))


def _slurm_port(variables: _Variables, attempt: int) -> int:
    job = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    step = variables.number("SLURM_STEP_ID", default=0)
    # 7919 is a prime that shares no factor with the range, so neighbouring jobs, steps and restarts lie far apart.
    return _FIRST_PORT + (job + 7919 * step + 104_729 * attempt) % _PORTS


def _checked(worker: Worker, field: str) -> Worker:
    if worker.rank >= worker.world_size:
        raise _contradiction(field, worker.rank, f"there are only {worker.world_size} ranks, counted from 0")
    if worker.local_rank >= worker.local_world_size:
        raise _contradiction(
            field.replace("RANK", "LOCAL_RANK").replace("PROCID", "LOCALID"),
            worker.local_rank,
            f"there are only {worker.local_world_size} ranks on this host, counted from 0",
        )
    if worker.local_world_size > worker.world_size:
        raise _contradiction(field, worker.rank, f"more ranks on this host than the {worker.world_size} of the job")
    if not 0 < worker.port < 2**16:
        raise _contradiction("MASTER_PORT", worker.port, "is not a port")
    return worker


def _contradiction(field: str, value: int, problem: str) -> UserError:
    cure = "start all processes with one command of torchrun, srun or phalanx"
    return UserError(problem, cure=cure, field=field, value=value)


def device_index(worker: Worker, visible: int, *, shared: bool = False) -> int:
    """Number of the device of `worker` among the `visible` ones: its local rank.

    Where Slurm was told to (``--gpus-per-task=1``, ``--gpu-bind``), it shows each task its own device alone; that is 0.

    Args:
        shared: ranks may share devices; they take turns.

    Raises:
        UserError: there are more ranks on this host than devices.
    """
    if shared:
        return worker.local_rank % visible
    if worker.local_rank < visible >= worker.local_world_size:
        return worker.local_rank
    if worker.launcher == "srun" and visible == 1:
        return 0
    raise UserError(
        f"{worker.local_world_size} ranks on this host cannot have a device each, {visible} visible",
        cure="start one rank per device (parallel, CUDA_VISIBLE_DEVICES), or use train.device=cpu; "
        "to try a layout, set parallel.share_device=true",
        field="train.device",
    )
