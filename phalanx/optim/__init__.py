"""Optimizers for any torch loop, and what `[optim]` of a config makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.optim.adamw import AdamW
    from phalanx.optim.bad_step import BadStepJudge
    from phalanx.optim.build import OptimizerSet, build_optimizer
    from phalanx.optim.came import CAME
    from phalanx.optim.config import GroupConfig, OptimConfig, ScheduleConfig
    from phalanx.optim.lamb import LAMB
    from phalanx.optim.muon import Muon
    from phalanx.optim.schedule import lr_factor
    from phalanx.optim.skipping import grad_norm

__all__ = [
    "CAME",
    "LAMB",
    "AdamW",
    "BadStepJudge",
    "GroupConfig",
    "Muon",
    "OptimConfig",
    "OptimizerSet",
    "ScheduleConfig",
    "build_optimizer",
    "grad_norm",
    "lr_factor",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.optim.adamw": ["AdamW"],
        "phalanx.optim.bad_step": ["BadStepJudge"],
        "phalanx.optim.build": ["OptimizerSet", "build_optimizer"],
        "phalanx.optim.came": ["CAME"],
        "phalanx.optim.skipping": ["grad_norm"],
        "phalanx.optim.config": ["GroupConfig", "OptimConfig", "ScheduleConfig"],
        "phalanx.optim.lamb": ["LAMB"],
        "phalanx.optim.muon": ["Muon"],
        "phalanx.optim.schedule": ["lr_factor"],
    },
)
