"""Settings of ``[checkpoint]``: when checkpoints are taken, where they go, and which are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from phalanx.core.config import Config
from phalanx.core.units import parse_size

Mode = Literal["background", "blocking"]

_SECRETS = re.compile(r"secret|password|passwd|token|credential|connection_string|account_key", re.IGNORECASE)


class CheckpointConfig(Config):
    """Settings of ``[checkpoint]``. A checkpoint is always written at the end of training and on a clean stop.

    `every_steps` and `every_s` count side by side: what comes first makes one due. With `auto` they are bounds.
    """

    every_steps: int = Field(
        1000, ge=0, description="write a checkpoint every this many optimizer steps; 0 writes one only at the end"
    )
    every_s: float = Field(
        0.0, ge=0, description="and whenever this many seconds have passed since the one before; 0: whatever the time"
    )
    auto: bool = Field(
        False,
        description="choose the interval that loses least time (Young/Daly) from measured costs and failures; "
        "never rarer than every_steps and every_s say where they are above 0",
    )
    mtbf_hours: float = Field(
        0.0,
        ge=0,
        description="for auto: mean time between failures of the whole job, hours; 0: from hosts and what was seen",
    )
    restart_s: float = Field(
        300.0, ge=0, description="for auto: time from a failure until steps are done again, seconds"
    )
    memory_every_steps: int = Field(
        0,
        ge=0,
        description="besides, keep a snapshot in the memory of the hosts every this many optimizer steps; "
        "0: only of each checkpoint that is written",
    )
    mode: Mode = Field(
        "background",
        description="background: training goes on while a checkpoint is written; blocking: it stands still meanwhile, "
        "and nothing is kept in memory",
    )
    wait: bool = Field(False, description="training waits until each checkpoint is durable, at any price")

    folder: str = Field(
        "", description="where checkpoints go: a folder, or a URL such as s3://bucket/run; empty: RUN/checkpoints"
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="for the storage behind a URL, as fsspec names them (a table); no secrets: checkpoints keep it",
    )

    memory_slots: int = Field(
        0,
        ge=0,
        le=4,
        description="snapshots of each rank that fit into its host's memory, 2 to 4; 0: 3 where memory_every_steps is "
        "set, else 2",
    )
    replicas: Literal[True, False, "auto"] = Field(
        "auto",
        description="copy each snapshot to the memory of another host too; auto: where there is more than one host",
    )
    insecure_replicas: bool = Field(
        False,
        description="copy snapshots to other hosts also where no secret of the job is handed out (phalanx run does; "
        "else PHALANX_JOB_SECRET_FILE): the ranks agree on one, which who only listens does not learn; who can speak "
        "as a rank can read and forge snapshots",
    )
    rack: str = Field(
        "",
        description="what this host fails together with, such as its rack; replicas go elsewhere; "
        "empty: from PHALANX_RACK, else SLURM_TOPOLOGY_ADDR",
    )
    keeper_ttl_s: float = Field(
        1800.0, gt=0, description="how long snapshots stay in memory after the last rank of a host is gone, seconds"
    )

    keep_last: int = Field(
        2, ge=1, description="number of newest checkpoints kept on disk; older ones are deleted after a good save"
    )
    keep_every: int = Field(
        0,
        ge=0,
        description="besides, keep for good each checkpoint whose step is a multiple of this many steps; 0 keeps none",
    )
    keep_best: int = Field(0, ge=0, description="besides, keep this many with the lowest best_metric; 0 keeps none")
    best_metric: str = Field(
        "validation_loss", min_length=1, description="the figure that keep_best goes by; the lowest is the best"
    )
    budget_bytes: int = Field(
        0,
        ge=0,
        description='room for all checkpoints together: bytes, or such as "500 GB"; those that only keep_best and '
        "keep_every keep go first; 0: no limit",
    )

    wall_time_margin_s: float = Field(
        60.0,
        ge=0,
        description="the last checkpoint is to be durable this many seconds before the scheduler ends the job "
        "(SLURM_JOB_END_TIME or PHALANX_DEADLINE)",
    )
    final_timeout_s: float = Field(
        1800.0, gt=0, description="how long the end of training waits for the last checkpoint to be durable, seconds"
    )
    verify: bool = Field(
        True,
        description="check every byte against its checksum before resuming; off checks names and sizes of files only",
    )

    @property
    def slots(self) -> int:
        """Snapshots that fit into memory, resolved."""
        return self.memory_slots or (3 if self.memory_every_steps else 2)

    def due(self, step: int) -> bool:
        """Whether `every_steps` wants a checkpoint after optimizer step `step` (the first step is 1).

        What `phalanx.checkpoint.snapshot_schedule` says takes the other settings into account too.
        """
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0

    def replicated(self, hosts: int) -> bool:
        """Whether snapshots are to be copied to other hosts, of `hosts` in all."""
        return hosts > 1 and self.replicas is not False

    def rack_of(self, environment: Mapping[str, str]) -> str:
        """The label of what this host fails together with; empty if nothing is known.

        ``SLURM_TOPOLOGY_ADDR`` is such as ``s0.s4.node17``: switches from the top, then the node itself.
        """
        switches = environment.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
        return self.rack or environment.get("PHALANX_RACK", "") or switches

    @field_validator("budget_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_mode(self) -> CheckpointConfig:
        if self.mode == "blocking" and self.memory_every_steps:
            raise ValueError(
                f"memory_every_steps = {self.memory_every_steps} does not fit mode = 'blocking', which keeps nothing "
                "in memory: set mode = 'background', or remove memory_every_steps"
            )
        if self.mode == "blocking" and self.replicas is True:
            raise ValueError(
                "replicas = true does not fit mode = 'blocking', which keeps nothing in memory: "
                "set mode = 'background', or remove replicas"
            )
        if self.memory_slots == 1:
            raise ValueError(
                "memory_slots = 1 leaves no good snapshot while one is taken: "
                "set it to 2, 3 or 4, or 0 to let it be chosen"
            )
        return self

    @model_validator(mode="after")
    def _check_storage(self) -> CheckpointConfig:
        if self.storage_options and "://" not in self.folder:
            raise ValueError(
                f"storage_options is set but folder = {self.folder!r} is no URL: "
                "give folder as a URL such as s3://bucket/run, or remove storage_options"
            )
        secret = _secret_key(self.storage_options)
        if secret is not None:
            raise ValueError(
                f"storage_options.{secret} looks like a secret, and every checkpoint keeps a copy of the settings: "
                "give it in the environment (AWS_SECRET_ACCESS_KEY, FSSPEC_S3_SECRET and the like) instead"
            )
        return self


def _secret_key(options: Mapping[str, Any], prefix: str = "") -> str | None:
    """The dotted key of an option that is one of those no config should hold."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            inner = _secret_key(value, f"{prefix}{key}.")
            if inner is not None:
                return inner
        elif _SECRETS.search(key) and value:
            return prefix + key
    return None
