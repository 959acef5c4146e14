"""Checkpoints: taken beside training, proven good, restored from the nearest place that has them.

For training loops of your own: `Checkpointer`, and `save_checkpoint` and `restore_checkpoint` for single ones (see
`phalanx.checkpoint.foreign.api`). They are imported when they are first asked for, since most of this package must not
need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.checkpoint.foreign.api import Checkpointer, restore_checkpoint, save_checkpoint

__all__ = ["Checkpointer", "restore_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phalanx.checkpoint.foreign import api

    return getattr(api, name)
