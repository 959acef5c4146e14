"""Options of the Slurm back end (docs/run_slurm.md), and Slurm's commands: what they are asked, how answers are read.

Only formats with fixed columns are asked for, which all versions print alike; free text is in none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.launch.environment import expand_hosts
from phalanx.run.backends.backend import options_of
from phalanx.run.config import RunConfig

# As sbatch takes them: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?|(?P<plain>\d+(?::\d+){0,2}))"
)
_TAKEN = ("--nodes", "-N", "--output", "-o", "--chdir", "-D", "--job-name", "-J", "--signal", "--no-kill", "-k")


class SlurmOptions(Config):
    """What the back end needs to know beside the job. What only a new job needs has no meaning inside an allocation."""

    partition: str = Field("", description="where a job is submitted to; empty: Slurm's default, as with all of these")
    account: str = Field("", description="that is charged")
    qos: str = Field("", description="quality of service")
    reservation: str = Field("", description="to take nodes from")
    constraint: str = Field("", description="features that nodes must have")
    nodelist: str = Field("", description="nodes that must be among them")
    exclude: str = Field("", description="nodes that must not be among them")
    time: str = Field("", description='wall time: minutes, or such as "12:00:00" or "2-00"; empty: the partition\'s')
    gpus_per_node: int = Field(0, ge=0, description="GPUs of each node; 0: what nodes have is not asked for")
    exclusive: bool = Field(True, description="nodes are not shared with other jobs, and all of their cores are used")
    sbatch: tuple[str, ...] = Field((), description='further options of sbatch, such as ["--mem=0"]')
    srun: tuple[str, ...] = Field((), description="further options of srun for executors")

    requeue: bool = Field(True, description="a job that ends with status 3 or 6 goes into the queue again")
    max_requeues: int = Field(50, ge=0, description="how often it does so at most")
    follow: bool = Field(True, description="from a login node: show what the driver says until the job is over")
    stop_before_s: float = Field(
        120.0, ge=1, description="how long before the end of its wall time the job saves and stops, seconds"
    )
    start_s: float = Field(180.0, ge=1, description="how long an executor may take to connect, seconds")
    poll_s: float = Field(5.0, ge=0.2, le=300, description="how often Slurm is asked for news of the job, seconds")

    @field_validator("time", mode="before")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value  # minutes
        if isinstance(value, str) and value and not seconds_of(value):
            raise ValueError(f'{value!r} is no wall time of Slurm\'s: write minutes, or such as "12:00:00" or "2-00"')
        return value

    @field_validator("sbatch", "srun")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            name = option.partition("=")[0]
            if not option.startswith("-"):
                raise ValueError(f"{option!r} is no option: write each as one word, such as --comment=night")
            if name in _TAKEN:
                raise ValueError(f"{option!r} is set by phalanx run: remove it")
        return value


def read_options(config: RunConfig) -> SlurmOptions:
    """The options of a job, checked together with it; raises UserError where one is wrong."""
    options = options_of(SlurmOptions, config)
    if options.time and seconds_of(options.time) <= options.stop_before_s:
        cure, field = f"give more time, or lower stop_before_s = {options.stop_before_s:g}", "run.backend_options.time"
        raise UserError("the job would stop as soon as it begins", cure=cure, field=field, value=options.time)
    return options


def seconds_of(text: str) -> float:
    """Of a wall time as sbatch takes it; 0: it is none."""
    found = _TIME.fullmatch(text)
    if found is None:
        return 0.0
    if found["plain"] is None:
        days, hours, minutes, seconds = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    parts = [int(part) for part in found["plain"].split(":")]
    if len(parts) == 3:
        return float((parts[0] * 60 + parts[1]) * 60 + parts[2])
    return float(parts[0] * 60 + (parts[1] if len(parts) == 2 else 0))


COMMAND_S = 60.0  # limit for one command; a controller under load answers late
COLUMNS = "%T|%L|%N|%r"  # of squeue, for `read_allocation`
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")

# What a job's or step's shape leaves in the environment, where the next srun would take it for its own options.
_SHAPE = re.compile(
    r"SLURM_(STEP|STEPID|SRUN|NTASKS|NPROCS|TASKS_PER_NODE|NTASKS_PER|CPUS_PER|MEM_PER|TRES_PER|DISTRIBUTION|CPU_BIND|"
    r"MEM_BIND|HINT|EXACT|WHOLE|EXCLUSIVE|OVERLAP|THREADS_PER|NNODES|NODELIST|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|"
    r"EXPORT_ENV|OPEN_MODE|MPI_TYPE|KILL_BAD_EXIT|WAIT|JOB_NAME|OVERCOMMIT|UMASK|LAUNCH_NODE).*"
)


class SlurmError(Exception):
    """A command of Slurm's has failed."""


@dataclass(frozen=True)
class Allocation:
    """What a job has now: its state, nodes (one that fails is taken out), wall time left, and why it waits."""

    state: str
    nodes: tuple[str, ...]
    left_s: float
    why: str = ""

    @property
    def is_over(self) -> bool:
        """It neither runs nor will."""
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING") and (
            not self.state.startswith(("REQUEUE", "SPECIAL_EXIT", "RESV", "SIGNALING", "STAGE", "STOPPED"))
        )


def in_allocation(environ: Mapping[str, str]) -> str:
    """The id of the job that this process runs in; empty: none."""
    return environ.get("SLURM_JOB_ID", "")


def require_programs(*names: str) -> None:
    """See that Slurm's commands are here; raises UserError where one is not."""
    for name in names:
        if shutil.which(name) is None:
            cure = "run this where Slurm's commands are, or choose another back end"
            raise UserError(f"there is no {name} here", cure=cure, field="run.backend", value="slurm")


async def call(*command: str) -> str:
    """What a command says on stdout. Raises SlurmError: it has failed, or takes longer than `COMMAND_S`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, problem = await process.communicate()
    except TimeoutError:
        raise SlurmError(f"{command[0]} has not answered for {COMMAND_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        raise SlurmError(f"{command[0]}: {problem.decode(errors='replace').strip() or f'status {process.returncode}'}")
    return out.decode(errors="replace")


async def allocation(job: str) -> Allocation | None:
    """Of a job; None: Slurm knows of none any more. Raises SlurmError: Slurm does not answer."""
    try:
        return read_allocation(await call("squeue", "-h", "-t", "all", "-j", job, "-o", COLUMNS))
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise


def read_allocation(text: str) -> Allocation | None:
    """From what squeue prints; None: nothing."""
    if not text.strip():
        return None
    state, left, nodes, why = text.splitlines()[0].split("|", 3)
    return Allocation(state, tuple(expand_hosts(nodes)) if nodes else (), read_left(left), why)


def read_left(text: str) -> float:
    """Seconds of a time left such as ``2-03:04:05``; infinite where there is no limit."""
    if text in ("UNLIMITED", "NOT_SET", "N/A", ""):
        return float("inf")
    found = _LEFT.fullmatch(text)
    if found is None:  # INVALID: it has passed
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class StepList:
    """The steps of a job. An answer was begun after the question; one answer serves all that wait."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._found: dict[str, str] = {}

    async def read(self) -> dict[str, str]:
        """Ids by names. Raises SlurmError: Slurm does not answer."""
        asked_s = time.monotonic()
        async with self._lock:
            if self._begun_s < asked_s:
                begun_s = time.monotonic()
                text = await call("squeue", "-h", "-s", "-j", self._job, "-o", "%i|%j")
                self._found, self._begun_s = read_steps(text), begun_s
        return self._found


def read_steps(text: str) -> dict[str, str]:
    """From what squeue prints."""
    pairs = (line.partition("|") for line in text.splitlines() if line)
    return {name.strip(): number.strip() for number, _, name in pairs}


async def signal_step(number: str, name: str) -> None:
    """Send a signal to a step; one that has ended is not an error. Raises SlurmError: Slurm does not answer."""
    try:
        await call("scancel", f"--signal={name}", number)
    except SlurmError as error:
        if "Invalid job id" not in str(error) and "already comp" not in str(error):
            raise


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what describes the shape of the job or step that this runs in: a new step has its own."""
    return {name: value for name, value in environ.items() if not _SHAPE.fullmatch(name)}


def srun_command(job: str, node: str, name: str, options: Sequence[str]) -> list[str]:
    """The command that runs one process as a step on one node of the job, with all that the job has there."""
    return [
        *("srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", f"--job-name={name}"),
        # Beside other steps, such as one that the driver itself may run in; with all memory, and no binding to cores.
        *("--overlap", "--mem=0", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0"),
        *("--export=ALL", "--input=none", "--unbuffered", "--quiet"),
        *options,
    ]
