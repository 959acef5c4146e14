"""Figures and spans of a run: where they are written, and reading them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

# Not lazy: they may stand in the innermost loop of a script, where looking a name up would cost more than they do.
from phalanx.telemetry.current_recording import attach, span

if TYPE_CHECKING:
    from phalanx.telemetry.config import LoggingConfig, TelemetryConfig
    from phalanx.telemetry.loggers import MetricsLogger, open_loggers, read_json_lines
    from phalanx.telemetry.queries import Trace
    from phalanx.telemetry.recording import record_spans

__all__ = [
    "LoggingConfig",
    "MetricsLogger",
    "TelemetryConfig",
    "Trace",
    "attach",
    "open_loggers",
    "read_json_lines",
    "record_spans",
    "span",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.telemetry.current_recording": ["attach", "span"],
        "phalanx.telemetry.config": ["LoggingConfig", "TelemetryConfig"],
        "phalanx.telemetry.loggers": ["MetricsLogger", "open_loggers", "read_json_lines"],
        "phalanx.telemetry.queries": ["Trace"],
        "phalanx.telemetry.recording": ["record_spans"],
    },
)
