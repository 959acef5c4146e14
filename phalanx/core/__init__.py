"""What every room may use: the config contract, errors, and the small shared contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.core.config import Config, load, validate
    from phalanx.core.errors import UserError
    from phalanx.core.layout import Layout, Shard

__all__ = ["Config", "Layout", "Shard", "UserError", "load", "validate"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.core.config": ["Config", "load", "validate"],
        "phalanx.core.errors": ["UserError"],
        "phalanx.core.layout": ["Layout", "Shard"],
    },
)
