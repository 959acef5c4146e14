"""Repeat offenders: hosts that fail more often than chance would have it (Meta's lemon nodes, arXiv 2410.21680).

In a fleet of equal hosts some have three incidents in a month, by chance. So hosts are not ranked by counts: the rates
of all hosts together say how much hosts differ (a gamma distribution of ordinary hosts and a small share of offenders,
fitted to all counts), and a host's own count moves its rate away from the fleet's by as much as it can carry
(empirical Bayes). It is a repeat offender when its rate is, with a given probability, several times that of an
ordinary host. Old incidents count less; what is repeated within a day, and what many hosts have at once (a switch, a
room), counts for little. Meta's signals stand beside it as evidence.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
from pydantic import Field

from phalanx.core.config import Config
from phalanx.detect.detection import Advice, Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.incident_history import DAY_S, SIGNALS, HostIncident, is_of_program, is_repair, signal_of
from phalanx.detect.logs.log_rules import Matcher, load_rules

JUDGE = "offenders"

_GRID = np.geomspace(0.01, 60.0, 240)  # rates against an ordinary host's
_SHAPES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0, 100.0)
_FACTORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # an ordinary host's rate against the mean of all
_ROWS = 200


class OffenderPolicy(Config):
    """Numbers of the judge of repeat offenders."""

    times_fleet: float = Field(3.0, gt=1, description="how many times the fleet's rate an offender's is at least")
    sure: float = Field(0.9, gt=0.5, lt=1, description="probability of that from which on a host is to be excluded")
    likely: float = Field(0.5, gt=0, lt=1, description="the same, from which on a host is to be checked")
    offenders_share: float = Field(
        0.01, gt=0, lt=0.5, description="of hosts that are offenders, by experience (Meta: 1.2 %)"
    )
    least_incidents: int = Field(3, ge=2, description="incidents without which no host is one")
    half_life_days: float = Field(240.0, gt=0, description="after which an incident counts half")
    again_s: float = Field(DAY_S, ge=0, description="an incident of the same kind within this time is the same one")
    at_once_s: float = Field(
        3600.0, ge=0, description="the same kind on several hosts within this time has one common cause"
    )
    signal_days: float = Field(28.0, gt=0, description="of the newest history in which Meta's signals are counted")
    signal_quantile: float = Field(0.99, gt=0.5, lt=1, description="of the fleet's counts that a signal has to exceed")


@dataclass(frozen=True)
class FleetHistory:
    """Incidents, and what was watched: without that, rates mean nothing.

    Attributes:
        hosts: how many were watched, with those to which nothing happened; None: not known.
        until_unix_s: end of the time that was watched; None: of the last incident. `since_unix_s`: its begin, likewise.
        now_unix_s: incidents that are more than a day later are left out: their times are wrong; None: none are.
    """

    incidents: tuple[HostIncident, ...]
    hosts: int | None = None
    since_unix_s: float | None = None
    until_unix_s: float | None = None
    now_unix_s: float | None = None


@dataclass(frozen=True)
class HostRate:
    """A host's rate against its fleet's.

    Attributes:
        count: its incidents; repetitions left out.
        weight: of them, old and common ones for less.
        per_day: the mean of what its rate may be; `low_per_day`, `high_per_day`: nine in ten times it lies between.
        times_fleet: that against the fleet's rate.
        sure: probability that its rate is more than `OffenderPolicy.times_fleet` times the fleet's.
        signals: Meta's, in the newest days; `beyond`: those that exceed nearly all of the fleet.
    """

    host: str
    count: int
    weight: float
    per_day: float
    low_per_day: float
    high_per_day: float
    times_fleet: float
    sure: float
    kinds: Mapping[str, int]
    jobs: int
    last_unix_s: float
    signals: Mapping[str, float] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()


def judge_offenders(history: FleetHistory, policy: OffenderPolicy | None = None) -> JudgeVerdict:
    """Hosts to leave out of later jobs, the surest first."""
    policy = policy or OffenderPolicy()
    history, left_out = _of_hosts(history)
    rates = rate_hosts(history, policy)
    if not rates:
        reason = "no incident is a fault of a host; give a history of hosts' faults"
        return JudgeVerdict(JUDGE, abstains=(*left_out, reason))
    abstains = []
    if history.hosts is None:
        abstains.append(
            "it is not known how many hosts had no incident, so the fleet seems worse than it is; give --hosts"
        )
    begin_s, end_s = _span(history)
    days = (end_s - begin_s) / DAY_S
    fleet = max(history.hosts or 0, len(rates))
    if days < 7 or fleet < 8:
        abstains.append(f"{days:.0f} days of {fleet} hosts do not tell a bad host from bad luck; give a longer history")
        return JudgeVerdict(JUDGE, abstains=tuple(abstains), tables={"hosts": [_row(rate) for rate in rates[:_ROWS]]})
    found = [_detection(rate, days, policy) for rate in rates if _is_offender(rate, policy)]
    found += [_detection(rate, days, policy) for rate in rates if _is_suspect(rate, policy)]
    looked = f"{sum(rate.count for rate in rates):,} incidents on {len(rates)} of {fleet:,} hosts in {days:.0f} days"
    if found:
        abstains += left_out
    else:
        looked = "; ".join([looked, *left_out])
    return JudgeVerdict(JUDGE, tuple(found), tuple(abstains), looked, {"hosts": [_row(rate) for rate in rates[:_ROWS]]})


def _of_hosts(history: FleetHistory) -> tuple[FleetHistory, list[str]]:
    """Without incidents that say nothing about a host, and how many there were; the time watched stays."""
    latest_s = math.inf if history.now_unix_s is None else history.now_unix_s + DAY_S
    known = [one for one in history.incidents if one.unix_s <= latest_s]
    words = []
    if later := [one for one in history.incidents if one.unix_s > latest_s]:
        at = datetime.fromtimestamp(min(later[0].unix_s, 2e11), UTC)
        rows = "1 incident has a time" if len(later) == 1 else f"{len(later):,} incidents have times"
        words.append(f"{rows} after now (host {later[0].host}, {at:%Y-%m-%d}): left out")
    matcher = Matcher(load_rules(of_failed_jobs=True))
    of_program = {one.kind for one in {one.kind: one for one in known}.values() if is_of_program(one, matcher)}
    kept = tuple(one for one in known if one.kind not in of_program)
    if count := len(known) - len(kept):
        what = "1 incident is an error" if count == 1 else f"{count:,} incidents are errors"
        words.append(f"{what} of programs ({', '.join(sorted(of_program)[:3])}), no fault of a host: left out")
    begin_s, end_s = _span(replace(history, incidents=tuple(known)))
    return replace(history, incidents=kept, since_unix_s=begin_s, until_unix_s=end_s), words


def rate_hosts(history: FleetHistory, policy: OffenderPolicy) -> list[HostRate]:
    """Every host that had an incident, the surest offender first."""
    incidents = _distinct(history.incidents, policy)
    if not incidents:
        return []
    begin_s, end_s = _span(history)
    by_host: dict[str, list[tuple[HostIncident, float]]] = defaultdict(list)
    for incident, share in incidents:
        age_days = max(end_s - incident.unix_s, 0.0) / DAY_S
        by_host[incident.host].append((incident, share * 0.5 ** (age_days / policy.half_life_days)))
    hosts = max(history.hosts or 0, len(by_host))
    exposure_days = _exposure(max((end_s - begin_s) / DAY_S, 1.0), policy.half_life_days)
    weights = {host: sum(weight for _, weight in own) for host, own in by_host.items()}
    fleet = fit_fleet(list(weights.values()) + [0.0] * (hosts - len(weights)), exposure_days, policy)
    signals = _signals(history.incidents, end_s, policy)
    limits = _limits(signals, hosts, policy)
    rates = []
    for host, own in by_host.items():
        posterior = fleet.share * _likelihood(np.array([weights[host]]), fleet.grid * exposure_days)[0]
        posterior /= posterior.sum()
        per_day = float(posterior @ fleet.grid)
        low, high = (float(fleet.grid[np.searchsorted(np.cumsum(posterior), share)]) for share in (0.05, 0.95))
        beyond = tuple(name for name, value in signals.get(host, {}).items() if value > limits[name])
        rates.append(
            HostRate(
                host,
                len(own),
                weights[host],
                per_day,
                low,
                high,
                per_day / fleet.per_day,
                float(posterior[fleet.grid >= policy.times_fleet * fleet.per_day].sum()),
                Counter(incident.kind or "unknown" for incident, _ in own),
                len({incident.job for incident, _ in own if incident.job}),
                max(incident.unix_s for incident, _ in own),
                signals.get(host, {}),
                beyond,
            )
        )
    return sorted(rates, key=lambda rate: (-rate.sure, -rate.times_fleet, rate.host))


@dataclass(frozen=True)
class FleetRates:
    """What rates hosts of a fleet have, before a host's own incidents are looked at.

    Attributes:
        per_day: of an ordinary host.
        shape: of the gamma distribution of ordinary hosts: the higher, the more alike they are.
        grid: rates per day that are considered.
        share: how likely each is for a host picked at random.
    """

    per_day: float
    shape: float
    grid: np.ndarray
    share: np.ndarray


def fit_fleet(counts: Sequence[float], exposure_days: float, policy: OffenderPolicy) -> FleetRates:
    """Ordinary hosts are gamma distributed, and some are offenders, of any rate from the policy's to ten times that.

    Shape and rate of the ordinary ones are those that make all counts likeliest, so that offenders do not make the
    fleet look worse. Counts of old incidents are not whole; the Poisson likelihood is continued to them.
    """
    tally = Counter(round(count, 2) for count in counts)
    values = np.array(list(tally), float)
    numbers = np.array(list(tally.values()), float)
    mean = max(sum(counts) / len(counts), 1e-9)
    offending = ((policy.times_fleet <= _GRID) & (10 * policy.times_fleet >= _GRID)).astype(float)
    offending /= offending.sum()
    best: tuple[float, float, float, np.ndarray] | None = None
    for factor in _FACTORS:
        likely = _likelihood(values, _GRID * mean * factor)
        for shape in _SHAPES:
            ordinary = np.exp(shape * (np.log(_GRID) - _GRID) - shape * (np.log(_GRID) - _GRID).max())
            share = (1 - policy.offenders_share) * ordinary / ordinary.sum() + policy.offenders_share * offending
            total = float(numbers @ np.log(likely @ share))
            if best is None or total > best[0]:
                best = (total, factor, shape, share)
    assert best is not None
    per_day = mean * best[1] / exposure_days
    return FleetRates(per_day, best[2], _GRID * per_day, best[3])


def _likelihood(counts: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each count (rows) for each expected one (columns), up to a factor of the row."""
    log = counts[:, None] * np.log(expected)[None, :] - expected[None, :]
    return np.asarray(np.exp(log - np.array([math.lgamma(count + 1) for count in counts])[:, None]) + 1e-300)


def _distinct(incidents: Iterable[HostIncident], policy: OffenderPolicy) -> list[tuple[HostIncident, float]]:
    """Since a host's last repair, without repetitions; each with its share of what several hosts had at once."""
    kept: list[HostIncident] = []
    last: dict[tuple[str, str], float] = {}
    ordered = sorted(incidents, key=lambda one: one.unix_s)
    repaired = {one.host: one.unix_s for one in ordered if is_repair(one)}
    for incident in ordered:
        if incident.unix_s <= repaired.get(incident.host, -math.inf):
            continue
        key = (incident.host, incident.kind)
        if incident.unix_s - last.get(key, -math.inf) >= policy.again_s:
            kept.append(incident)
        last[key] = incident.unix_s
    by_kind: dict[str, list[HostIncident]] = defaultdict(list)
    for incident in kept:
        by_kind[incident.kind].append(incident)
    shared = []
    for own in by_kind.values():
        group: list[HostIncident] = []
        for incident in own:
            if group and incident.unix_s - group[0].unix_s > policy.at_once_s:
                shared += _with_share(group)
                group = []
            group.append(incident)
        shared += _with_share(group)
    return shared


def _with_share(group: Sequence[HostIncident]) -> list[tuple[HostIncident, float]]:
    hosts = len({incident.host for incident in group})
    return [(incident, 1.0 / hosts if hosts > 2 else 1.0) for incident in group]


def _span(history: FleetHistory) -> tuple[float, float]:
    times = [incident.unix_s for incident in history.incidents] or [0.0]
    begin_s = min(times) if history.since_unix_s is None else history.since_unix_s
    return begin_s, max(times) if history.until_unix_s is None else history.until_unix_s


def _exposure(days: float, half_life_days: float) -> float:
    """Days, old ones for less, as incidents are."""
    decay = math.log(2) / half_life_days
    return (1 - math.exp(-decay * days)) / decay


def _signals(incidents: Iterable[HostIncident], end_s: float, policy: OffenderPolicy) -> dict[str, dict[str, float]]:
    """Meta's, of the newest days."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    single: dict[str, set[str]] = defaultdict(set)
    seen: set[tuple[str, str, str]] = set()
    for incident in incidents:
        name = signal_of(incident)
        if not name or incident.unix_s < end_s - policy.signal_days * DAY_S:
            continue
        if name == "excl_jobid_count":  # distinct jobs
            key = (incident.host, name, incident.job or str(incident.unix_s))
            if key in seen:
                continue
            seen.add(key)
        found[incident.host][name] += 1
        if name == "single_node_node_fails":
            single[incident.host].add(incident.job or str(incident.unix_s))
    result = {host: {name: float(own[name]) for name in SIGNALS if own[name]} for host, own in found.items()}
    for host, jobs in single.items():
        result[host]["single_node_node_failure_rate"] = len(jobs) / policy.signal_days
    return result


def _limits(signals: Mapping[str, Mapping[str, float]], hosts: int, policy: OffenderPolicy) -> dict[str, float]:
    """The fleet's quantile of each signal, at least one incident; hosts without it count as none."""
    limits = {}
    for name in {name for own in signals.values() for name in own}:
        values = sorted((own.get(name, 0.0) for own in signals.values()), reverse=True)
        place = int((1 - policy.signal_quantile) * hosts)
        floor = 1.0 / policy.signal_days if name.endswith("rate") else 1.0
        limits[name] = max(values[place] if place < len(values) else 0.0, floor)
    return limits


def _strong(rate: HostRate) -> tuple[str, ...]:
    """Signals that say something: exclusion by users alone was found not to (arXiv 2410.21680)."""
    return tuple(name for name in rate.beyond if name not in ("excl_jobid_count", "single_node_node_failure_rate"))


def _is_offender(rate: HostRate, policy: OffenderPolicy) -> bool:
    return rate.sure >= policy.sure and rate.count >= policy.least_incidents


def _is_suspect(rate: HostRate, policy: OffenderPolicy) -> bool:
    """Not sure enough to leave it out, and worth a check."""
    likely = rate.sure >= policy.likely and rate.count >= policy.least_incidents
    return not _is_offender(rate, policy) and (likely or len(_strong(rate)) > 1)


def _detection(rate: HostRate, days: float, policy: OffenderPolicy) -> Detection:
    sure = _is_offender(rate, policy)
    kinds = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in Counter(rate.kinds).most_common(4))
    why = [
        f"its rate is {rate.times_fleet:.1f} times an ordinary host's "
        f"({rate.low_per_day * 30:.2f} to {rate.high_per_day * 30:.2f} incidents a month, nine in ten)",
        f"more than {policy.times_fleet:g} times that with probability {rate.sure:.0%}",
        f"kinds: {kinds}",
    ]
    if rate.beyond:
        why.append(
            "beyond nearly all of the fleet: " + ", ".join(f"{name} {rate.signals[name]:g}" for name in rate.beyond)
        )
    advice: Advice = "exclude" if sure else "check"
    then = [f"leave {rate.host} out of later jobs until it is repaired"] if sure else []
    then.append(f"check {rate.host}: `phalanx check`")
    return Detection(
        "repeat offender" if sure else "suspected offender",
        f"host {rate.host} has had {rate.count} incidents in {days:.0f} days, "
        f"{rate.times_fleet:.1f} times an ordinary host's rate",
        (Culprit("host", rate.host, (), (rate.host,)),),
        Onset(rate.last_unix_s),
        round(min(rate.sure, 0.99) if sure else min(max(rate.sure, 0.3), 0.8), 2),
        tuple(why),
        tuple(then),
        advice,
        {"incidents": rate.count, "per_day": rate.per_day, "times_fleet": rate.times_fleet, "sure": rate.sure},
    )


def _row(rate: HostRate) -> dict[str, object]:
    return {
        "host": rate.host, "incidents": rate.count, "weight": round(rate.weight, 3), "per_day": rate.per_day,
        "low_per_day": rate.low_per_day, "high_per_day": rate.high_per_day, "times_fleet": rate.times_fleet,
        "sure": rate.sure, "kinds": dict(rate.kinds), "jobs": rate.jobs, "last_unix_s": rate.last_unix_s,
        "signals": dict(rate.signals),
    }  # fmt: skip
