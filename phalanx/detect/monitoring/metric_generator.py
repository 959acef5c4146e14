"""Monitoring data that are made up: a scenario becomes a table, metric by metric, and labels of what is wrong in it.

    case = generate(draw_scenario("develop", 0, fault="ECC error"))
    case.table, case.labels

Deterministic: the scenario's seed gives all noise, each metric by itself, so that a table of some metrics holds
the same values as one of all. Memory is the table and a few arrays of one block of machines.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.monitoring.fault_signatures import Effect
from phalanx.detect.monitoring.job_scenarios import Fault, Scenario
from phalanx.detect.monitoring.load_model import FINE_PER_S, MODELS, STATES, MetricModel, activities, lag, levels
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, known_metric
from phalanx.detect.monitoring.metric_table import MetricTable

_BLOCK = 512
"""Machines that are made at once; a part of what a seed means."""
_MARGIN_S = 8.0
_TEMPERATURE_S = 25.0
_FLAP_SHARE = 0.45


@dataclass(frozen=True)
class FaultLabel:
    """What is wrong in a table, as an operator would have written it down.

    Attributes:
        fault: its class.
        signature: which of its forms.
        machines: that are to blame.
        start_unix_s: onset.
        end_unix_s: when the job was stopped for it, or the end of the table.
        shown_unix_s: the first sample in which a metric of the table shows it: it differs by more than the deviation of
            one sample's noise from what a healthy machine would do in this place, or is no longer measured. None: none
            does, or no table was made. What rises slowly, comes now and then or waits for the next step shows later
            than its onset.
        severity: 0 (subtle) to 1.
        job: what it did to the job: ``none``, ``hang``, ``slow_compute``, ``slow_gradients``.
        metrics: that show it, the clearest first.
        vanished: that are no longer measured on these machines.
        peers: machines that it spread to, which are healthy.
    """

    fault: str
    signature: str
    machines: tuple[str, ...]
    start_unix_s: float
    end_unix_s: float
    severity: float
    job: str
    metrics: tuple[str, ...]
    vanished: tuple[str, ...]
    peers: tuple[str, ...]
    shown_unix_s: float | None = None


@dataclass(frozen=True)
class CaseLabels:
    """What is known of a table.

    Attributes:
        case: its name.
        split: that it was drawn from.
        seed: of the scenario.
        machines: how many.
        samples: how many.
        start_unix_s: of the first one.
        faults: what is wrong; none in healthy tables.
        innocent: events of the whole job, with seconds since the first sample.
    """

    case: str
    split: str
    seed: int
    machines: int
    samples: int
    start_unix_s: float
    faults: tuple[FaultLabel, ...]
    innocent: tuple[tuple[str, float, float], ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **vars(self),
            "faults": [vars(one) | {"machines": list(one.machines)} for one in self.faults],
            "innocent": [{"event": kind, "start_s": start, "end_s": end} for kind, start, end in self.innocent],
        }


@dataclass(frozen=True)
class GeneratedCase:
    """A table and what is known of it."""

    table: MetricTable
    labels: CaseLabels


def generate(
    scenario: Scenario,
    metrics: Sequence[str] = DETECTED,
    *,
    real_noise: Mapping[str, NDArray[np.float32]] | None = None,
) -> GeneratedCase:
    """Make the table of a scenario.

    Args:
        metrics: names of the catalogue; by default the seven that the paper detects by.
        real_noise: by metric, residuals of real hosts [hosts, samples] as `metric_residuals.read_residuals` gives them;
            they take the place of the noise that is made up. Metrics that it lacks keep theirs.

    Raises:
        UserError: a metric that the catalogue does not have.
    """
    kept = tuple(known_metric(name).name for name in metrics)
    drawn = _Drawn.of(scenario)
    values = np.empty((len(kept), scenario.machines, scenario.duration_s), np.float32)
    shown = [
        _write_metric(scenario, drawn, name, values[row], (real_noise or {}).get(name)) for row, name in enumerate(kept)
    ]
    table = MetricTable(values, kept, machine_names(scenario.machines), scenario.start_unix_s)
    return GeneratedCase(table, label(scenario, min((one for one in shown if one is not None), default=None)))


def machine_names(machines: int) -> tuple[str, ...]:
    """``host-0000`` and so on."""
    return tuple(f"host-{number:04d}" for number in range(machines))


def label(scenario: Scenario, shown: int | None = None) -> CaseLabels:
    """What is known of a scenario's table.

    Args:
        shown: first sample that shows the fault.
    """
    names = machine_names(scenario.machines)
    own = [one for one in scenario.phases if one.kind in ("checkpoint", "evaluation", "restart")]
    return CaseLabels(
        scenario.name,
        scenario.split,
        scenario.seed,
        scenario.machines,
        scenario.duration_s,
        scenario.start_unix_s,
        (_label_of(scenario.fault, scenario, names, shown),) if scenario.fault else (),
        tuple((one.kind, one.start_s, min(one.end_s, scenario.duration_s)) for one in own),
    )


def _label_of(fault: Fault, scenario: Scenario, names: Sequence[str], shown: int | None) -> FaultLabel:
    return FaultLabel(
        fault.signature.fault,
        fault.signature.name,
        tuple(names[machine] for machine in fault.machines),
        scenario.start_unix_s + fault.start_s,
        scenario.start_unix_s + min(fault.end_s, scenario.duration_s),
        round(fault.severity, 3),
        fault.signature.job,
        fault.signature.guilty,
        tuple(one.metric for one in fault.signature.effects if one.how == "vanish"),
        tuple(names[machine] for machine, _, _ in fault.peers),
        None if shown is None else scenario.start_unix_s + shown,
    )


@dataclass(frozen=True)
class _Drawn:
    """What all metrics of a scenario share.

    Attributes:
        activities: [profiles, activities, moments].
        profile_of: profile of each machine: its stage's, or its own where it is faulty.
        moment_of: of each machine and sample, on the fine grid: clocks are off and scrapes late.
        lost: samples that no exporter of the machine delivered.
        lost_gpu: the same of its GPU exporter.
    """

    activities: NDArray[np.float32]
    profile_of: NDArray[np.int32]
    moment_of: NDArray[np.int32]
    lost: NDArray[np.bool_]
    lost_gpu: NDArray[np.bool_]

    @classmethod
    def of(cls, scenario: Scenario) -> _Drawn:
        random = np.random.default_rng((scenario.seed, 2))
        of_stages, of_slow = activities(scenario.load, scenario.phases, scenario.duration_s, _MARGIN_S, random)
        profile_of = np.array([scenario.stage_of(one) for one in range(scenario.machines)], np.int32)
        profiles = [of_stages]
        if scenario.fault:
            for machine in scenario.fault.machines:
                source = of_slow if scenario.fault.signature.job == "slow_compute" else of_stages
                own = _with_state(source[profile_of[machine]], scenario.fault)
                profile_of[machine] = sum(map(len, profiles))
                profiles.append(own[None])
        lost = _lost_samples(random, scenario)
        return cls(
            np.concatenate(profiles),
            profile_of,
            _moments(random, scenario),
            lost,
            lost | _lost_samples(random, scenario),
        )


def _with_state(of_job: NDArray[np.float32], fault: Fault) -> NDArray[np.float32]:
    """Activities of a machine where a share of the processes has another state than the job."""
    signature = fault.signature
    if not signature.state:
        return of_job
    low, high = signature.state_share
    moments = np.arange(of_job.shape[-1], dtype=np.float32) / np.float32(FINE_PER_S) - np.float32(_MARGIN_S)
    share = (low + (high - low) * fault.severity) * _course(Effect("", "add"), fault.start_s, fault.end_s, moments)
    mixed: NDArray[np.float32] = of_job * (1 - share) + STATES[signature.state][:, None] * share
    return mixed


def _moments(random: np.random.Generator, scenario: Scenario) -> NDArray[np.int32]:
    """Clocks are off by a constant; scrapes are late by parts of a second."""
    offsets_s = random.normal(0, scenario.clock_offset_s, (scenario.machines, 1)).clip(-4, 4)
    jitter = random.integers(0, 2, (scenario.machines, scenario.duration_s), dtype=np.int32)
    first = np.rint((offsets_s + _MARGIN_S) * FINE_PER_S).astype(np.int32)
    moments: NDArray[np.int32] = first + np.arange(scenario.duration_s, dtype=np.int32) * FINE_PER_S + jitter
    return moments


def _lost_samples(random: np.random.Generator, scenario: Scenario) -> NDArray[np.bool_]:
    """Single samples, gaps of some seconds on one host, and now and then of all hosts at once."""
    shape = (scenario.machines, scenario.duration_s)
    lost: NDArray[np.bool_] = random.random(shape, dtype=np.float32) < scenario.missing / 2
    for _ in range(int(random.poisson(scenario.missing / 2 / 12 * shape[0] * shape[1]))):
        start = int(random.integers(shape[1]))
        lost[int(random.integers(shape[0])), start : start + int(random.integers(3, 22))] = True
    for _ in range(int(random.poisson(scenario.duration_s / 3600))):
        start = int(random.integers(shape[1]))
        lost[:, start : start + int(random.integers(2, 12))] = True
    return lost


def _write_metric(
    scenario: Scenario, drawn: _Drawn, name: str, out: NDArray[np.float32], real: NDArray[np.float32] | None
) -> int | None:
    """Fill `out`, [machines, samples]; returns the first sample that shows the fault."""
    model, metric = MODELS[name], CATALOGUE[name]
    random = np.random.default_rng((scenario.seed, 3, zlib.crc32(name.encode())))
    fine = levels(model, drawn.activities)
    if name == "gpu_temperature":
        fine = lag(fine, _TEMPERATURE_S)
    factors = np.array([group.get(name, 1.0) for group in scenario.generations], np.float32)
    factor_of = factors[np.array(scenario.group_of)]
    factor_of *= 1 + scenario.noise * model.host_spread * random.standard_normal(scenario.machines, np.float32)
    blocks = [slice(one, min(one + _BLOCK, scenario.machines)) for one in range(0, scenario.machines, _BLOCK)]
    for block in blocks:
        out[block] = fine[drawn.profile_of[block, None], drawn.moment_of[block]]
        out[block] *= factor_of[block, None]
    seconds = np.arange(scenario.duration_s, dtype=np.float32)
    _add_days(scenario, name, seconds, out)
    for one in scenario.host_effects:
        if one.effect.metric == name:
            _apply(one.effect, out[one.machine], one.start_s, one.end_s, 1.0, 0.5, seconds)
    shown = None
    if scenario.fault:
        faulty = list(scenario.fault.machines)
        before, stages = out[faulty].copy(), np.array([scenario.stage_of(one) for one in faulty])
        _add_fault(random, scenario.fault, name, seconds, out)
        of_job = fine[stages[:, None], drawn.moment_of[faulty]] * factor_of[faulty, None]
        of_state = fine[drawn.profile_of[faulty, None], drawn.moment_of[faulty]] * factor_of[faulty, None] - of_job
        shown = _first_shown(out[faulty] - before + of_state, model, scenario.noise, of_job)
    for block in blocks:  # what is wrong scatters like all else
        if real is None:
            _add_noise(random, model, scenario.noise, out[block])
        else:
            _add_real_noise(random, real, out[block])
    np.maximum(out, 0, out=out)
    if metric.unit == "ratio":
        np.minimum(out, 1, out=out)
    out[drawn.lost_gpu if metric.is_of_gpus else drawn.lost] = np.nan
    return shown


def _first_shown(away: NDArray[np.float32], model: MetricModel, noise: float, level: NDArray[np.float32]) -> int | None:
    """The first sample in which what a fault does to its machines, [machines, samples], is more than noise."""
    deviation = np.float32(noise) * (np.float32(model.relative_noise) * level + np.float32(model.noise))
    moments = np.flatnonzero(((np.abs(away) > deviation) | np.isnan(away)).any(axis=0))
    return int(moments[0]) if len(moments) else None


def _add_noise(random: np.random.Generator, model: MetricModel, size: float, part: NDArray[np.float32]) -> None:
    white = random.standard_normal(part.shape, np.float32)
    slow = _slow_noise(random, part.shape, 8) + _slow_noise(random, part.shape, 90)
    relative = np.float32(size * model.relative_noise) * white + np.float32(size * model.slow_noise) * slow
    if model.is_rate:
        np.exp(relative, out=relative)
    else:
        relative += 1
    part *= relative
    white *= np.float32(size * model.noise)
    part += white


def _slow_noise(random: np.random.Generator, shape: tuple[int, ...], every: int) -> NDArray[np.float32]:
    """Of unit variance at its knots, which lie `every` samples apart; straight lines between."""
    machines, samples = shape
    knots = random.standard_normal((machines, samples // every + 2), np.float32)
    left = np.arange(samples) // every
    share = (np.arange(samples, dtype=np.float32) % every) / np.float32(every)
    found: NDArray[np.float32] = knots[:, left] * (1 - share) + knots[:, left + 1] * share
    return found


def _add_real_noise(random: np.random.Generator, real: NDArray[np.float32], part: NDArray[np.float32]) -> None:
    """Residuals of a real host, from a random moment on, round and round; they are shares of the level."""
    hosts = random.integers(len(real), size=len(part))
    starts = random.integers(real.shape[1], size=len(part))
    moments = (starts[:, None] + np.arange(part.shape[1])) % real.shape[1]
    part *= 1 + real[hosts[:, None], moments]


def _add_days(scenario: Scenario, name: str, seconds: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Halls are warmer, and hosts busier with other people's requests, by day."""
    amplitude = {"cpu_usage": 0.06, "tcp_throughput": 0.1, "gpu_temperature": 0.02, "gpu_power_draw": 0.004}.get(name)
    if amplitude:
        of_day = (scenario.start_unix_s % 86_400 + seconds) / 86_400
        out *= (1 + amplitude * np.sin(2 * np.pi * (of_day - 0.375))).astype(np.float32)


def _add_fault(
    random: np.random.Generator, fault: Fault, name: str, seconds: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    phase = float(random.random())
    for effect in fault.signature.effects:
        if effect.metric != name:
            continue
        for machine in fault.machines:
            _apply(effect, out[machine], fault.start_s, fault.end_s, fault.severity, phase, seconds)
        for peer, share, delay_s in fault.peers:
            if effect.how != "vanish":
                weaker = _weaker(effect, share, fault.severity)
                _apply(weaker, out[peer], fault.start_s + delay_s, fault.end_s, fault.severity, phase, seconds)


def _weaker(effect: Effect, share: float, severity: float) -> Effect:
    """What reaches a peer."""
    amount = effect.amount(severity)
    amount = amount**share if effect.how == "scale" else amount * share
    return Effect(effect.metric, effect.how, amount, amount, effect.delay_s, effect.ramp_s, effect.flap_s)


def _apply(
    effect: Effect,
    series: NDArray[np.float32],
    start_s: float,
    end_s: float,
    severity: float,
    phase: float,
    seconds: NDArray[np.float32],
) -> None:
    course = _course(effect, start_s, end_s, seconds, phase)
    if effect.how == "vanish":
        series[course > 0.5] = np.nan
    elif effect.how == "scale":
        series *= np.float32(effect.amount(severity)) ** course
    else:
        series += np.float32(effect.amount(severity)) * course


def _course(
    effect: Effect, start_s: float, end_s: float, seconds: NDArray[np.float32], phase: float = 0.0
) -> NDArray[np.float32]:
    """0 to 1: before, while, after."""
    since = seconds - np.float32(max(start_s, -1e6) + effect.delay_s)
    course = np.clip(since / np.float32(max(effect.ramp_s, 0.25)), 0, 1)
    course[seconds >= end_s] = 0
    if effect.flap_s:
        course *= ((since / np.float32(effect.flap_s) + phase) % 1 > _FLAP_SHARE).astype(np.float32)
    found: NDArray[np.float32] = course.astype(np.float32)
    return found
