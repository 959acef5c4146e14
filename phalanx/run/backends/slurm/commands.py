"""What Slurm's commands are asked, and how their answers are read. Torch-free.

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

from phalanx.core.errors import UserError
from phalanx.launch.slurm import expand_hosts

COMMAND_S = 60.0
"""Limit for one command; a controller under load answers late."""

COLUMNS = "%T|%L|%N|%r"
"""Of squeue, for `read_allocation`."""

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
    """What a job has now.

    Attributes:
        state: such as ``PENDING``, ``RUNNING``, ``COMPLETING``.
        nodes: in Slurm's order; one that fails is taken out by Slurm.
        left_s: of its wall time; infinite: there is no limit.
        why: reason for which it waits.
    """

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
    """See that Slurm's commands are here.

    Raises:
        UserError: one is not.
    """
    for name in names:
        if shutil.which(name) is None:
            cure = "run this where Slurm's commands are, or choose another back end"
            raise UserError(f"there is no {name} here", cure=cure, field="run.backend", value="slurm")


async def call(*command: str) -> str:
    """What a command says on stdout.

    Raises:
        SlurmError: it has failed, or takes longer than `COMMAND_S`.
    """
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
    """Of a job; None: Slurm knows of none any more.

    Raises:
        SlurmError: Slurm does not answer.
    """
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
    """The steps of a job. Who asks gets an answer that was begun after the question; one answer serves all who wait."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = asyncio.Lock()
        self._begun_s = 0.0
        self._found: dict[str, str] = {}

    async def read(self) -> dict[str, str]:
        """Ids by names.

        Raises:
            SlurmError: Slurm does not answer.
        """
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
    """Send a signal to a step; one that has ended meanwhile is no trouble.

    Raises:
        SlurmError: Slurm does not answer.
    """
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
