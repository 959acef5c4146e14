"""Samples that nothing can have measured: infinite ones, and what exporters send in place of a value they lack.

DCGM, say, has 2147483632 and 9223372036854775794 for "not known". They count as no samples, and are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.detect.minder.sample_coverage import clock
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_BEYOND = 100.0
"""Widths of a metric's limits beyond them: further than another unit for people (per cent, newer GPUs) would be."""

_SHOWN = 3


@dataclass(frozen=True)
class Impossible:
    """Of one metric of one machine.

    Attributes:
        metric: its name.
        machine: its index.
        count: of samples.
        first: the first of them.
        example: its value.
    """

    metric: str
    machine: int
    count: int
    first: int
    example: float


def without_impossible(table: MetricTable) -> tuple[MetricTable, tuple[Impossible, ...]]:
    """The table with those missing, and which they were, the most first."""
    found, values = [], table.values
    for row, name in enumerate(table.metrics):
        of = CATALOGUE[name]
        width = of.upper - of.lower
        with np.errstate(invalid="ignore"):
            is_odd = (table.values[row] > of.upper + _BEYOND * width) | (table.values[row] < of.lower - _BEYOND * width)
        if not is_odd.any():
            continue
        values = values.copy() if values is table.values else values
        values[row][is_odd] = np.nan
        for machine in np.flatnonzero(is_odd.any(axis=1)):
            first = int(is_odd[machine].argmax())
            count = int(np.count_nonzero(is_odd[machine]))
            found.append(Impossible(name, int(machine), count, first, float(table.values[row, machine, first])))
    cleaned = table if values is table.values else replace(table, values=values)
    return cleaned, tuple(sorted(found, key=lambda one: -one.count))


def long_words(found: Sequence[Impossible], table: MetricTable, least_s: float) -> list[str]:
    """Of those that lasted: whose, since when, and the cure."""
    lasting = [one for one in found if one.count * table.period_s >= least_s]
    words = [
        f"{table.machines[one.machine]} gives values of {one.metric} that cannot be, such as {one.example:.4g}, from "
        f"{clock(table, one.first)} on ({one.count * table.period_s:.0f} s): they count as no samples; "
        "look at its exporter"
        for one in lasting[:_SHOWN]
    ]
    left = len(lasting) - _SHOWN
    return (
        [*words, f"so do {left} more, of a machine and a metric each; look at their exporters"] if left > 0 else words
    )


def short_words(found: Sequence[Impossible], table: MetricTable, least_s: float) -> str:
    """Of the others, behind what was looked at: how many were left out; empty: none."""
    few = [one for one in found if one.count * table.period_s < least_s]
    if not few:
        return ""
    count = sum(one.count for one in few)
    which = f"{few[0].metric} of {table.machines[few[0].machine]}"
    return (
        f"; {count:,} value{'s' if count > 1 else ''} that cannot be left out, such as {few[0].example:.4g} in {which}"
    )
