"""How often figures are written down, and where to besides the run folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phalanx.core.config import Config


class LoggingConfig(Config):
    """Settings of ``[logging]``. Every step's figures always go to ``metrics.jsonl`` in the run folder."""

    every_steps: int = Field(
        10,
        ge=1,
        description="fetch figures from the device, show and write them every this many steps (each step is written)",
    )
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

    def due(self, step: int) -> bool:
        """Whether figures are to be fetched and shown after optimizer step `step` (the first step is 1)."""
        return step % self.every_steps == 0
