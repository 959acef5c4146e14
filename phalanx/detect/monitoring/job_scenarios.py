"""Jobs that are made up: drawn by a seed from the ranges of a split, with or without a fault.

    scenario = draw_scenario("test", 7, fault="NIC dropout", machines=128)

The splits differ in seeds and in ranges: whoever tunes on ``develop`` has seen neither the jobs nor the parameters of
``test`` and ``final``. The same split, number and arguments give the same scenario on every machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.fault_signatures import FAULTS, SIGNATURES, Effect, Signature, faults_in_shares
from phalanx.detect.monitoring.load_model import JobLoad, Phase

SplitName = Literal["develop", "test", "final"]
Range = tuple[float, float]


@dataclass(frozen=True)
class SplitRanges:
    """From what the scenarios of a split are drawn; pairs are least and most.

    Attributes:
        first_seed: scenario k has the seed ``first_seed + k``.
        machines: of a job, least, usual and most; usual jobs are triangular by the logarithm, from a quarter of
            the usual number on.
        trials: probability of a job of any size instead, log-uniform.
        step_s: seconds of a step, log-uniform.
        stages: of the pipeline, one of these.
        bubble: share of a step that the last stage waits at each end.
        gradient_share: of a step, in which gradients are exchanged.
        step_jitter: standard deviation of steps over their mean.
        noise: factor of all noise, log-uniform.
        two_generations: probability that some machines have another GPU generation.
        odd_hosts: share of hosts that differ in one metric all the time, and are healthy.
        odd_size: factor of how much.
        excursions_per_hour: of a machine: bursts of less than four minutes that mean nothing.
        excursion_s: their length, log-uniform.
        clock_offset_s: standard deviation of hosts' clocks.
        missing: share of samples that are lost, log-uniform.
        severity: of faults, uniform.
        short_faults: probability that the job is restarted before four minutes have passed.
        onset_s: in a table of 15 minutes.
        group_faults: probability that a fault takes several machines, as of one switch.
    """

    first_seed: int
    machines: tuple[int, int, int]
    trials: float
    step_s: Range
    stages: tuple[int, ...]
    bubble: Range
    gradient_share: Range
    step_jitter: Range
    noise: Range
    two_generations: float
    odd_hosts: Range
    odd_size: Range
    excursions_per_hour: Range
    excursion_s: Range
    clock_offset_s: Range
    missing: Range
    severity: Range
    short_faults: float
    onset_s: Range
    group_faults: float


_DEVELOP = SplitRanges(
    first_seed=2_411_000_000,
    machines=(4, 192, 1000),
    trials=0.2,
    step_s=(2, 12),
    stages=(1, 2, 4, 8),
    bubble=(0.02, 0.08),
    gradient_share=(0.08, 0.2),
    step_jitter=(0.005, 0.03),
    noise=(0.7, 1.4),
    two_generations=0.15,
    odd_hosts=(0.0, 0.03),
    odd_size=(0.5, 1.2),
    excursions_per_hour=(0.001, 0.015),
    excursion_s=(5, 120),
    clock_offset_s=(0.0, 0.5),
    missing=(0.0005, 0.01),
    severity=(0.2, 1.0),
    short_faults=0.03,
    onset_s=(120, 380),
    group_faults=0.02,
)

_TEST = SplitRanges(
    first_seed=1_791_000_000,
    machines=(4, 256, 1500),
    trials=0.2,
    step_s=(3, 20),
    stages=(1, 2, 3, 6, 12),
    bubble=(0.03, 0.1),
    gradient_share=(0.1, 0.26),
    step_jitter=(0.01, 0.04),
    noise=(0.8, 1.7),
    two_generations=0.2,
    odd_hosts=(0.005, 0.04),
    odd_size=(0.6, 1.5),
    excursions_per_hour=(0.002, 0.02),
    excursion_s=(6, 180),
    clock_offset_s=(0.0, 0.8),
    missing=(0.001, 0.02),
    severity=(0.15, 1.0),
    short_faults=0.04,
    onset_s=(90, 420),
    group_faults=0.02,
)

SPLITS: Mapping[str, SplitRanges] = MappingProxyType(
    {"develop": _DEVELOP, "test": _TEST, "final": dataclasses.replace(_TEST, first_seed=1_301_000_000)}
)
"""Published with the data: see docs/detect_data.md."""


@dataclass(frozen=True)
class HostEffect:
    """What one machine shows for a while; whether it is healthy is not said here.

    Attributes:
        machine: index.
        effect: with both amounts alike.
        start_s: since the first sample.
        end_s: the same.
    """

    machine: int
    effect: Effect
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        signature: how it shows.
        machines: indices of those that are faulty.
        severity: 0 to 1.
        start_s: onset, since the first sample.
        end_s: when the job is stopped for it, or the table ends.
        job_start_s: since when the job hangs or is slow.
        peers: index, share of the effects and delay of those that it spreads to.
    """

    signature: Signature
    machines: tuple[int, ...]
    severity: float
    start_s: float
    end_s: float
    job_start_s: float
    peers: tuple[tuple[int, float, float], ...]

    @property
    def slowdown(self) -> float:
        """Of steps, where the job is slow."""
        low, high = self.signature.slowdown
        return float(low * (high / low) ** self.severity)


@dataclass(frozen=True)
class Scenario:
    """All that a table is made from, but for noise, which the seed gives.

    Attributes:
        name: of the case, as labels call it.
        split: where it comes from.
        seed: of all that is drawn.
        machines: how many.
        duration_s: of the table.
        start_unix_s: of its first sample.
        load: shape of the steps.
        phases: evaluations, checkpoints, restarts, and what a fault does to the job.
        generations: factors of GPU metrics, by group of machines.
        group_of: group of each machine.
        host_effects: oddities and bursts of healthy machines.
        fault: what is wrong, if anything.
        ranges: of the split.
        noise: factor of all noise.
        missing: share of samples that are lost.
        clock_offset_s: standard deviation of hosts' clocks.
    """

    name: str
    split: str
    seed: int
    machines: int
    duration_s: int
    start_unix_s: float
    load: JobLoad
    phases: tuple[Phase, ...]
    generations: tuple[Mapping[str, float], ...]
    group_of: tuple[int, ...]
    host_effects: tuple[HostEffect, ...]
    fault: Fault | None
    noise: float
    missing: float
    clock_offset_s: float

    def stage_of(self, machine: int) -> int:
        """Neighbours share a stage."""
        return machine * self.load.stages // self.machines


def split_ranges(split: str) -> SplitRanges:
    """Of a published split.

    Raises:
        UserError: there is no such split.
    """
    if split not in SPLITS:
        raise UserError("is no split", cure=f"use one of {', '.join(SPLITS)}", field="split", value=split)
    return SPLITS[split]


def draw_scenario(
    split: str,
    number: int,
    *,
    fault: str | None = None,
    machines: int | None = None,
    faulty: int | None = None,
    duration_s: int = 900,
    ranges: SplitRanges | None = None,
) -> Scenario:
    """One job of a split.

    Args:
        split: ``develop``, ``test`` or ``final``.
        number: of the scenario; with the split it gives the seed.
        fault: a class of `FAULTS`; None: a healthy job.
        machines: None: drawn.
        faulty: machines that the fault takes, neighbours as behind one switch; None: drawn, mostly one.
        duration_s: of the table, at least 60.
        ranges: other ones than the split's; the seed stays its.

    Raises:
        UserError: no such split or class, or numbers that make no job.
    """
    given = ranges or split_ranges(split)
    if fault is not None and fault not in FAULTS:
        raise UserError("is no class of faults", cure=f"use one of {', '.join(FAULTS)}", field="fault", value=fault)
    if machines is not None and machines < 2:
        raise UserError("makes no job", cure="give 2 machines or more", field="machines", value=machines)
    if faulty is not None and (fault is None or faulty < 1):
        raise UserError("needs a fault", cure="give its class, and 1 or more", field="faulty", value=faulty)
    if duration_s < 60:
        raise UserError("is too short", cure="give 60 seconds or more", field="duration_s", value=duration_s)
    seed = given.first_seed + number
    random = np.random.default_rng((seed, 1))
    drawn = _draw_size(random, given)
    count = machines or drawn
    load = _draw_load(random, given, count)
    if faulty is not None and faulty > count // 2:
        cure = f"give at most half of the {count} machines"
        raise UserError("leaves too few healthy machines", cure=cure, field="faulty", value=faulty)
    wrong = _draw_fault(random, given, fault, count, load, duration_s, faulty) if fault else None
    generations, group_of = _draw_generations(random, given, count)
    return Scenario(
        name=f"{split}-{number:05d}-{(fault or 'healthy').lower().replace(' ', '-')}",
        split=split,
        seed=seed,
        machines=count,
        duration_s=duration_s,
        start_unix_s=float(1_790_000_000 + random.integers(0, 30 * 86_400)),
        load=load,
        phases=_draw_phases(random, duration_s, wrong),
        generations=generations,
        group_of=group_of,
        host_effects=(
            *_draw_oddities(random, given, count, duration_s),
            *_draw_bursts(random, given, count, duration_s),
        ),
        fault=wrong,
        noise=_log_uniform(random, given.noise),
        missing=_log_uniform(random, given.missing),
        clock_offset_s=float(random.uniform(*given.clock_offset_s)),
    )


def fault_scenarios(split: str, count: int = 150, *, duration_s: int = 900, first: int = 0) -> Iterator[Scenario]:
    """Jobs with one fault each, classes by the shares of the paper's evaluation, in an order that the split gives."""
    classes = [fault for fault, cases in faults_in_shares(count).items() for _ in range(cases)]
    np.random.default_rng((split_ranges(split).first_seed, count)).shuffle(classes)
    for number, fault in enumerate(classes, first):
        yield draw_scenario(split, number, fault=fault, duration_s=duration_s)


def drawn_classes(split: str, count: int) -> list[str]:
    """Classes of the first so many faults, drawn by their shares in production: more of them begin alike."""
    shares = faults_in_shares(10_000, "production")
    random = np.random.default_rng((split_ranges(split).first_seed, 4))
    weights = np.array(list(shares.values())) / 10_000
    return [str(one) for one in random.choice(list(shares), size=count, p=weights)]


def healthy_scenarios(split: str, hours: int = 200, *, first: int = 100_000) -> Iterator[Scenario]:
    """Healthy jobs of an hour each."""
    for number in range(first, first + hours):
        yield draw_scenario(split, number, duration_s=3600)


def _log_uniform(random: np.random.Generator, bounds: Range) -> float:
    return float(np.exp(random.uniform(np.log(bounds[0]), np.log(bounds[1]))))


def _draw_size(random: np.random.Generator, ranges: SplitRanges) -> int:
    least, usual, most = ranges.machines
    of_trial, of_job = _log_uniform(random, (least, most)), random.triangular(*np.log([usual / 4, usual, most]))
    return round(of_trial if random.random() < ranges.trials else math.exp(of_job))


def _draw_load(random: np.random.Generator, ranges: SplitRanges, machines: int) -> JobLoad:
    """At least four machines for each stage: of a machine alone nobody is a peer."""
    fitting = [one for one in ranges.stages if one <= max(1, machines // 4)]
    return JobLoad(
        step_s=_log_uniform(random, ranges.step_s),
        stages=int(random.choice(fitting)),
        bubble=float(random.uniform(*ranges.bubble)),
        gradient_share=float(random.uniform(*ranges.gradient_share)),
        step_jitter=float(random.uniform(*ranges.step_jitter)),
    )


_NEWER = {
    "gpu_power_draw": 1.35,
    "gpu_nvlink_bandwidth": 1.3,
    "gpu_tensor_core_activity": 0.72,
    "gpu_sm_activity": 0.85,
    "gpu_clocks": 1.2,
    "gpu_temperature": 1.08,
    "gpu_memory_bandwidth_utilization": 0.8,
    "cpu_usage": 0.8,
}
"""A newer generation in the same job waits for the older one: more power, less of its tensor cores."""


def _draw_generations(
    random: np.random.Generator, ranges: SplitRanges, machines: int
) -> tuple[tuple[Mapping[str, float], ...], tuple[int, ...]]:
    has_two, share = random.random() < ranges.two_generations, random.uniform(0.25, 0.75)
    if not has_two or machines < 8:
        return ({},), (0,) * machines
    newer_from = round(machines * share)
    spread = random.uniform(0.4, 1.0)
    newer = {name: factor**spread for name, factor in _NEWER.items()}
    return ({}, newer), tuple(int(machine >= newer_from) for machine in range(machines))


def _draw_phases(random: np.random.Generator, duration_s: int, fault: Fault | None) -> tuple[Phase, ...]:
    """Innocent events first: what a fault does wins over them."""
    phases: list[Phase] = []
    every_s, at_s = random.uniform(300, 1500), random.uniform(-300, 600)
    while at_s < duration_s:
        phases.append(Phase("checkpoint", at_s, at_s + random.uniform(3, 25)))
        at_s += every_s
    every_s, at_s = random.uniform(900, 3600), random.uniform(0, 3600)
    while at_s < duration_s:
        phases.append(Phase("evaluation", at_s, at_s + random.uniform(20, 120)))
        at_s += every_s
    restart_s = random.uniform(0, 3600 * 6)  # one in six hours
    if restart_s < duration_s:
        phases.append(Phase("restart", restart_s, restart_s + random.uniform(60, 200)))
    if fault is None:
        return tuple(phases)
    calm_s = (fault.start_s - 30, fault.end_s)  # a job that hangs neither evaluates nor saves; nor is it restarted
    phases = [one for one in phases if one.end_s < calm_s[0] or one.start_s > calm_s[1] or one.kind == "checkpoint"]
    job, end_s = fault.signature.job, fault.end_s
    if job != "none":
        phases.append(Phase(job, fault.job_start_s, end_s, fault.slowdown if job.startswith("slow") else 1.0))
    if end_s < duration_s:
        phases.append(Phase("restart", end_s, end_s + random.uniform(60, 200)))
    return tuple(phases)


def _draw_fault(
    random: np.random.Generator,
    ranges: SplitRanges,
    fault: str,
    machines: int,
    load: JobLoad,
    duration_s: int,
    faulty: int | None = None,
) -> Fault:
    fitting = [one for one in SIGNATURES if one.fault == fault]
    weights = np.array([one.weight for one in fitting])
    signature = fitting[int(random.choice(len(fitting), p=weights / weights.sum()))]
    severity = float(random.uniform(*ranges.severity))
    scale = duration_s / 900
    start_s = float(random.uniform(ranges.onset_s[0], ranges.onset_s[1])) * scale
    is_short, short_s = random.random() < ranges.short_faults, random.uniform(60, 225)
    end_s = start_s + short_s if is_short else max(duration_s + 60.0, start_s + random.uniform(300, 1200))
    is_group, group = random.random() < ranges.group_faults, int(random.integers(2, 17))
    first = int(random.integers(machines))
    many = faulty or (group if is_group and machines >= 8 * group else 1)
    first = min(first, machines - many) if faulty else first
    culprits = range(first, min(first + many, machines))
    peers = _draw_peers(random, signature, culprits, machines, load)
    delay_s = float(random.uniform(*signature.job_delay_s))
    return Fault(signature, tuple(culprits), severity, start_s, end_s, start_s + delay_s, peers)


def _draw_peers(
    random: np.random.Generator, signature: Signature, culprits: range, machines: int, load: JobLoad
) -> tuple[tuple[int, float, float], ...]:
    """Peers of the ring through the faulty machine: the nearest are reached first and most."""
    if signature.spread[1] == 0:
        return ()
    share = float(random.uniform(*signature.spread))
    stage = culprits[0] * load.stages // machines
    ring = [one for one in range(machines) if one * load.stages // machines == stage and one not in culprits]
    ring.sort(key=lambda one: abs(one - culprits[0]))
    reached = ring[: int(random.integers(1, 8))]
    return tuple(
        (peer, share * 0.85**hop, signature.spread_delay_s * (hop + 1) * float(random.uniform(0.6, 1.4)))
        for hop, peer in enumerate(reached)
    )


_ODDITIES: tuple[tuple[Effect, ...], ...] = (
    (Effect("cpu_usage", "add", 0.004, 0.03), Effect("memory_usage", "add", 0.005, 0.04)),  # another agent
    (Effect("gpu_power_draw", "scale", 0.985, 0.95), Effect("gpu_clocks", "scale", 0.995, 0.98)),  # a warm rack
    (Effect("pfc_tx_packet_rate", "scale", 1.3, 3.0), Effect("ecn_packet_rate", "scale", 1.2, 2.0)),  # a busy port
    (Effect("gpu_nvlink_bandwidth", "scale", 0.99, 0.96),),  # other firmware
    (Effect("gpu_tensor_core_activity", "scale", 0.99, 0.95),),  # counters that differ
)
_BURSTS: tuple[tuple[float, tuple[Effect, ...]], ...] = (
    (4, (Effect("cpu_usage", "add", 0.02, 0.2, 0, 2),)),  # logs are rotated, a scan
    (4, tuple(Effect(f"{one}_packet_rate", "scale", 2, 15, 0, 3) for one in ("pfc_tx", "ecn", "cnp"))),  # incast
    (2, (Effect("gpu_power_draw", "scale", 0.97, 0.8, 0, 5), Effect("gpu_clocks", "scale", 0.99, 0.85, 0, 5))),
    (1, (Effect("tcp_throughput", "scale", 2, 20, 0, 2), Effect("cpu_usage", "add", 0.01, 0.08, 0, 2))),  # an upload
    (1, (Effect("gpu_nvlink_bandwidth", "scale", 0.97, 0.8, 0, 1),)),
)


def _draw_oddities(
    random: np.random.Generator, ranges: SplitRanges, machines: int, duration_s: int
) -> Iterator[HostEffect]:
    size = random.uniform(*ranges.odd_size)
    hosts = np.flatnonzero(random.random(machines) < random.uniform(*ranges.odd_hosts))
    for host in hosts:
        for one in _ODDITIES[int(random.integers(len(_ODDITIES)))]:
            yield HostEffect(int(host), _fixed(one, size * random.random()), -math.inf, duration_s + 60.0)


def _draw_bursts(
    random: np.random.Generator, ranges: SplitRanges, machines: int, duration_s: int
) -> Iterator[HostEffect]:
    weights = np.array([weight for weight, _ in _BURSTS])
    many = int(random.poisson(random.uniform(*ranges.excursions_per_hour) * machines * duration_s / 3600))
    for _ in range(many):
        host, start_s = int(random.integers(machines)), random.uniform(-30, duration_s)
        length_s, amount = _log_uniform(random, ranges.excursion_s), random.random()
        for one in _BURSTS[int(random.choice(len(_BURSTS), p=weights / weights.sum()))][1]:
            yield HostEffect(host, _fixed(one, amount), start_s, start_s + length_s)


def _fixed(effect: Effect, severity: float) -> Effect:
    amount = effect.amount(severity)
    return dataclasses.replace(effect, subtle=amount, full=amount)
