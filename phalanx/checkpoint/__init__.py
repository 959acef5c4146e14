"""Checkpoints: taken beside training, proven good, restored from the nearest place that has them.

For training loops of your own: `Checkpointer`, and `save_checkpoint` and `restore_checkpoint` for single ones (see
`phalanx.checkpoint.foreign.checkpointer`). They are imported when they are first asked for, since most of this package
must not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.checkpoint.config import CheckpointConfig
    from phalanx.checkpoint.foreign.checkpointer import Checkpointer, restore_checkpoint, save_checkpoint
    from phalanx.checkpoint.foreign.huggingface_callback import PhalanxCheckpointCallback

__all__ = ["CheckpointConfig", "Checkpointer", "PhalanxCheckpointCallback", "restore_checkpoint", "save_checkpoint"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.checkpoint.config": ["CheckpointConfig"],
        "phalanx.checkpoint.foreign.checkpointer": ["Checkpointer", "restore_checkpoint", "save_checkpoint"],
        "phalanx.checkpoint.foreign.huggingface_callback": ["PhalanxCheckpointCallback"],
    },
)
