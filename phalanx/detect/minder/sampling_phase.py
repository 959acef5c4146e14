"""Differences that come from when hosts are asked, not from what they do.

A step has short parts, and steps often last nearly a whole number of seconds. Then one host is always asked, or
averaged, at another part of the step than the others, for minutes, until steps have slipped by a second; after a pause
of the job all are asked at other parts than before. Two things tell this from a fault: the machine's mean is what it
was against those that were like it, or each of its samples is what they had a sample earlier or later, while the job
goes on as before.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_BEFORE_S, _DEVELOPED_S = 240.0, 20.0
"""Time before the onset that is compared, and when a fault has developed after it."""

_NEAR, _LEAST_NEAR = 24, 3
"""Machines, of those that were most like it, that it is compared with."""

_BLOCK_S = 24.0
"""Means are taken over so long, some steps, and their median counts: a checkpoint is in one or two of them."""

_SAME_LOAD = 0.05
"""Of the others' mean, that may have changed while the job goes on as before."""

_ALIKE = 0.5
"""Of what it differs now, that a machine may have differed from its like before."""

_WORK = ("gpu_tensor_core_activity", "gpu_power_draw")
"""By which is known whether a job does what it did."""

_OTHER_WORK = ("gpu_nvlink_bandwidth", "gpu_sm_activity", "gpu_duty_cycle")
"""The same where those are not collected."""

_BEYOND = 0.2
"""Of the difference, that may lie beyond what its like had a sample earlier or later."""


def is_sampling(metric: str, least: float, found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether the first machine's difference in a metric may come from when it is asked.

    Args:
        least: change of the mean, in widths of the metric's limits, from which on it is a difference.
        table: in the units of the catalogue.
        first: sample of the judge that is the table's first.
    """
    values, machine = table.of(metric), found.machines[0]
    since, end = max(1, found.since - first), min(found.at - first + 1, table.samples - 1)
    before = slice(max(0, since - round(_BEFORE_S / table.period_s)), since)
    after = slice(min(since + round(_DEVELOPED_S / table.period_s), end - 1), end)
    block = max(1, round(_BLOCK_S / table.period_s))
    if min(before.stop - before.start, after.stop - after.start) < 2 * block:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what nobody measured
        near = _like(values[:, before], found.machines)
        if len(near) < _LEAST_NEAR:
            return False
        peers = np.nanmean(values[near], axis=0)
        apart = values[machine] - peers
        change = abs(_middle_mean(apart[after], block) - _middle_mean(apart[before], block))
        width = CATALOGUE[metric].upper - CATALOGUE[metric].lower
        if change < least * width:
            return True
        was, now = _middle_mean(peers[before], block), _middle_mean(peers[after], block)
        if not abs(now - was) <= _SAME_LOAD * abs(was):
            return False  # a fault that slows a job changes what the others do
        return _is_shifted(values[machine, since:end], values[near, since - 1 : end + 1])


def shows_work(table: MetricTable) -> bool:
    """Whether any metric of the table tells what the job does."""
    return bool(_work_metrics(table))


def _work_metrics(table: MetricTable) -> tuple[str, ...]:
    return tuple(one for one in _WORK if one in table.metrics) or tuple(
        one for one in _OTHER_WORK if one in table.metrics
    )


def has_job_changed(found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether the GPUs of the others have done less, or something else, since the incident began: they wait for it."""
    since, end = found.since - first, min(found.at - first + 1, table.samples)
    around = round(_BEFORE_S / table.period_s)
    before, after = slice(max(0, since - around), max(0, since)), slice(max(0, since), end)
    block = max(1, round(_BLOCK_S / table.period_s))
    if min(before.stop - before.start, after.stop - after.start) < 2 * block:
        return False
    others = [one for one in range(len(table.machines)) if one not in found.machines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what nobody measured
        for metric in _work_metrics(table):
            peers = np.nanmean(table.of(metric)[others], axis=0)
            was, now = _middle_mean(peers[before], block), _middle_mean(peers[after], block)
            if abs(now - was) > _SAME_LOAD * abs(was):
                return True
    return False


def was_alike(metric: str, found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether the first machine was like some of the others before the incident, for what it differs from them now."""
    values, machine = table.of(metric), found.machines[0]
    since, end = max(1, found.since - first), found.at - first + 1
    before = slice(max(0, since - round(_BEFORE_S / table.period_s)), since)
    block = max(1, round(_BLOCK_S / table.period_s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what nobody measured
        near = _like(values[:, before], found.machines)
        near = near[: max(_LEAST_NEAR, len(near) // 3)]  # not those of another generation
        if len(near) < _LEAST_NEAR:
            return False
        apart = values[machine] - np.nanmean(values[near], axis=0)
        was, now = _middle_mean(apart[before], block), _middle_mean(apart[since:end], block)
        return abs(was) < _ALIKE * abs(now)


def _like(before: NDArray[np.float32], machines: tuple[int, ...]) -> NDArray[np.int64]:
    """Machines that were most like the first of some, without those."""
    unlike = np.nanmean(np.abs(before - before[machines[0]]), axis=1)
    unlike[list(machines)] = np.nan
    return np.argsort(unlike)[: min(_NEAR, int(np.count_nonzero(~np.isnan(unlike))))]


def _middle_mean(values: NDArray[np.float32], block: int) -> float:
    parts = np.array_split(values, max(1, len(values) // block))
    return float(np.nanmedian([np.nanmean(one) for one in parts]))


def _is_shifted(own: NDArray[np.float32], others: NDArray[np.float32]) -> bool:
    """Whether samples lie within most of what others had at that sample, the one before and the one after."""
    low, middle, high = np.nanquantile(others, (0.2, 0.5, 0.8), axis=0)
    low = np.minimum(np.minimum(low[:-2], low[1:-1]), low[2:])
    high = np.maximum(np.maximum(high[:-2], high[1:-1]), high[2:])
    beyond, plain = own - np.clip(own, low, high), own - middle[1:-1]
    known = ~np.isnan(beyond) & ~np.isnan(plain)
    return bool(known.any() and np.abs(beyond[known]).mean() < _BEYOND * np.abs(plain[known]).mean())
