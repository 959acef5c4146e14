"""Rank, world size and rendezvous of a worker from the environment: ours, torchrun's or Slurm's; and its device.

torchrun's variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. Slurm's: srun(1),
"output environment variables", with short lists of hosts, such as ``node[01-03,07],gpu5``, and of counts, ``4(x2),3``.
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

_LONGEST_RANGE = 1 << 16  # as in Slurm's hostlist.h
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(hosts: str) -> Iterator[str]:
    """The names in a host list, in order; several brackets in one name vary like digits, the last one fastest."""
    expressions = _EXPRESSION.findall(hosts)
    if not hosts or ",".join(expressions) != hosts:
        raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
    for expression in expressions:
        pieces = [_numbers(inner, hosts) if inner else [text] for inner, text in _PIECE.findall(expression)]
        yield from map("".join, itertools.product(*pieces))


def expand_counts(counts: str) -> list[int]:
    """Tasks of every node: ``4(x2),3`` is 4, 4, 3."""
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
        if match is None or int(match[2] or match[1]) - int(match[1]) >= _LONGEST_RANGE:
            raise _unreadable("host list", "SLURM_STEP_NODELIST", hosts)
        first, last = match[1], match[2] or match[1]
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
    """One rank: its numbers among all processes of the job and those of this host, and where all ranks meet.

    Attributes:
        host, port: of the rendezvous store.
        attempt: how often the job was started before.
        hosts_store: whether this process is to open the store's server; else it is a client only.
        listen_fd: a socket that already listens at `port`, to be handed to the store's server (TCPStore's
            `master_listen_fd`), so that no other process takes the port in between; None: the server binds it.
        phases_s: seconds that each phase of starting took, in order; empty where they were not timed.
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
    """The worker that this process is, or None if it was not started as one.

    Our own variables go before torchrun's, and those before srun's. A Slurm step of one task is not a worker: the
    process may start what it needs by itself. Nor is a batch script, which has the variables of the job's tasks but is
    not one. Raises UserError where the environment is incomplete or contradicts itself.
    """
    environ = os.environ if environ is None else environ
    if _MARK in environ:
        return _checked(_from_phalanx(_Variables(environ, "unset the PHALANX_ variables")), _MARK)
    if "RANK" in environ or "LOCAL_RANK" in environ:
        variables = _Variables(environ, "start with torchrun, or unset RANK and LOCAL_RANK")
        return _checked(_from_torchrun(variables), "RANK")
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

    def placement(self, prefix: str = "") -> tuple[int, int, int, int]:
        """Rank, local rank, world size and local world size."""
        rank, local_rank = self.number(f"{prefix}RANK"), self.number(f"{prefix}LOCAL_RANK")
        return rank, local_rank, self.number(f"{prefix}WORLD_SIZE"), self.number(f"{prefix}LOCAL_WORLD_SIZE")


def _from_phalanx(variables: _Variables) -> Worker:
    listen_fd = variables.number("PHALANX_STORE_FD", default=-1)
    phases = (item.partition("=") for item in variables.environ.get("PHALANX_PHASES", "").split())
    placement = variables.placement("PHALANX_")
    return Worker(
        *placement,
        variables.text("PHALANX_STORE_HOST"),
        variables.number("PHALANX_STORE_PORT"),
        variables.number("PHALANX_ATTEMPT", default=0),
        hosts_store=placement[0] == 0,
        listen_fd=None if listen_fd < 0 else listen_fd,
        phases_s={name: float(seconds) for name, _, seconds in phases},
    )


def _from_torchrun(variables: _Variables) -> Worker:
    agent_hosts = variables.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    placement = variables.placement()
    return Worker(
        *placement,
        variables.text("MASTER_ADDR"),
        variables.number("MASTER_PORT"),
        variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
        launcher="torchrun",
        hosts_store=placement[0] == 0 and not agent_hosts,
    )


def _from_slurm(variables: _Variables) -> Worker:
    attempt = variables.number("SLURM_RESTART_COUNT", default=0)
    rank = variables.number("SLURM_PROCID")
    per_node = expand_counts(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = variables.number("SLURM_NODEID", default=0)
    if node >= len(per_node):
        raise UserError(f"there are only {len(per_node)} nodes", cure=variables.cure, field="SLURM_NODEID", value=node)
    host = variables.environ.get("MASTER_ADDR")
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = variables.number("SLURM_JOB_ID", "SLURM_JOBID")
    step = variables.number("SLURM_STEP_ID", default=0)
    # 7919 is a prime that shares no factor with the range, so neighbouring jobs, steps and restarts lie far apart.
    port = _FIRST_PORT + (job + 7919 * step + 104_729 * attempt) % _PORTS
    return Worker(
        rank=rank,
        local_rank=variables.number("SLURM_LOCALID"),
        world_size=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_world_size=per_node[node],
        host=host or next(expand_hosts(variables.text(*nodes))),
        port=variables.number("MASTER_PORT", default=port),
        attempt=attempt,
        launcher="srun",
        hosts_store=rank == 0,
    )


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

    With ``--gpus-per-task=1`` or ``--gpu-bind`` Slurm shows each task its own device alone; that is 0. Where ranks may
    share devices they take turns; else more ranks than devices raise UserError.
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
