"""Effective training time by formulas, without simulating a run, for failures without memory. Needs no NumPy.

*Young* (1974) and *Daly* (2006) for the interval between checkpoints are those of `phalanx.checkpoint.interval`.

*Meta* (Revisiting Reliability, arXiv 2410.21680): with N hosts, r failures per host and time, u restarts, q queueing, Δ
between checkpoints and R of training

    E[ETTR] = (1 - N r (u + Δ/2)) / (1 + (u + q)/R + N r q)

which reproduces the published points at 16,384 GPUs (an hour: 0.7, five minutes: 0.93) and 100,000 (RSC-1's rate, seven
minutes: 0.5), but not the one with RSC-2's rate (21 minutes: 0.5; with u of 5 minutes and no queue it gives 0.69). It
is linear in the rate: where failures come nearly as often as restarts take, it is too low (see `ClosedForm.ettr`).

*Ours* is Daly's exact expectation, with memory as well. Ranks run for M on average until something stops them. Of
training τ between stalls δ, with snapshots in memory that leave the share v of the time, the period is P = τ/v + δ. A
failure that goes back to durable storage (the share 1 - s of them, so once in M' = M/(1 - s)) leaves τ
exp(-w/M')/(exp(P/M') - 1) of M' τ/P, where w is the time of persisting; one that memory survives loses half of a
snapshot's interval m or less: v M - m/(exp(m/(v M)) - 1). Restarts that take R begin again when a failure hits them:
M (exp(R/M) - 1). Stops that can wait for a checkpoint, and slow hosts, take their shares of the time. Hosts are away
with the probability a/(1 + a), a being failures times repair: how many, is binomial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.checkpoint.interval import daly, young
from phalanx.simulate.failure_model import DAY_S, FailureClass, FailureScenario, require

_MOST_EXP = 700.0


def mttf_s(hosts: int, per_host_day: float) -> float:
    """Mean time to failure of a job on so many hosts."""
    return math.inf if hosts * per_host_day == 0 else DAY_S / (hosts * per_host_day)


def meta_ettr(
    hosts: int,
    per_host_day: float,
    interval_s: float,
    restart_s: float,
    queue_s: float = 0.0,
    run_s: float = math.inf,
    write_s: float = 0.0,
) -> float:
    """Meta's expected ETTR; 0 where its formula would be below.

    Args:
        run_s: of training; the first start is spread over it.
        write_s: that a checkpoint holds training up. Not in the formula as published; its share is taken off.
    """
    per_s = hosts * per_host_day / DAY_S
    useful = 1 - per_s * (restart_s + interval_s / 2) - write_s / interval_s
    return max(useful, 0.0) / (1 + (restart_s + queue_s) / run_s + per_s * queue_s)


def binomial(count: int, ratio: float) -> Iterator[float]:
    """How likely 0, 1 … of `count` are, each with the probability `ratio`, as long as it is worth mentioning."""
    if ratio <= 0 or ratio >= 1:
        yield from (float(k == (0 if ratio <= 0 else count)) for k in range(count + 1))
        return
    logs = math.log(ratio), math.log1p(-ratio)
    all_ways = math.lgamma(count + 1)
    for k in range(count + 1):
        ways = all_ways - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        chance = math.exp(ways + k * logs[0] + (count - k) * logs[1])
        yield chance
        if k > ratio * count and chance < 1e-15:
            return


def standby(hosts: int, ratio: float, level: float = 0.99) -> int:
    """Hosts to keep ready: in a share `level` of the cases no more of `hosts` are needed at once.

    ByteRobust (2509.16293) keeps the 99th percentile of a binomial, 4 for 1,024.

    Args:
        ratio: the probability that a host needs a replacement before the standby is filled up again.
    """
    require("ratio", ratio, 0, 1)
    require("level", level, 0, 1 - 1e-12)
    total = 0.0
    for needed, chance in enumerate(binomial(hosts, ratio)):
        total += chance
        if total >= level:
            return needed
    return hosts


@dataclass(frozen=True)
class ClosedForm:
    """What formulas say of a scenario."""

    ettr: float  # effective training time ratio, by ours
    meta_ettr: float  # by Meta's
    mtbf_s: float  # of the job, for failures that stop it
    # Best interval between checkpoints by each, for failures that go back to durable ones.
    young_s: float
    daly_s: float
    running: float  # the same as `ettr`, while there are enough hosts
    enough_hosts: float  # the share of the time in which there are
    capacity: float  # hosts of the job that take part, over all of them, on average, ratio
    away_hosts: float


def closed_form(scenario: FailureScenario) -> ClosedForm:
    """What formulas say of `scenario`."""
    recovery, checkpoints = scenario.recovery, scenario.checkpoints
    stops = scenario.failures.per_host_day("stops")
    mtbf_s = mttf_s(scenario.work.hosts, stops)
    durable_s = durable_mtbf_s(scenario)
    away = away_ratio(scenario)
    capacity, enough = capacity_of(scenario)
    running = _running(scenario, mtbf_s, durable_s)
    restart_s = _mean_restart_s(scenario)
    return ClosedForm(
        ettr=running * capacity,
        meta_ettr=meta_ettr(
            scenario.work.hosts,
            stops,
            checkpoints.interval_s,
            restart_s - recovery.queue_s,
            recovery.queue_s,
            write_s=checkpoints.stall_s,
        ),
        mtbf_s=mtbf_s,
        young_s=young(checkpoints.stall_s, durable_s),
        daly_s=math.inf if math.isinf(durable_s) else daly(checkpoints.stall_s, durable_s),
        running=running,
        enough_hosts=enough,
        capacity=capacity,
        away_hosts=away * scenario.all_hosts,
    )


def _stopping(scenario: FailureScenario) -> Sequence[FailureClass]:
    return [c for c in scenario.failures.classes if c.effect == "stops" and c.per_host_day > 0]


def durable_mtbf_s(scenario: FailureScenario) -> float:
    """Mean time between failures that go back to durable storage."""
    in_memory = scenario.checkpoints.memory_interval_s > 0
    rate = math.fsum(c.per_host_day for c in _stopping(scenario) if not (in_memory and c.survives))
    return mttf_s(scenario.work.hosts, rate)


def _mean_restart_s(scenario: FailureScenario) -> float:
    recovery, stopping = scenario.recovery, _stopping(scenario)
    rate = math.fsum(c.per_host_day for c in stopping)
    takes_s = 0.0
    for failure in stopping:
        noticed_s = recovery.detection_s if failure.detection_s is None else failure.detection_s
        from_memory = failure.survives and scenario.checkpoints.memory_interval_s > 0
        load_s = recovery.memory_load_s if from_memory else recovery.load_s
        takes_s += failure.per_host_day / rate * (noticed_s + recovery.queue_s + recovery.restart_s + load_s)
    return takes_s


def _running(scenario: FailureScenario, mtbf_s: float, durable_s: float) -> float:
    """Training that counts over all time, while there are enough hosts."""
    checkpoints = scenario.checkpoints
    period_s = checkpoints.interval_s / checkpoints.memory_ratio + checkpoints.stall_s
    pace = checkpoints.interval_s / period_s
    # There may be more than one slow host at a time, and the slowest counts.
    healthy = 1.0
    for failure in scenario.failures.classes:
        if failure.effect == "slow":
            found_s = scenario.recovery.find_slow_s if failure.detection_s is None else failure.detection_s
            at_once = scenario.work.hosts * failure.per_host_day * found_s / DAY_S
            healthy *= 1 - (1 - 1 / failure.slowdown) * -math.expm1(-at_once)
    gently = pace * healthy / (1 + _gentle_share(scenario))
    if math.isinf(mtbf_s):
        return gently
    restart = _mean_restart_s(scenario) / mtbf_s
    if restart > _MOST_EXP:
        return 0.0
    lost_s = _lost_durable_s(scenario, durable_s, period_s) * mtbf_s / durable_s
    if checkpoints.memory_interval_s:  # and by a failure that snapshots in memory outlive
        going_s = checkpoints.memory_ratio * mtbf_s
        steps = checkpoints.memory_interval_s / going_s
        kept_s = 0.0 if steps > _MOST_EXP else checkpoints.memory_interval_s / math.expm1(steps)
        lost_s += (going_s - kept_s) * (1 - mtbf_s / durable_s)
    return max(gently * (1 - lost_s / (pace * mtbf_s)), 0.0) / math.exp(restart)


def _lost_durable_s(scenario: FailureScenario, mtbf_s: float, period_s: float) -> float:
    """Training lost by a failure that goes back to durable storage."""
    if math.isinf(mtbf_s):
        return 0.0
    checkpoints = scenario.checkpoints
    if period_s / mtbf_s > _MOST_EXP:
        return mtbf_s * checkpoints.interval_s / period_s
    kept_s = checkpoints.interval_s * math.exp(-checkpoints.persist_s / mtbf_s) / math.expm1(period_s / mtbf_s)
    return mtbf_s * checkpoints.interval_s / period_s - kept_s


def _gentle_share(scenario: FailureScenario) -> float:
    """Time of stops that can wait for a checkpoint, over the time between them."""
    recovery, checkpoints = scenario.recovery, scenario.checkpoints
    each_s = recovery.queue_s + recovery.restart_s
    each_s += recovery.memory_load_s if checkpoints.memory_interval_s else recovery.load_s
    lost_s = (checkpoints.memory_interval_s or checkpoints.interval_s) / 2
    each_s += checkpoints.stall_s if recovery.saves_first else lost_s
    replaced = scenario.failures.per_host_day("slow") + scenario.failures.per_host_day("taken out")
    per_day = scenario.work.hosts * replaced + recovery.planned_per_day
    return (per_day * each_s + recovery.planned_per_day * recovery.planned_s) / DAY_S


def away_ratio(scenario: FailureScenario) -> float:
    """How likely it is that a host is away."""
    each = [
        c.per_host_day * (c.repair.mean_s + scenario.pool.provision_s) / DAY_S
        for c in scenario.failures.classes
        if c.repair.mean_s > 0
    ]
    away = math.fsum(each)
    return away / (1 + away)


def capacity_of(scenario: FailureScenario) -> tuple[float, float]:
    """Hosts that take part over those of the job, and the share of the time in which the job can run at all."""
    hosts, pool = scenario.work.hosts, scenario.pool
    capacity = enough = 0.0
    for away, chance in enumerate(binomial(scenario.all_hosts, away_ratio(scenario))):
        missing = max(hosts - (scenario.all_hosts - away), 0)
        size = 0 if missing else hosts
        if pool.when_missing == "shrink":
            size = hosts - -(-missing // pool.shrink_by) * pool.shrink_by
            size = size if size >= scenario.smallest_hosts else 0
        capacity += chance * size / hosts
        enough += chance * (size > 0)
    return min(capacity, 1.0), min(enough, 1.0)
