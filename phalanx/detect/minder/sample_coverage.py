"""What of a table can be judged: how long samples exist, what the collector lost, and values that no limits fit.

A verdict about fifteen minutes needs samples of them. What is lacking is said, with the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_REPORTS = 0.5
"""Share of the machines that must have samples of a moment for it to count."""

_LEAST_SAMPLES = 4
"""Within the time of continuity."""

_TOLD_GAP_S = 60.0
"""Gaps of all machines that the line of a healthy job tells of."""

_OUTSIDE = 0.5
"""Share of the values beyond a metric's limits from which on it is not judged."""

_MARGIN = 0.05
"""Beyond a limit, in widths of the metric, that values may lie."""

_REPLACED_S = 300.0
"""Between the end of a machine and the first sample of the one in its place."""


def outside_limits(table: MetricTable, metrics: Sequence[str]) -> dict[str, str]:
    """Metrics whose values nearly all lie beyond the catalogue's limits, and what is said of them."""
    found = {}
    for name in metrics:
        values = table.of(name)
        known = values[~np.isnan(values)]
        if not known.size:
            continue
        of = CATALOGUE[name]
        width = of.upper - of.lower
        above, below = known > of.upper + _MARGIN * width, known < of.lower - _MARGIN * width
        # Idle hosts given in per cent have zeros too: a ratio of 1.5 is none.
        is_percent = of.unit == "ratio" and float((known > 1.5).mean()) > _MARGIN
        if float((above | below).mean()) < _OUTSIDE and not is_percent:
            continue
        unit = "" if of.unit == "ratio" else f" {of.unit}"
        question = "are they percent?" if is_percent else "are they in another unit?"
        found[name] = (
            f"values of {name} lie outside {of.lower:g}..{of.upper:g}{unit} (median {float(np.median(known)):.4g}): "
            f"{question}; give their scale in a file of names (--names)"
        )
    return found


def what_samples_lack(table: MetricTable, metrics: Sequence[str], policy: MinderPolicy) -> str | None:
    """Why too few samples exist for a verdict, with the cure; None: there are enough."""
    needed_s = policy.settle_s + policy.continuity_s
    if table.period_s * _LEAST_SAMPLES > policy.continuity_s:
        return (
            f"a sample every {table.period_s:g} s is too seldom to judge {policy.continuity_s:g} s; "
            f"collect every {policy.continuity_s / _LEAST_SAMPLES:g} s or more often, or give a larger continuity_s"
        )
    reported = _reported(table.only(metrics))
    exist_s = float(reported.sum()) * table.period_s
    if exist_s < needed_s:
        cure = "give more, or a smaller continuity_s"
        seldom = reported.any() and exist_s < 0.5 * _span(reported) * table.period_s
        if seldom:
            cure = "say how often hosts are scraped (--scrape-s), or give more"
        return f"{exist_s:.0f} s of samples are too few, {needed_s:.0f} are needed; {cure}"
    if exist_s < 0.5 * table.samples * table.period_s and exist_s < 0.5 * _span(reported) * table.period_s:
        return (
            f"samples exist for {exist_s / 60:.0f} of {_span(reported) * table.period_s / 60:.0f} minutes only; "
            "say how often hosts are scraped (--scrape-s), or look at the collector"
        )
    return None


def collector_gaps(table: MetricTable, least_s: float) -> list[tuple[int, int]]:
    """First sample and the one after the last of gaps in which hardly any machine delivered anything."""
    reported = _reported(table)
    if not reported.any():
        return []
    first = int(reported.argmax())
    ends = np.flatnonzero(np.diff(np.concatenate([[1], reported[first : first + _span(reported)], [1]])))
    pairs = [(first + int(begin), first + int(end)) for begin, end in zip(ends[::2], ends[1::2], strict=True)]
    return [(begin, end) for begin, end in pairs if (end - begin) * table.period_s >= least_s]


def gap_words(table: MetricTable, gaps: Sequence[tuple[int, int]]) -> list[str]:
    """Of gaps of all machines: the collector is at fault, with the cure."""
    return [
        f"no machine delivered anything from {clock(table, begin)} to {clock(table, end)}: the collector did not work; "
        "look at its log"
        for begin, end in gaps
    ]


def ended_words(table: MetricTable, least_s: float) -> list[str]:
    """Of metrics that ended on nearly all machines long before the others did, with the cure."""
    reported = np.flatnonzero(_reported(table))
    ends: dict[int, list[str]] = {}
    for name in table.metrics:
        of_metric = np.flatnonzero(_reported(table.only([name])))
        if len(of_metric) and (reported[-1] - of_metric[-1]) * table.period_s >= least_s:
            ends.setdefault(int(of_metric[-1]) + 1, []).append(name)
    return [
        f"{', '.join(names)} ended at {clock(table, end)} on most machines while other metrics go on: not judged since "
        "then; look at the collector"
        for end, names in sorted(ends.items())
    ]


def coverage_text(table: MetricTable) -> str:
    """Minutes of samples that exist: ``15 minutes``, ``12 minutes of 15``."""
    reported = _reported(table)
    whole, exist = table.samples * table.period_s / 60, float(reported.sum()) * table.period_s / 60
    lost = sum(end - begin for begin, end in collector_gaps(table, _TOLD_GAP_S)) * table.period_s / 60
    outer = (table.samples - _span(reported)) * table.period_s / 60
    minutes = f"{round(whole):,} minute{'' if round(whole) == 1 else 's'}"
    if lost + outer < _TOLD_GAP_S / 60:
        return minutes
    return f"{exist:.0f} of {minutes}"


def replacements(table: MetricTable) -> dict[int, int]:
    """Machines that ended for good, and those that had never been there and began about then: a spare took over."""
    known = np.any(~np.isnan(table.values), axis=0)
    samples, near = table.samples, _REPLACED_S / table.period_s
    if not samples:
        return {}
    begins = np.where(known.any(axis=1), known.argmax(axis=1), samples)
    ends = np.where(known.any(axis=1), samples - 1 - known[:, ::-1].argmax(axis=1), -1)
    settled = 60 / table.period_s
    new = [int(one) for one in np.argsort(begins) if settled < begins[one] < samples]
    found: dict[int, int] = {}
    for one in np.argsort(ends):
        if not 0 <= ends[one] < samples - 1 - settled:
            continue
        follower = next(
            (
                other
                for other in new
                if other not in found.values() and other != one and -settled <= begins[other] - ends[one] <= near
            ),
            None,
        )
        if follower is not None:
            found[int(one)] = follower
    return found


def clock(table: MetricTable, sample: int) -> str:
    """The moment of a sample: ``14:20:55``."""
    return datetime.fromtimestamp(table.start_s + sample * table.period_s, UTC).strftime("%H:%M:%S UTC")


def _reported(table: MetricTable) -> NDArray[np.bool_]:
    """[samples]: whether at least half of the machines that ever delivered anything did so."""
    if not table.metrics:
        return np.zeros(table.samples, bool)
    known = np.any(~np.isnan(table.values), axis=0)
    there = known[known.any(axis=1)]
    if not len(there):
        return np.zeros(table.samples, bool)
    found: NDArray[np.bool_] = there.mean(axis=0) >= _REPORTS
    return found


def _span(reported: NDArray[np.bool_]) -> int:
    """Samples from the first that counts to the last."""
    at = np.flatnonzero(reported)
    return int(at[-1] - at[0] + 1) if len(at) else 0
