"""What each circumstance does to a step: an ideal network first, then one thing after the other on top of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from phalanx.core.errors import UserError
from phalanx.plan.network.conflicts import expected_fullest, expected_share, free_probability
from phalanx.plan.network.congestion.settings import Control
from phalanx.plan.network.congestion.table import NO_EFFECT, Effect, HotLink, Table
from phalanx.plan.network.loads import Load, measure, shape_of
from phalanx.plan.network.outcome import CAUSES, Conflicts, Outcome, PhaseOutcome, QueueCurve, Report
from phalanx.plan.network.scenario import Scenario
from phalanx.plan.network.settings import Network
from phalanx.plan.network.shares import flow_shares
from phalanx.plan.network.traffic import Phase, Traffic

Stage = Literal["ideal", "oversubscription", "hashing", "placement"]
_STAGES: tuple[Stage, ...] = ("ideal", "oversubscription", "hashing", "placement")
_HOT = 1 + 1e-6
_MOST_DRAWS = 1000


@dataclass(frozen=True)
class _Job:
    """One question with everything that it needs."""

    network: Network
    traffic: Traffic
    scenario: Scenario

    def load(self, phase: Phase, stage: Stage, draw: int) -> Load:
        """The fullest link of a phase with all circumstances up to `stage`."""
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

    def time_s(self, phase: Phase, load: Load) -> float:
        """Of a phase without queues: bytes over the fullest link, and latencies of sends that wait for one another."""
        if not load.seconds:
            return 0.0
        return phase.rank_bytes * load.seconds + phase.times * phase.hops * self.network.latency_s

    def hot_link(self, load: Load) -> HotLink | None:
        """What congestion control has to deal with; None where no link is asked for more than it carries."""
        if load.overload <= _HOT:
            return None
        return HotLink.of(self.scenario.congestion, load.paths, load.overload, load.capacity, load.hot_links)


def what_if(
    network: Network, traffic: Traffic, scenarios: Sequence[Scenario], draws: int = 8, *, curves: bool = False
) -> Report:
    """The step of every scenario.

    Args:
        draws: of hashes and, where hosts are scattered, of places; each is a job of its own.
        curves: also follow the queue at the hottest link under each kind of congestion control.

    Raises:
        UserError: the devices do not fill the groups of the traffic, a fabric has too few hosts for them, or `draws`
            is no number.
    """
    if not 1 <= draws <= _MOST_DRAWS:
        raise UserError("is no number of draws", cure=f"write 1 to {_MOST_DRAWS}", field="draws", value=draws)
    start = time.perf_counter()
    traffic.check(network.devices)
    _check_hosts(network, scenarios)
    jobs = [_Job(network, traffic, scenario) for scenario in scenarios]
    links = _hot_links(jobs, draws)
    shown = _by_control(links) if curves else []
    table = Table(list(dict.fromkeys([*links, *shown])), network.settings, network.fabric.nic_bytes_per_s)
    outcomes = tuple(_outcome(job, table, draws) for job in jobs)
    return Report(
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


def _check_hosts(network: Network, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        if scenario.fabric.hosts < network.fabric.hosts:
            cure = f"write {network.fabric.hosts:,} or more, or take fewer devices"
            raise UserError("the job has more hosts", cure=cure, field="hosts", value=scenario.fabric.hosts)


def _hot_links(jobs: Sequence[_Job], draws: int) -> list[HotLink]:
    """All distinct ones, of all jobs."""
    found: dict[HotLink, None] = {}
    for job in jobs:
        for phase in job.traffic.phases:
            for draw in range(draws):
                link = job.hot_link(job.load(phase, "placement", draw))
                if link is not None:
                    found[link] = None
    return list(found)


def _by_control(links: Sequence[HotLink]) -> list[HotLink]:
    """The link with the most connections, under each kind of congestion control."""
    if not links:
        return []
    fullest = max(links, key=lambda link: link.paths * link.line_rate / link.capacity)
    return [replace(fullest, control=control) for control in get_args(Control)]


def _queue_curve(table: Table, link: HotLink) -> QueueCurve:
    trace = table.trace(link)
    queue_s = trace.queue_bytes[0] / link.capacity
    times_s = trace.sample_s * np.arange(1, len(queue_s) + 1)
    return QueueCurve(link.control, link.paths, tuple(times_s.tolist()), tuple(queue_s.tolist()))


@dataclass(frozen=True)
class _Drawn:
    """One phase in one draw: its time after each stage, and with congestion."""

    times_s: Mapping[str, float]
    load: Load
    effect: Effect


def _outcome(job: _Job, table: Table, draws: int) -> Outcome:
    drawn = [_draw(job, table, draw) for draw in range(draws)]
    waits = np.array([[_exposed_s(job, phases, stage) for stage in (*_STAGES, "congestion")] for phases in drawn])
    stall_s = job.scenario.stall_s
    ends = not np.isfinite(stall_s)
    lost = np.diff(waits, axis=1).mean(axis=0)
    lost_s = {cause: float(seconds) for cause, seconds in zip(CAUSES, [*lost, 0.0 if ends else stall_s], strict=True)}
    steps = job.traffic.step_s + waits[:, -1] - waits[:, 0] + lost_s["flap"]
    low, high = np.percentile(steps, [5, 95])
    phases = tuple(
        _phase(job, phase, [each[place] for each in drawn]) for place, phase in enumerate(job.traffic.phases)
    )
    return Outcome(job.scenario, float(steps.mean()), float(low), float(high), lost_s, phases, ends)


def _draw(job: _Job, table: Table, draw: int) -> list[_Drawn]:
    """All phases of one draw; each is also held up at ports that the hot links of others have stopped."""
    phases = job.traffic.phases
    alone = [_draw_alone(job, table, phase, draw) for phase in phases]
    held_up = [_holds_up(job, one) for one in alone]
    drawn = []
    for place, (phase, one) in enumerate(zip(phases, alone, strict=True)):
        alone_s = one.times_s["placement"] * one.effect.stretch + phase.times * one.effect.queue_s
        by_others = sum(held_up) - held_up[place]
        drawn.append(replace(one, times_s={**one.times_s, "congestion": alone_s * (1 + by_others)}))
    return drawn


def _draw_alone(job: _Job, table: Table, phase: Phase, draw: int) -> _Drawn:
    loads: dict[str, Load] = {stage: job.load(phase, stage, draw) for stage in _STAGES}
    times_s = {stage: job.time_s(phase, load) for stage, load in loads.items()}
    return _Drawn(times_s, loads["placement"], _effect(job, table, phase, loads["placement"]))


def _holds_up(job: _Job, drawn: _Drawn) -> float:
    """How much longer others take because of a phase: while it runs, they get the bystanders' rate."""
    running = min(1.0, drawn.times_s["placement"] / job.traffic.step_s)
    return running * (1 / max(drawn.effect.bystander, 1e-6) - 1)


def _effect(job: _Job, table: Table, phase: Phase, load: Load) -> Effect:
    link = job.hot_link(load)
    return NO_EFFECT if link is None else table.effect(link, phase.rank_bytes * load.seconds / phase.times)


def _exposed_s(job: _Job, drawn: Sequence[_Drawn], stage: str) -> float:
    """What the step waits for in all phases."""
    pairs = zip(job.traffic.phases, drawn, strict=True)
    return float(sum(phase.exposed_s(one.times_s["ideal"], one.times_s[stage]) for phase, one in pairs))


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


def _notes(network: Network, traffic: Traffic) -> tuple[str, ...]:
    notes = []
    if not network.described:
        notes.append(f"nothing is known of {network.name}'s fabric: a usual CLOS of three layers is assumed (--fabric)")
    assumed = [key for key, number in network.numbers.items() if number.mark == "assumed"]
    if assumed:
        notes.append(f"{len(assumed)} of {len(network.numbers)} numbers of the network are assumed (--sources)")
    if not any(phase.ranks * phase.stride > network.devices_per_host for phase in traffic.phases):
        notes.append("all groups stay inside hosts: nothing crosses the network")
    return tuple(notes)
