"""Phalanx: train large language models on one laptop core or on thousands of GPUs with the same code.

The names below are the public Python interface (docs/api.md), imported when they are first asked for. They are not
imported here for type checkers either: every module would then be in one cycle of imports.
"""

from __future__ import annotations

from phalanx.core.lazy_names import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        # Rooms that are called like the function are callable packages.
        "phalanx.plan": ["plan"],
        "phalanx.simulate": ["simulate"],
        "phalanx.train": ["train"],
        "phalanx.api.planning": ["search"],
        "phalanx.api.training": ["load_config"],
        "phalanx.checkpoint.foreign.checkpointer": ["Checkpointer"],
        "phalanx.model.decoder": ["Decoder"],
        "phalanx.train.reports.callbacks": ["Callback", "CallbackError"],
    },
)
