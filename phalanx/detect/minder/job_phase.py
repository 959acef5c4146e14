"""Phases of a job in which one machine works and all others wait for it: an evaluation or a save of one host.

The others wait at a barrier, where their GPUs spin: duty is 100 %, tensor cores do nothing. So does a job that hangs.
Who computes meanwhile is at work. Who writes meanwhile looks much like a process that hangs;
what tells it apart is that the machine's own GPUs rest from the same moment as the others', since all came to the same
barrier, and that its host does more. Either may take as long as collectives wait (`pause_s`), and no longer: a kernel
that never ends computes, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.fault_guess import MetricChange
from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_ACTIVITIES = ("gpu_tensor_core_activity", "gpu_sm_activity")
"""What a GPU that spins in a collective hardly shows."""

_IDLE, _BUSY = 0.05, 0.1
"""Activity of GPUs that do nothing, and of those that compute."""

_FELL, _STAYED = 0.1, 0.07
"""Of the limits of power: by how much it falls when GPUs only spin, and may change where they go on."""

_WRITES: Mapping[str, float] = {"cpu_usage": 0.15, "tcp_throughput": 0.05}
"""Rises, in widths of the limits, of a host that writes what others wait for; a core dump takes less."""

_AT_ONCE_S = 4.0
"""Between the last work of the machine's GPUs and that of the others': they stop at different parts of a step."""

_AROUND_S, _PROBE_S = 60.0, 20.0
"""About the onset, in which the last work is looked for; and at the end of a pause, whether they wait still."""


def works_alone(
    found: FaultyMachines, changes: Sequence[MetricChange], table: MetricTable, first: int, pause_s: float
) -> bool:
    """Whether the machine computes while the others wait or do nothing, and has not done so for too long.

    Args: as of `may_write`.
    """
    return _computes_alone(changes) and not _others_still_wait(found, changes, table, first, pause_s)


def _computes_alone(changes: Sequence[MetricChange]) -> bool:
    by_name = {one.metric: one for one in changes}
    for metric in _ACTIVITIES:
        one = by_name.get(metric)
        if one is not None and math.isfinite(one.of_peers) and math.isfinite(one.value):
            return one.of_peers < _IDLE and one.value >= _BUSY
    power = by_name.get("gpu_power_draw")
    if power is None or not math.isfinite(power.change):
        return False
    return power.of_job <= -_FELL and abs(power.change + power.of_job) <= _STAYED


def may_write(
    found: FaultyMachines, changes: Sequence[MetricChange], table: MetricTable, first: int, pause_s: float
) -> bool:
    """Whether it may save something that the others wait for, and has not done so for too long.

    Args:
        table: in the units of the catalogue; to its end is seen whether the others wait.
        first: sample of the judge that is the table's first.
        pause_s: for how long a save may take.
    """
    by_name = {one.metric: one for one in changes}
    if not any(name in by_name and by_name[name].change >= least for name, least in _WRITES.items()):
        return False
    metric = next((one for one in _ACTIVITIES if one in by_name and math.isfinite(by_name[one].of_peers)), None)
    if metric is None or by_name[metric].of_peers >= _IDLE or not by_name[metric].value < _IDLE:
        return False
    duty = by_name.get("gpu_duty_cycle")
    if duty is None or not duty.of_peers > max(0.5, duty.value):
        return False  # the others do not spin
    since, machine = max(0, found.since - first), found.machines[0]
    values = table.of(metric)
    own = _last_work(values[machine], since, table.period_s)
    others = _last_work(_middle(np.delete(values, machine, axis=0)), since, table.period_s)
    if own < 0 or others < 0 or abs(own - others) * table.period_s > _AT_ONCE_S:
        return False
    return not _others_still_wait(found, changes, table, first, pause_s)


def _others_still_wait(
    found: FaultyMachines, changes: Sequence[MetricChange], table: MetricTable, first: int, pause_s: float
) -> bool:
    """Whether the machine's difference is `pause_s` old, and the others wait still."""
    since = max(0, found.since - first)
    end = since + round(pause_s / table.period_s)
    if table.samples < end:
        return False
    known = {one.metric for one in changes if math.isfinite(one.of_peers)}
    metric = next((one for one in _ACTIVITIES if one in known), "gpu_power_draw")
    values = _middle(np.delete(table.of(metric), found.machines[0], axis=0))
    late = _median(values[max(0, end - round(_PROBE_S / table.period_s)) : end])
    if metric in _ACTIVITIES:
        return late < _IDLE
    limits = CATALOGUE[metric]
    before = _median(values[max(0, since - round(_AROUND_S / table.period_s)) : since])
    return late <= before - _FELL / 2 * (limits.upper - limits.lower)


def _median(values: NDArray[np.float32]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan


def _last_work(values: NDArray[np.float32], since: int, period_s: float) -> int:
    """The last sample about the onset that shows work, of one machine's activity; -1: none does, or it went on."""
    around = max(1, round(_AROUND_S / period_s))
    first, end = max(0, since - around), min(len(values), since + around)
    before = values[first:since]
    before = before[~np.isnan(before)]
    if not before.size:
        return -1
    level = float(np.quantile(before, 0.75))
    at_work = np.flatnonzero(values[first:end] > max(_IDLE, 0.5 * level))
    if not at_work.size or at_work[-1] == end - first - 1:
        return -1
    return first + int(at_work[-1])


def _middle(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over machines: [samples]; where nobody delivered, NaN."""
    known = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1], np.nan, np.float32)
    found[known] = np.nanmedian(values[:, known], axis=0)
    return found


def pause_end(found: FaultyMachines, pause_s: float, period_s: float) -> int:
    """Sample of the judge from which on a phase takes too long."""
    return found.since + round(pause_s / period_s)
