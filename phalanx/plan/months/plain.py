"""Months as plain values for JSON: stable keys, with units in their names. What is infinite is null."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from phalanx.plan.months.outcome import Estimate
from phalanx.plan.months.report import MonthsReport, Tried

VERSION = 1
"""Grows when a key goes or changes its meaning; new keys leave it as it is."""


def months_json(report: MonthsReport) -> dict[str, Any]:
    """Everything that is known of a story. `shares` sum to 1."""
    outcome, story = report.outcome, report.story
    plain = {
        "version": VERSION,
        "runs": len(outcome.samples.wall_s),
        "seed": outcome.seed,
        "failures_source": report.source,
        "failures_are_recorded": report.is_recorded,
        "work": asdict(story.work),
        "recovery": asdict(story.recovery),
        "checkpoints": asdict(story.checkpoints),
        "pool": asdict(story.pool),
        "failure_classes": [_class(c) for c in (asdict(c) for c in story.failures.classes)],
        "ettr_ratio": asdict(outcome.ettr),
        "goodput_ratio": asdict(outcome.goodput),
        "days": asdict(outcome.days),
        "steps": asdict(outcome.steps),
        "device_hours": asdict(outcome.device_hours),
        "cost": asdict(outcome.cost),
        "finished_ratio": outcome.finished,
        "shares_ratio": {name: asdict(share) for name, share in outcome.shares.items()},
        "counts": {name: asdict(count) for name, count in outcome.counts.items()},
        "most_hosts_away": asdict(outcome.most_out),
        "formulas": _formulas(report),
        "intervals": [_tried(tried, "interval_s") for tried in report.intervals],
        "spares": [_tried(tried, "spares") for tried in report.spares],
    }
    cleaned: dict[str, Any] = finite(plain)
    return cleaned


def finite(value: Any) -> Any:
    """The same, with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _class(failure: dict[str, Any]) -> dict[str, Any]:
    repair = failure.pop("repair")
    return {**failure, "repair_mean_s": repair["mean_s"]}


def _formulas(report: MonthsReport) -> dict[str, Any]:
    form = report.form
    return {
        "ettr_ratio": form.ettr,
        "meta_ettr_ratio": form.meta_ettr,
        "mtbf_s": form.mtbf_s,
        "young_s": form.young_s,
        "daly_s": form.daly_s,
        "enough_hosts_ratio": form.enough_hosts,
        "hosts_away": form.away_hosts,
    }


def _tried(tried: Tried, key: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"why": tried.why, key: tried.value}
    plain |= {"ettr_ratio": tried.ettr, "goodput_ratio": tried.goodput}
    if tried.played is not None:
        gain: Estimate = tried.played.gain
        plain |= {"played_ettr_ratio": asdict(tried.played.outcome.ettr), "gain_ratio": asdict(gain)}
    return plain
