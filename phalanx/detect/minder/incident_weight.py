"""How much an incident weighs: a difference that is small, harmless or over is worth a look, and blames no machine.

Metrics that vanished while nothing else changed may be a fault of the exporter as well: they are no ground to take a
machine out.

Thresholds are of the healthy noise, so that where a job is idle a cron job stands out. What a machine must show to be
called faulty is in the units of the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.detection import Advice
from phalanx.detect.minder.fault_guess import MetricChange
from phalanx.detect.minder.job_phase import may_write, pause_end, works_alone
from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.minder.sample_coverage import clock
from phalanx.detect.minder.sampling_phase import has_job_changed, is_sampling, shows_work, was_alike
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

LEAST_EFFECT: Mapping[str, float] = {"pfc_tx_packet_rate": 0.002, "cpu_usage": 0.05}
"""Difference from the peers, in widths of a metric's limits, that blames a machine; of others `_LEAST`."""

_LEAST = 0.02

_LOAD = ("cpu_usage", *(name for name, metric in CATALOGUE.items() if metric.is_of_gpus))
"""More of these is more work."""

_IDLE = 0.05
"""Activity of GPUs below which they do nothing."""

_LAST_S, _PART_S = 90.0, 15.0
"""At the end of a table, that shows whether a difference is over: in each part, since links fail now and then."""

_SETTLED_S = 10.0
"""After metrics began to lack, from when on it is seen whether scrapes fail: a scrape that hangs fails late."""

_ODD = 0.05
"""Change against the peers, in widths of a metric's limits, of a machine that does not go on as before."""

_LEFT = 0.3
"""Of a difference, that is left where it is over."""


@dataclass(frozen=True)
class Light:
    """Why an incident blames no machine.

    Attributes:
        what: its class in some words.
        reason: first of the reasons.
        cure: what to look at.
        sentence: in place of the usual one; empty: that one.
        since: sample of the table in which it began; negative: as the incident says.
        advice: the most that it is worth; ``check`` blames the machine, though not for certain.
        until: sample of the judge from which on it no longer excuses the machine; negative: it does for ever.
    """

    what: str
    reason: str
    cure: str
    sentence: str = ""
    since: int = -1
    advice: Advice = "watch"
    until: int = -1


def light_reason(
    found: FaultyMachines, table: MetricTable, changes: tuple[MetricChange, ...], first: int, pause_s: float
) -> Light | None:
    """Why the incident blames no machine, or not for certain; None: it does.

    Args:
        table: in the units of the catalogue, of the time before the incident and of all that is known after it.
        first: sample of the judge that is the table's first.
        pause_s: for how long all may wait for a machine that saves.
    """
    name = table.machines[found.machines[0]]
    if not found.metric:
        return (
            _is_back(found, table, name, first)
            or _is_exporter_down(found, table, first)
            or _is_perhaps_exporter(found, table, changes, first)
        )
    if found.vanished:
        return None
    by_name = {one.metric: one for one in changes}
    shown = [by_name[one] for one in (found.metric, *found.agreeing) if one in by_name]
    look = f"look at what runs on {name}: cron jobs, uploads, an evaluation"
    # Without metrics of GPUs, a CPU that does less is the only sign of a process that is gone.
    is_seen = any(CATALOGUE[one.metric].is_of_gpus and math.isfinite(one.value) for one in changes)
    is_busier = bool(shown) and shown[0].value > shown[0].of_peers
    large = [one for one in changes if _is_large(one, found, table, first)]
    is_cpu_alone = not any(one in large for one in shown[1:]) and (is_seen or is_busier)
    if found.metric == "cpu_usage" and is_cpu_alone and not has_job_changed(found, table, first):
        return Light("CPU usage alone", "no other metric differs: use of the CPU alone is no fault", look)
    # Who is above the threshold now and then, by a metric in which it is as the others are, is not named by that one.
    is_faint = found.score < 1 and found.metric in by_name and by_name[found.metric] not in large
    if is_faint or not any(one in large for one in shown):
        return Light("small difference", "steady, but too small to call the machine faulty", look)
    if light := _phase(found, table, changes, first, pause_s):
        return light
    if all(is_sampling(one.metric, _least(one.metric), found, table, first) for one in shown if one in large):
        reason = "its samples are those of the others a moment earlier or later: it is asked at another part of a step"
        return Light("other moments of sampling", reason, f"collect averages of {found.metric}, not samples")
    if _is_over(found, table, first):
        return Light("difference that is over", f"it is over: {name} is again as the others are", look)
    return None


def _is_back(found: FaultyMachines, table: MetricTable, name: str, first: int) -> Light | None:
    """Whether all machines of the incident deliver again what vanished."""
    rows = [table.metrics.index(one) for one in found.vanished if one in table.metrics]
    known = ~np.isnan(table.values[np.ix_(rows, found.machines)])
    since, at = max(0, found.since - first), found.at - first
    if not known.size or not known[..., since:].any(axis=2).all():
        return None
    begin, end = _silence(known, since, at)
    text = f"delivered nothing of {len(rows)} metric{'' if len(rows) == 1 else 's'}"
    names = ", ".join(table.machines[one] for one in found.machines[:8])
    return Light(
        "gap in the samples",
        f"{'they are' if len(found.machines) > 1 else 'it is'} back: an exporter or a network that failed for a while, "
        "a restart, or a clock that was set",
        f"look at the exporter and the clock of {name}",
        f"{names} {text} from {clock(table, begin)} to {clock(table, end)}",
        begin,
    )


def _silence(known: NDArray[np.bool_], since: int, at: int) -> tuple[int, int]:
    """First sample of the gap, and the first one after it.

    Rates end a scrape before the counters that they are taken of, and begin a scrape later: the gap is where nothing
    is delivered of all that vanished.

    Args:
        known: [metrics, machines, samples], of what vanished.
        since: where the first of them ended.
        at: a sample at which they were lacking.
    """
    is_silent = np.concatenate([[False], ~known.any(axis=(0, 1)), [False]])
    turns = np.flatnonzero(is_silent[1:] != is_silent[:-1])
    for begin, end in zip(turns[::2], turns[1::2], strict=True):
        if begin >= since and end > at:
            return int(begin), int(end)
    each = [since + int(one[since:].argmax()) for one in known.reshape(-1, known.shape[2])]
    return since, max(each)  # one of them began before another had ended


def exporter_state(machine: int, since: int, at: int, table: MetricTable) -> str:
    """What the server knows of a machine's exporters while metrics lacked.

    Returns:
        ``one is down``: since then, others of the same machine can be scraped. ``all are down``, ``up``: as it says.
        Empty: not known.
    """
    if table.scraped is None:
        return ""
    before = table.scraped[machine, max(0, since - round(_LAST_S / table.period_s)) : max(0, since - 1)]
    during = table.scraped[machine, since + round(_SETTLED_S / table.period_s) : at + 1]
    before, during = before[~np.isnan(before)], during[~np.isnan(during)]
    if not during.size:
        return ""
    now = float(np.median(during))
    if now == 0:
        return "all are down"
    usual = float(np.median(before)) if before.size else 1.0
    return "one is down" if now < usual else "up"


def _is_exporter_down(found: FaultyMachines, table: MetricTable, first: int) -> Light | None:
    """Whether of all machines of the incident one exporter is down while others of the same machine deliver."""
    since, at = max(0, found.since - first), min(found.at - first, table.samples - 1)
    if any(exporter_state(one, since, at, table) != "one is down" for one in found.machines):
        return None
    names = ", ".join(table.machines[one] for one in found.machines[:8])
    return Light(
        "exporter that is down",
        "its scrape fails (up = 0) while other exporters of the same machine deliver: the exporter is away, and the "
        "machine is there",
        f"look at the exporters of {names}: `up == 0` on the server names them",
    )


def _is_perhaps_exporter(
    found: FaultyMachines, table: MetricTable, changes: tuple[MetricChange, ...], first: int
) -> Light | None:
    """Whether metrics vanished and nothing else did: the exporter, or what collects of it, may have died alone.

    A job waits for a machine that fails. Where the others go on, the machine works; and where its GPUs are seen to do
    as the others' do, the host that runs them is there, whatever it no longer says of itself.
    """
    since, at = max(0, found.since - first), min(found.at - first, table.samples - 1)
    states = {exporter_state(one, since, at, table) for one in found.machines}
    if "up" in states:
        return None  # what its exporters no longer have is gone on the machine
    remains = [one for one in changes if one.metric not in found.vanished and math.isfinite(one.change)]
    is_odd = bool(found.agreeing) or any(abs(one.change) >= _ODD for one in remains)
    goes_on = not is_odd and not has_job_changed(found, table, first)
    is_of_host = not any(CATALOGUE[one].is_of_gpus for one in found.vanished)
    has_gpus = any(CATALOGUE[one.metric].is_of_gpus for one in remains)
    names = ", ".join(table.machines[one] for one in found.machines[:8])
    cure = f"look at the exporters of {names}, and whether the collector reaches them"
    if is_of_host and has_gpus and goes_on:
        reason = "its GPUs and the job go on as before: the exporter of its host metrics may have died"
        return Light("exporter that may be down", reason, cure)
    if is_of_host and has_gpus and not is_odd:
        reason = "its GPUs do as the others' do: the exporter of its host metrics may have died"
        return Light("host metrics that vanished", reason, cure, advice="check")
    if goes_on:
        lost = "its GPUs are off the bus" if remains else "the machine is away"
        seen = "no other machine slows or waits" if shows_work(table) else "no metric shows whether the job goes on"
        reason = f"{seen}: {lost}, or only its exporter is down"
        return Light("metrics that vanished", reason, cure, advice="check")
    return None


def _is_large(change: MetricChange, found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether it differs from the others, or from what it was while it was like some of them.

    In a job of two generations of GPUs a faulty machine of one may look like the healthy ones of the other. A machine
    that was busy while habits were learnt, and now is as the others are, is healthy.
    """
    width = CATALOGUE[change.metric].upper - CATALOGUE[change.metric].lower
    if abs(change.value - change.of_peers) >= _least(change.metric) * width:
        return True
    return abs(change.change) >= _least(change.metric) and was_alike(change.metric, found, table, first)


def _least(metric: str) -> float:
    return LEAST_EFFECT.get(metric, _LEAST)


def _phase(
    found: FaultyMachines, table: MetricTable, changes: tuple[MetricChange, ...], first: int, pause_s: float
) -> Light | None:
    """Whether the others have nothing to do, or wait, while this machine does something alone."""
    name = table.machines[found.machines[0]]
    look = f"look at what runs on {name}: an evaluation, a save, an upload"
    main = next((one for one in changes if one.metric == found.metric), None)
    if main and _is_only_one_at_work(main, changes):
        reason = "the other machines are idle, and this one works: it may be the only one with something to do"
        return Light("busier than idle machines", reason, look)
    if len(found.machines) > 1:
        return None
    until = pause_end(found, pause_s, table.period_s)
    if works_alone(found, changes, table, first, pause_s):
        reason = (
            "the GPUs of the others only wait, and this machine computes: it may evaluate for all of them; "
            f"after {pause_s:.0f} s it is to blame"
        )
        return Light("works while others wait", reason, look, until=until)
    if may_write(found, changes, table, first, pause_s):
        reason = (
            f"all GPUs stopped work at one moment, and the host does more since: it may save while the others wait; "
            f"after {pause_s:.0f} s it is to blame"
        )
        return Light("may save while others wait", reason, look, until=until)
    return None


def _is_only_one_at_work(main: MetricChange, changes: tuple[MetricChange, ...]) -> bool:
    if main.metric not in _LOAD or not main.value > main.of_peers:
        return False
    by_name = {one.metric: one for one in changes}
    for metric in ("gpu_tensor_core_activity", "gpu_sm_activity", "gpu_duty_cycle"):
        if metric in by_name and math.isfinite(by_name[metric].of_peers):
            return by_name[metric].of_peers < _IDLE and by_name[metric].value >= by_name[metric].of_peers
    return False


def _is_over(found: FaultyMachines, table: MetricTable, first: int) -> bool:
    """Whether the machine came back to what the others do, and they did not come down to it."""
    last, part = round(_LAST_S / table.period_s), max(1, round(_PART_S / table.period_s))
    since, at = max(0, found.since - first), found.at - first
    if last < 1 or at + last + 2 * part >= table.samples:
        return False
    for metric in (found.metric, *found.agreeing):
        values = table.of(metric)
        width = CATALOGUE[metric].upper - CATALOGUE[metric].lower
        own, peers = _levels(values, found.machines[0], slice(since, at + 1))
        for start in range(table.samples - last, table.samples - part + 1, part):
            own_now, peers_now = _levels(values, found.machines[0], slice(start, start + part))
            if not all(map(math.isfinite, (own, peers, own_now, peers_now))):
                return False
            if abs(own_now - peers_now) > max(_LEFT * abs(own - peers), 0.5 * _least(metric) * width):
                return False
            if metric != "cpu_usage" and own < peers and peers_now < peers - 0.1 * abs(peers):
                return False  # the job ended for all
    return True


def _levels(values: NDArray[np.float32], machine: int, part: slice) -> tuple[float, float]:
    """Of a machine and of the others; medians hide pauses that all make."""
    own, others = values[machine, part], np.delete(values, machine, axis=0)[:, part]
    own, others = own[~np.isnan(own)], others[~np.isnan(others)]
    return (float(np.median(own)) if own.size else math.nan, float(np.median(others)) if others.size else math.nan)
