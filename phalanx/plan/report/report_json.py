"""Predictions and search results as plain values for JSON: stable keys, with units in their names."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from phalanx.plan.report.report_model import (
    MEMORY_KINDS,
    PredictionReport,
    changed_settings,
    foreign,
    limits_of,
    toml_keys,
)
from phalanx.plan.search.frontier import memory_bytes
from phalanx.plan.search.search import SearchResult, Sensitivity
from phalanx.plan.types import INTERVAL_SHARE, Model, Part, Prediction, RankMemory, Strategy

VERSION = 1
"""Grows when a key goes or changes its meaning; new keys leave it as it is."""


def prediction_json(report: PredictionReport) -> dict[str, Any]:
    """Everything that is known of a prediction. `parts` sum to `step_s`; `hidden` is beside that sum."""
    prediction = report.prediction
    return {
        "version": VERSION,
        "name": report.name,
        "cluster": prediction.cluster,
        "device": report.device,
        "devices": prediction.devices,
        "parameters": report.parameters,
        "job": _job(report),
        "strategy": strategy_json(prediction.strategy),
        "step_s": prediction.step_s,
        "step_interval_s": None if prediction.interval_s is None else list(prediction.interval_s),
        "interval_share_ratio": None if prediction.interval_s is None else INTERVAL_SHARE,
        "efficiency_ratio": prediction.job.added.efficiency,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu_ratio": prediction.mfu,
        "model_flops_per_step": prediction.model_flops,
        "run_tokens": report.total_tokens or None,
        "run_s": report.run_s,
        "run_device_hours": report.device_hours,
        "cost_usd": report.cost_usd,
        "fits": report.fits,
        "device_memory_bytes": report.device_memory_bytes,
        "parts": [part_json(part) for part in prediction.parts],
        "hidden": [part_json(part) for part in prediction.hidden],
        "memory": [memory_json(rank) for rank in prediction.memory],
        "start_up": [part_json(part) for part in prediction.start_up],
        "reliefs": [_relief(report, one) for one in report.reliefs],
        "notes": [*report.remarks, *prediction.notes],
    }


def _relief(report: PredictionReport, one: Prediction) -> dict[str, Any]:
    settings = changed_settings(report.prediction.strategy, one.strategy)
    fullest = max(float(rank.total) for rank in one.memory)
    return {"settings": settings, "step_s": one.step_s, "fullest_bytes": fullest}


def part_json(part: Part) -> dict[str, Any]:
    """A part, with `seconds`, how it is known, and what it rests on."""
    return {"path": part.path, "seconds": float(part.seconds), "mark": part.mark, "source": part.source}


def memory_json(rank: RankMemory) -> dict[str, Any]:
    """Bytes by kind, and in all."""
    kinds = {f"{kind}_bytes": float(getattr(rank, kind)) for kind in MEMORY_KINDS}
    return {"pipeline_rank": rank.pipeline_rank, **kinds, "total_bytes": float(rank.total)}


def strategy_json(strategy: Strategy) -> dict[str, Any]:
    """Every field of a strategy, integers being plain ones."""
    values = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    return {name: value if isinstance(value, str | bool) else int(value) for name, value in values.items()}


def model_json(model: Model) -> dict[str, Any]:
    """Every field of a model."""
    return asdict(model)


def _job(report: PredictionReport) -> dict[str, Any]:
    job = report.prediction.job
    return {
        "model": model_json(job.model),
        "sequence_tokens": job.sequence,
        "global_batch_sequences": job.global_batch,
        "precision": job.precision,
        "optimizer": job.optimizer,
        "state_bits": job.state_bits,
        "software": asdict(job.software),
    }


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
