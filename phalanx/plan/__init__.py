"""What a run will cost: predictions, the search, hardware. Predicting is `phalanx.plan.predict.predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names, make_callable

if TYPE_CHECKING:
    from phalanx.plan.hardware import load_cluster, load_device
    from phalanx.plan.types import Job, Model, Strategy

__all__ = ["Job", "Model", "Strategy", "load_cluster", "load_device"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.plan.hardware": ["load_cluster", "load_device"],
        "phalanx.plan.types": ["Job", "Model", "Strategy"],
    },
)

make_callable(__name__, "phalanx.api.planning", "plan")
