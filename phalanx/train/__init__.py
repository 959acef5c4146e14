"""The training loop: the whole config of a run, and trained models opened from run folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names, make_callable

if TYPE_CHECKING:
    from phalanx.train.config import EvaluateConfig, RunConfig, TrainConfig
    from phalanx.train.evaluation import Evaluation
    from phalanx.train.weights.trained import Trained, open_trained

__all__ = ["EvaluateConfig", "Evaluation", "RunConfig", "TrainConfig", "Trained", "open_trained"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.train.config": ["EvaluateConfig", "RunConfig", "TrainConfig"],
        "phalanx.train.evaluation": ["Evaluation"],
        "phalanx.train.weights.trained": ["Trained", "open_trained"],
    },
)

make_callable(__name__, "phalanx.api.training", "train")
