"""Collectors that repeat their last value: all metrics of a machine, or all of its GPUs, stand still to the last bit.

What is measured scatters. Some metrics are constant for good reasons (duty at 100 %, no pause frames, GPUs at rest): a
metric counts where the same one of most other machines moves meanwhile, and the machine's own moved before. A machine
that died stands at new values; one whose collector is stuck, at a value that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.detection import Culprit, Detection, Onset
from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.minder.sample_coverage import clock
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_LEAST_S, _LEAST_SAMPLES = 120.0, 8
"""For how long values must stand still."""

_BEFORE_S = 120.0
"""Before that, in which values moved, and among which the repeated one is."""

_MOVES = 3
"""Different values of a metric that moves, over so long."""

_CONFIDENCE = 0.5


@dataclass(frozen=True)
class Repeat:
    """A machine whose collector repeats its last values.

    Attributes:
        machine: its index.
        metrics: that stand still, those of GPUs, of the host, or both.
        since: sample of the table that is the first repetition.
        end: the one after the last.
    """

    machine: int
    metrics: tuple[str, ...]
    since: int
    end: int


def find_repeats(table: MetricTable) -> tuple[Repeat, ...]:
    """Of all machines, the longest stretch of each in its host's metrics and in those of its GPUs."""
    least = max(_LEAST_SAMPLES, round(_LEAST_S / table.period_s))
    if table.samples <= least + 1 or len(table.machines) < 2:
        return ()
    found: dict[int, Repeat] = {}
    for is_of_gpus in (True, False):
        rows = [row for row, name in enumerate(table.metrics) if CATALOGUE[name].is_of_gpus == is_of_gpus]
        for machine, since, end in _stretches(table.values[rows], least):
            metrics = _stuck(table, rows, machine, slice(since, end))
            if not metrics:
                continue
            known = found.get(machine)
            found[machine] = Repeat(
                machine,
                (*(known.metrics if known else ()), *metrics),
                min(since, known.since) if known else since,
                max(end, known.end) if known else end,
            )
    return tuple(found.values())


def is_of(repeat: Repeat, found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether an incident is seen by metrics that a collector repeated then.

    Args:
        table: that repetitions were found in.
        first: sample of the judge that is the table's first.
    """
    seen_by = (found.metric,) if found.metric else found.vanished
    near = round(_LEAST_S / table.period_s)
    begins = repeat.since - near <= found.since - first < repeat.end
    return begins and found.at - first >= repeat.since and set(seen_by) <= set(repeat.metrics)


def detection_of(repeat: Repeat, table: MetricTable) -> Detection:
    """In the shape of all judges: nobody is blamed."""
    name = table.machines[repeat.machine]
    lasted_s = (repeat.end - repeat.since) * table.period_s
    is_all = len(repeat.metrics) == len(table.metrics)
    which = "all metrics" if is_all else f"{', '.join(repeat.metrics[:2])}" + _more(len(repeat.metrics) - 2)
    until = "" if repeat.end >= table.samples else f" until {clock(table, repeat.end)}"
    return Detection(
        what="collector that repeats values",
        sentence=f"{name}: its collector repeats a value of {which} since {clock(table, repeat.since)}{until}, "
        "no machine is blamed",
        who=(Culprit("host", name, hosts=(name,)),),
        since=Onset(table.start_s + repeat.since * table.period_s),
        confidence=_CONFIDENCE,
        why=(
            f"for {lasted_s:.0f} s each of its samples is the same to the last bit, while those of the other machines "
            "move",
        ),
        then=(f"look at the exporter of {name} and what it reads from: what is measured now nobody knows",),
        advice="watch",
        figures={
            "raised_unix_s": table.start_s
            + min(repeat.since + round(_LEAST_S / table.period_s), table.samples - 1) * table.period_s,
            "metric": repeat.metrics[0],
            "repeated_s": lasted_s,
            "machines": len(table.machines),
        },
    )


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _stretches(values: NDArray[np.float32], least: int) -> list[tuple[int, int, int]]:
    """Machines whose metrics all stand still for long: index, first repetition, and the sample after the last.

    Args:
        values: [metrics, machines, samples]; metrics that hardly move anywhere are left out, and those that a machine
            does not deliver.
    """
    is_still = np.ones((values.shape[1], values.shape[2] - 1), bool)
    for of_metric in values:
        is_same = of_metric[:, 1:] == of_metric[:, :-1]  # NaN is never the same
        if np.median(is_same.mean(axis=1)) > 1 - _MOVES / least:
            continue
        is_still &= is_same | np.isnan(of_metric).all(axis=1)[:, None]
    found = []
    sums = np.cumsum(is_still, axis=1, dtype=np.int32)
    is_long = (sums[:, least - 1 :] - np.pad(sums, ((0, 0), (1, 0)))[:, :-least] == least).any(axis=1)
    for machine in np.flatnonzero(is_long):
        turns = np.flatnonzero(np.diff(np.concatenate([[0], is_still[machine].astype(np.int8), [0]])))
        begins, ends = turns[::2], turns[1::2]
        longest = int((ends - begins).argmax())
        found.append((int(machine), int(begins[longest]) + 1, int(ends[longest]) + 1))
    return found


def _stuck(table: MetricTable, rows: Sequence[int], machine: int, during: slice) -> tuple[str, ...]:
    """Which of the metrics are those of a collector that is stuck; none: the machine itself stands still."""
    before = slice(max(0, during.start - round(_BEFORE_S / table.period_s)), max(1, during.start - 1))
    found, measured = [], 0
    for row in rows:
        values, known = table.values[row], CATALOGUE[table.metrics[row]]
        own, was = values[machine, during], values[machine, before]
        if np.isnan(own).any() or not _moves_elsewhere(values[:, during], machine):
            continue
        was = was[~np.isnan(was)]
        if was.size and not was.min() <= own[0] <= was.max():
            return ()  # a new value
        found.append(table.metrics[row])
        measured += known.lower < own[0] < known.upper
    return tuple(found) if measured else ()


def _moves_elsewhere(during: NDArray[np.float32], machine: int) -> bool:
    """Whether the values of most other machines change."""
    steps = np.diff(np.delete(during, machine, axis=0), axis=1)
    changes = ((steps != 0) & ~np.isnan(steps)).sum(axis=1)
    return bool(np.median(changes) >= _MOVES)
