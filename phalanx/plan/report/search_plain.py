"""What a search found as plain values for JSON: stable keys, with units in their names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.plan.report.plain import VERSION, strategy_json
from phalanx.plan.search.keys import foreign, toml_keys
from phalanx.plan.search.limits import limits_of
from phalanx.plan.search.result import SearchResult, Sensitivity, memory_bytes
from phalanx.plan.types import Prediction


def search_json(result: SearchResult) -> dict[str, Any]:
    """Everything that a search found, best first."""
    return {
        "version": VERSION,
        "machine": asdict(result.machine),
        "asked": [bound.text for bound in result.asked.bounds],
        "limit_bytes": result.limit_bytes,
        "candidates": result.candidates,
        "fitting": result.fitting,
        "predicted": result.predicted,
        "proven": result.proven,
        "lower_s": result.lower_s,
        "seconds": result.seconds,
        "best": [layout_json(prediction, result.limit_bytes) for prediction in result.best],
        "shapes": [layout_json(prediction, result.limit_bytes) for prediction in result.shapes],
        "pareto": [layout_json(prediction, result.limit_bytes) for prediction in result.pareto],
        "unlimited": layout_json(result.unlimited, result.limit_bytes),
        "sensitivities": [_sensitivity(choice) for choice in result.sensitivities],
        "removed": [asdict(rule) for rule in result.removed],
    }


def layout_json(prediction: Prediction, limit_bytes: float) -> dict[str, Any]:
    """One layout that a search found, without its parts."""
    return {
        "strategy": strategy_json(prediction.strategy),
        "step_s": float(prediction.step_s),
        "tokens_per_s": float(prediction.tokens_per_s),
        "mfu_ratio": float(prediction.mfu),
        "memory_bytes": float(memory_bytes(prediction)),
        "limits": [limit.words for limit in limits_of(prediction, limit_bytes)],
        "toml": toml_keys(prediction.job, prediction.strategy),
        "not_possible_yet": list(foreign(prediction.strategy)),
    }


def _sensitivity(choice: Sensitivity) -> dict[str, Any]:
    return {
        "choice": choice.choice,
        "value": choice.value,
        "spread_s": choice.spread_s,
        "outcomes": [
            {
                "value": outcome.value,
                "best_step_s": None if outcome.best is None else outcome.best.step_s,
                "proven": outcome.proven,
                "least_bytes": outcome.least_bytes,
                "alone_step_s": None if outcome.alone is None else outcome.alone.step_s,
            }
            for outcome in choice.outcomes
        ],
    }
