"""What the network does to a step: oversubscription, hashing, placement, congestion and flaps, one on top of the other.

Each circumstance comes on top of those before it, so that the seconds lost to each add up. How often hashes collide is
also given in closed form: flows that choose among links at random are balls into bins.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.plan.report.report_model import finite
from phalanx.simulate.congestion import NO_EFFECT, HotLink, HotLinkTable, QueueEffect
from phalanx.simulate.link_loads import LinkLoad, flow_shares, measure, shape_of
from phalanx.simulate.network_scenario import NetworkScenario
from phalanx.simulate.network_settings import Control, NetworkDescription, shortest_timeout
from phalanx.simulate.traffic import Phase, Traffic

Stage = Literal["ideal", "oversubscription", "hashing", "placement"]
_STAGES: tuple[Stage, ...] = ("ideal", "oversubscription", "hashing", "placement")
_HOT = 1 + 1e-6
_MOST_DRAWS = 1000


@dataclass(frozen=True)
class _Job:
    network: NetworkDescription
    traffic: Traffic
    scenario: NetworkScenario

    def load(self, phase: Phase, stage: Stage, draw: int) -> LinkLoad:
        shape = shape_of(phase, self.traffic, self.network.devices, self.network.devices_per_host)
        scenario = self.scenario
        fabric = scenario.fabric
        if stage == "ideal":
            fabric = fabric.changed(tor_oversubscription=1.0, aggregation_oversubscription=1.0)
        hashing = scenario.hashing if stage in ("hashing", "placement") else "ideal"
        placement = scenario.placement if stage == "placement" else "packed"
        # What no draw decides is computed once.
        seed = draw if hashing != "ideal" or placement == "scattered" else 0
        pairs = scenario.queue_pairs if hashing != "ideal" else 1
        return measure(shape, fabric, hashing, placement, pairs, seed)

    def time_s(self, phase: Phase, load: LinkLoad) -> float:
        """Of a phase without queues: bytes over the fullest link, and latencies of sends that wait for one another."""
        if not load.seconds:
            return 0.0
        return phase.rank_bytes * load.seconds + phase.times * phase.hops * self.network.latency_s

    def hot_link(self, load: LinkLoad) -> HotLink | None:
        """What congestion control has to deal with; None where no link is asked for more than it carries."""
        if load.overload <= _HOT:
            return None
        return HotLink.of(self.scenario.congestion, load.paths, load.overload, load.capacity, load.hot_links)


def what_if(
    network: NetworkDescription,
    traffic: Traffic,
    scenarios: Sequence[NetworkScenario],
    draws: int = 8,
    *,
    curves: bool = False,
) -> NetworkReport:
    """The step of every scenario.

    Args:
        draws: of hashes and, where hosts are scattered, of places; each is a job of its own.
        curves: also follow the queue at the hottest link under each kind of congestion control.
    """
    if not 1 <= draws <= _MOST_DRAWS:
        raise UserError("is no number of draws", cure=f"write 1 to {_MOST_DRAWS}", field="draws", value=draws)
    start = time.perf_counter()
    traffic.check(network.devices)
    for scenario in scenarios:
        if scenario.fabric.hosts < network.fabric.hosts:
            cure = f"write {network.fabric.hosts:,} or more, or take fewer devices"
            raise UserError("the job has more hosts", cure=cure, field="hosts", value=scenario.fabric.hosts)
    jobs = [_Job(network, traffic, scenario) for scenario in scenarios]
    # All hot links of all scenarios are collected first, since many are the same: each is then simulated once, and all
    # side by side as arrays.
    found = (
        job.hot_link(job.load(phase, "placement", draw))
        for job in jobs
        for phase in traffic.phases
        for draw in range(draws)
    )
    links = list(dict.fromkeys(link for link in found if link is not None))
    shown: list[HotLink] = []
    if curves and links:  # the link with the most connections, under each kind of congestion control
        fullest = max(links, key=lambda link: link.paths * link.line_rate / link.capacity)
        shown = [replace(fullest, control=control) for control in get_args(Control)]
    table = HotLinkTable(list(dict.fromkeys([*links, *shown])), network.settings, network.fabric.nic_bytes_per_s)
    outcomes = tuple(_outcome(job, table, draws) for job in jobs)
    return NetworkReport(
        cluster=network.name,
        devices=network.devices,
        devices_per_host=network.devices_per_host,
        traffic_source=traffic.source,
        ideal_step_s=traffic.step_s,
        outcomes=outcomes,
        conflicts=_conflicts(jobs[0]),
        queues=tuple(_queue_curve(table, link) for link in shown),
        draws=draws,
        wall_s=time.perf_counter() - start,
        notes=_notes(network, traffic),
    )


def _queue_curve(table: HotLinkTable, link: HotLink) -> QueueCurve:
    trace = table.trace(link)
    queue_s = trace.queue_bytes[0] / link.capacity
    times_s = trace.sample_s * np.arange(1, len(queue_s) + 1)
    return QueueCurve(link.control, link.paths, tuple(times_s.tolist()), tuple(queue_s.tolist()))


@dataclass(frozen=True)
class _Drawn:
    times_s: Mapping[str, float]
    load: LinkLoad
    effect: QueueEffect


def _outcome(job: _Job, table: HotLinkTable, draws: int) -> ScenarioOutcome:
    drawn = [_draw(job, table, draw) for draw in range(draws)]

    def exposed_s(one_draw: Sequence[_Drawn], stage: str) -> float:
        pairs = zip(job.traffic.phases, one_draw, strict=True)
        return float(sum(phase.exposed_s(one.times_s["ideal"], one.times_s[stage]) for phase, one in pairs))

    waits = np.array([[exposed_s(one_draw, stage) for stage in (*_STAGES, "congestion")] for one_draw in drawn])
    stall_s = job.scenario.stall_s
    ends = not np.isfinite(stall_s)
    lost = np.diff(waits, axis=1).mean(axis=0)
    lost_s = {cause: float(seconds) for cause, seconds in zip(CAUSES, [*lost, 0.0 if ends else stall_s], strict=True)}
    steps = job.traffic.step_s + waits[:, -1] - waits[:, 0] + lost_s["flap"]
    low, high = np.percentile(steps, [5, 95])
    phases = tuple(
        _phase(job, phase, [each[place] for each in drawn]) for place, phase in enumerate(job.traffic.phases)
    )
    return ScenarioOutcome(job.scenario, float(steps.mean()), float(low), float(high), lost_s, phases, ends)


def _draw(job: _Job, table: HotLinkTable, draw: int) -> list[_Drawn]:
    """All phases of one draw; each is also held up at ports that the hot links of others have stopped."""
    phases, alone, held_up, drawn = job.traffic.phases, [], [], []
    for phase in phases:
        loads: dict[str, LinkLoad] = {stage: job.load(phase, stage, draw) for stage in _STAGES}
        times_s = {stage: job.time_s(phase, load) for stage, load in loads.items()}
        load, effect = loads["placement"], NO_EFFECT
        if (link := job.hot_link(load)) is not None:
            effect = table.effect(link, phase.rank_bytes * load.seconds / phase.times)
        alone.append(_Drawn(times_s, load, effect))
        # While a phase runs, others get the bystanders' rate.
        running = min(1.0, times_s["placement"] / job.traffic.step_s)
        held_up.append(running * (1 / max(effect.bystander, 1e-6) - 1))
    for place, (phase, one) in enumerate(zip(phases, alone, strict=True)):
        alone_s = one.times_s["placement"] * one.effect.stretch + phase.times * one.effect.queue_s
        by_others = sum(held_up) - held_up[place]
        drawn.append(replace(one, times_s={**one.times_s, "congestion": alone_s * (1 + by_others)}))
    return drawn


def _phase(job: _Job, phase: Phase, drawn: Sequence[_Drawn]) -> PhaseOutcome:
    """Means over all draws; the link is that of the draw with the worst one."""

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    worst = max(drawn, key=lambda one: one.load.overload).load
    ideal_s, now_s = drawn[0].times_s["ideal"], mean([one.times_s["congestion"] for one in drawn])
    bursts_s = [max(one.times_s["placement"] / phase.times, 1e-12) for one in drawn]
    return PhaseOutcome(
        name=phase.name,
        ideal_s=ideal_s,
        now_s=now_s,
        ideal_exposed_s=phase.exposed_s(ideal_s, ideal_s),
        exposed_s=mean([phase.exposed_s(ideal_s, one.times_s["congestion"]) for one in drawn]),
        hottest=worst.kind,
        overload=mean([one.load.overload for one in drawn]),
        paths=mean([one.load.paths for one in drawn]),
        efficiency=mean([one.effect.efficiency for one in drawn]),
        queue_s=mean([one.effect.queue_s for one in drawn]),
        paused_ratio=mean([one.effect.paused_s / burst for one, burst in zip(drawn, bursts_s, strict=True)]),
        bystander=mean([one.effect.bystander for one in drawn]),
    )


def _conflicts(job: _Job) -> Conflicts | None:
    """Collisions of the first scenario: closed forms for a full ToR, fair rates of the phase that they hit most."""
    scenario, fabric = job.scenario, job.scenario.fabric

    def stretch(phase: Phase) -> float:
        ideal = job.load(phase, "ideal", 0).seconds
        return job.load(phase, "placement", 0).seconds / ideal if ideal else 0.0

    phase = max(job.traffic.phases, key=stretch)
    if scenario.hashing not in ("ecmp", "polarised") or not stretch(phase):
        return None
    flows = fabric.nics_per_tor * scenario.queue_pairs
    speedup = fabric.uplink_bytes_per_s / fabric.nic_bytes_per_s * scenario.queue_pairs
    shape = shape_of(phase, job.traffic, job.network.devices, job.network.devices_per_host)
    return Conflicts(
        phase=phase.name,
        flows=flows,
        links=fabric.tor_uplinks,
        speedup=speedup,
        expected_share=expected_share(flows, fabric.tor_uplinks, speedup),
        free_probability=free_probability(flows, fabric.tor_uplinks, speedup),
        expected_fullest=expected_fullest(flows, fabric.tor_uplinks),
        shares=flow_shares(shape, fabric, scenario.hashing, scenario.placement, scenario.queue_pairs),
    )


def _notes(network: NetworkDescription, traffic: Traffic) -> tuple[str, ...]:
    notes = []
    if not network.described:
        notes.append(f"nothing is known of {network.name}'s fabric: a usual CLOS of three layers is assumed (--fabric)")
    assumed = [key for key, number in network.numbers.items() if number.mark == "assumed"]
    if assumed:
        notes.append(f"{len(assumed)} of {len(network.numbers)} numbers of the network are assumed (--sources)")
    if not any(phase.ranks * phase.stride > network.devices_per_host for phase in traffic.phases):
        notes.append("all groups stay inside hosts: nothing crosses the network")
    return tuple(notes)


def expected_share(flows: int, links: int, speedup: float = 1.0) -> float:
    """The mean share of its own rate that a flow gets from the link that its hash gives.

    With k of the n - 1 other flows on the same link it is ``min(1, s/(k + 1))``, where k is binomial(n - 1, 1/m).

    Args:
        flows: that choose, each for itself, n.
        links: that they choose from, m.
        speedup: how many flows at full rate a link carries, s (2: a 400G uplink above 200G NICs).
    """
    others = _binomial(flows - 1, 1 / links)
    shares = np.minimum(1.0, speedup / np.arange(1, flows + 1))
    return float(np.dot(others, shares))


def free_probability(flows: int, links: int, speedup: float = 1.0) -> float:
    """The probability that a flow's link is not asked for more than it carries."""
    room = math.floor(speedup + 1e-9)
    return float(_binomial(flows - 1, 1 / links)[:room].sum())


def fullest_probability(flows: int, links: int, most: int) -> float:
    """The probability that no link has more than `most` flows, exactly.

    Counts of balls in bins are those of independent Poisson numbers whose sum is known to be n. So it is
    ``P(X <= k)^m · P(sum of m numbers <= k is n) / P(Poisson(n) = n)``; the sum's distribution by repeated convolution.
    """
    if most * links < flows:
        return 0.0
    numbers = np.arange(most + 1)
    log_pmf = numbers * math.log(flows / links) - flows / links - _log_factorials(most)
    # Distribution of the sum of `links` numbers, as far as `flows`, by squaring.
    total, factor, times = np.ones(1), np.exp(log_pmf), links
    while times:
        if times & 1:
            total = np.convolve(total, factor)[: flows + 1]
        factor = np.convolve(factor, factor)[: flows + 1]
        times >>= 1
    total = np.pad(total, (0, max(0, flows + 1 - len(total))))
    log_sum = flows * math.log(flows) - flows - math.lgamma(flows + 1)
    return float(min(1.0, total[flows] / math.exp(log_sum)))


def expected_fullest(flows: int, links: int) -> float:
    """The expected number of flows on the link that has most."""
    mean, most = 0.0, 0
    while most < flows:
        missing = 1 - fullest_probability(flows, links, most)
        mean += missing
        if most * links >= flows and missing < 1e-12:
            break
        most += 1
    return mean


def _binomial(trials: int, chance: float) -> NDArray[np.float64]:
    if chance >= 1 or trials == 0:
        return np.eye(trials + 1)[-1] if chance >= 1 else np.ones(1)
    counts = np.arange(trials + 1)
    logs = _log_factorials(trials)
    ways = logs[-1] - logs - logs[::-1]
    return np.asarray(np.exp(ways + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)))


def _log_factorials(most: int) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])


CAUSES = ("oversubscription", "hashing", "placement", "congestion", "flap")
"""What takes time, in the order in which it is added to an ideal network; each is what the step loses on top."""


@dataclass(frozen=True)
class PhaseOutcome:
    """A phase of the step, as means over all draws of the hashes."""

    name: str
    ideal_s: float  # on an ideal network
    now_s: float  # in this scenario
    ideal_exposed_s: float  # of `ideal_s`
    exposed_s: float  # what the step waits for, of `now_s`
    hottest: str  # the link that decides, in words
    overload: float  # what is asked of it over what it carries
    paths: float  # connections on it
    efficiency: float  # what congestion control makes of fair rates
    queue_s: float  # mean wait there
    paused_ratio: float  # of the time of the phase in which ports before it stood still (PFC)
    bystander: float  # rate of flows that share only a port with it, over their fair rate


@dataclass(frozen=True)
class ScenarioOutcome:
    """A scenario's step."""

    scenario: NetworkScenario
    step_s: float  # mean over all draws; without the flap, where that ends the job
    # Of nine draws in ten.
    low_s: float
    high_s: float
    lost_s: Mapping[str, float]  # by cause; they add up to what the step is longer than on an ideal network
    phases: tuple[PhaseOutcome, ...]
    ends_job: bool  # whether the flap outlasts all retries

    @property
    def why(self) -> str:
        """The largest cause, in a line."""
        if self.ends_job:
            timers, down_s = self.scenario.retransmit, self.scenario.down_s
            enough = shortest_timeout(down_s, timers.retries)
            cure = f"; a timeout of {enough} would outlast it" if enough else ""
            return f"the job ends: retries last {timers.patience_s:.3g} s, the link is down for {down_s:g} s{cure}"
        # Where hosts stand can undo what hashes do, so only both together tell.
        lost = {
            "links": sum(self.lost_s[cause] for cause in ("oversubscription", "hashing", "placement")),
            "congestion": self.lost_s["congestion"],
            "flap": self.lost_s["flap"],
        }
        cause = max(lost, key=lambda name: lost[name])
        if lost[cause] < 1e-4 * self.step_s:
            return "nothing is in the way of its messages"
        if cause == "flap":
            which = "NIC" if self.scenario.flap_link == "nic" else "uplink"
            return f"{which} silent for {self.lost_s['flap']:.2f} s, until a retransmission finds the link up"
        phase = max(self.phases, key=lambda phase: phase.exposed_s - phase.ideal_exposed_s)
        if cause == "links":
            stretch = phase.now_s / phase.ideal_s if phase.ideal_s else 1.0
            return f"{phase.name} {stretch:.2f} x as long: {phase.paths:.0f} connections on one link, {phase.hottest}"
        below = f"{phase.name}: {100 * (1 - phase.efficiency):.1f} % below fair rates"
        return f"{below}, {phase.queue_s * 1e6:.0f} µs in queues, ports paused {100 * phase.paused_ratio:.1f} %"


@dataclass(frozen=True)
class Conflicts:
    """How hashes collide where all NICs of a ToR send up, and what each flow of the busiest phase gets."""

    phase: str
    flows: int  # that choose at a ToR
    links: int  # that they choose from
    speedup: float  # full flows that a link carries
    expected_share: float  # of its rate that a flow gets at its ToR
    free_probability: float  # that it gets all (closed forms)
    expected_fullest: float  # connections on a ToR's fullest uplink
    # Of max-min fair rates of all flows over that of a NIC: mean, lowest, 1st and 50th percentile.
    shares: Mapping[str, float]


@dataclass(frozen=True)
class QueueCurve:
    """The queue at a link with so many connections, as time to drain, after all their senders started at once."""

    control: str
    connections: int
    time_s: tuple[float, ...]
    queue_s: tuple[float, ...]


@dataclass(frozen=True)
class NetworkReport:
    """All that was asked."""

    cluster: str
    devices: int
    devices_per_host: int
    traffic_source: str
    ideal_step_s: float  # on a network in which nothing is in the way
    outcomes: tuple[ScenarioOutcome, ...]
    conflicts: Conflicts | None  # of the first scenario; None where nothing is hashed
    # At the hottest link of all scenarios, by kind of congestion control, where that was asked for; none where no link
    # is hot.
    queues: tuple[QueueCurve, ...]
    draws: int  # of hashes and places, each one a job
    wall_s: float
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; what never ends is None."""
        tree: dict[str, Any] = finite(dataclasses.asdict(self))
        for entry, outcome in zip(tree["outcomes"], self.outcomes, strict=True):
            entry["why"] = outcome.why
        return tree
