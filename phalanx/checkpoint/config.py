"""When checkpoints are written and which of them are kept."""

from __future__ import annotations

from pydantic import Field

from phalanx.core.config import Config


class CheckpointConfig(Config):
    """Settings of ``[checkpoint]``. A checkpoint is always written at the end of training and on a clean stop."""

    every_steps: int = Field(
        1000, ge=0, description="write a checkpoint every this many optimizer steps; 0 writes one only at the end"
    )
    keep_last: int = Field(
        2, ge=1, description="number of newest checkpoints kept on disk; older ones are deleted after a good save"
    )
    keep_every: int = Field(
        0,
        ge=0,
        description="besides, keep for good each checkpoint whose step is a multiple of this many steps; 0 keeps none",
    )
    verify: bool = Field(
        True,
        description="check every byte against its checksum before resuming; off checks names and sizes of files only",
    )

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after optimizer step `step` (the first step is 1)."""
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0
