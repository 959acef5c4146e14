"""What the job file says of Slurm: ``[run.backend_options]``; see docs/run_slurm.md. Torch-free."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.run.backends.options import options_of
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
    """The options of a job, checked together with it.

    Raises:
        UserError: one is wrong.
    """
    options = options_of(SlurmOptions, config)
    if options.time and seconds_of(options.time) <= options.stop_before_s:
        cure = f"give more time, or lower stop_before_s = {options.stop_before_s:g}"
        raise UserError(
            "the job would stop as soon as it begins", cure=cure, field="run.backend_options.time", value=options.time
        )
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
