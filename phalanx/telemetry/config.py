"""How often figures are written down, and where to besides the run folder; whether spans are, and for how long."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from phalanx.core.config import Config

TAG = re.compile(r"[\w.:/][\w.:/-]*")
"""A tag of a run."""


class LoggingConfig(Config):
    """Settings of ``[logging]``. Every step's figures always go to ``metrics.jsonl`` in the run folder."""

    every_steps: int = Field(
        10,
        ge=1,
        description="fetch figures from the device, show and write them every this many steps (each step is written)",
    )
    mfu: bool = Field(
        True,
        description="share of the device's peak rate in the figures; a CPU's is measured at the start (0.25 s); "
        "false: neither",
    )
    file_bytes: int = Field(
        8 << 20, ge=0, description="size of a log file in <run folder>/logs, after which another is begun; 0: no files"
    )
    files: int = Field(4, ge=1, description="log files of each rank that are kept, the newest with its older ones")
    tensorboard: bool = Field(
        False, description="also write TensorBoard files (needs the extra phalanx-train[tensorboard])"
    )
    wandb: bool = Field(
        False, description="also send figures to Weights & Biases (needs the extra phalanx-train[wandb])"
    )
    wandb_project: str = Field("phalanx", min_length=1, description="project on Weights & Biases")
    wandb_entity: str = Field("", description="team or user on Weights & Biases; empty: your default")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline keeps figures in the run folder for a later `wandb sync`"
    )
    metrics_address: str = Field(
        "", description="HOST:PORT where Prometheus reads figures of the run at /metrics; port 0: any; empty: nowhere"
    )

    def due(self, step: int) -> bool:
        """Whether figures are to be fetched and shown after optimizer step `step` (the first step is 1)."""
        return step % self.every_steps == 0


class TelemetryConfig(Config):
    """Settings of ``[telemetry]``: what every rank did from when to when, into ``telemetry`` in the run folder."""

    spans: bool = Field(True, description="record spans on every rank (docs/trace.md)")
    keep_spans_s: float = Field(
        1800.0, gt=0, description="keep every span so long; sums by rank, step and type are kept for good"
    )
    around_incidents_s: float = Field(
        120.0, ge=0, description="keep every span from so long before an incident until so long after it for good"
    )
    upload: str = Field(
        "",
        description="URL such as s3://bucket/run, where telemetry and figures are sent, too; empty: nowhere. "
        "What the client of that storage needs comes from the environment",
    )
    most_span_bytes: int = Field(
        2 << 30, ge=0, description="of spans that a host keeps; beyond, the oldest go first, those of incidents last"
    )
    norms_every: int = Field(
        0,
        ge=0,
        description="write norms of each layer's weights, gradients and activations every this many steps; 0: never",
    )
    digests_every: int | None = Field(
        None,
        ge=0,
        description="compare digests of weights, gradients and optimizer state between ranks that hold copies, and "
        "write them, every this many steps, and of several ranks before each checkpoint; 0: never; unset: "
        "100 where ranks hold copies (parallel.replicate or tensor above 1), else never",
    )
    replay_every: int = Field(
        0,
        ge=0,
        description="every this many steps each rank computes a micro-batch of its own and one of its neighbour, and "
        "they compare loss and gradients bit by bit; 0: never",
    )
    recompute_sigma: float = Field(
        0.0,
        ge=0,
        description="compute a step again whose gradient norm is so many standard deviations above those before, and "
        "report it if the result is another; the host then waits for the device in every step; 0: never",
    )
    at_corruption: Literal["stop", "report"] = Field(
        "stop",
        description="where bits differ: stop with an error that names the rank, before a checkpoint is taken; or "
        "report it and go on",
    )
