"""Figures of a run: where they are written, and reading them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.telemetry.config import LoggingConfig
    from phalanx.telemetry.loggers import MetricsLogger, open_loggers, read_json_lines

__all__ = ["LoggingConfig", "MetricsLogger", "open_loggers", "read_json_lines"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.telemetry.config": ["LoggingConfig"],
        "phalanx.telemetry.loggers": ["MetricsLogger", "open_loggers", "read_json_lines"],
    },
)
