"""The interval between durable checkpoints that loses least time (``auto``), from what a run measures.

A checkpoint costs a *stall* δ (training stands still) and becomes durable after *persisting* w in the background.
Failures come at random, once in M; after one, a *restart* takes R, and everything since the newest durable checkpoint
is done again. With an interval τ of training between two stalls, a failure after the time t leaves
``τ · floor((t - w) / (τ + δ))`` of useful work, so that the time needed for one second of useful work is

    M · exp((R + w) / M) · (exp((τ + δ) / M) - 1) / τ

which is Daly's equation (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
Future Generation Computer Systems 22, 2006) with R + w for his R: persisting makes a failure dearer, but does not move
the optimum. That depends on δ and M only. Young (J. W. Young, A first order approximation to the optimum checkpoint
interval, Communications of the ACM 17, 1974) has ``sqrt(2 δ M)``; Daly's estimate is used here. Beside it the interval
is at least w, since one checkpoint is persisted at a time, and at least one step.

`AutoInterval` adapts it as a run goes on. Only rank 0's figures count, and only it asks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core import units

HOST_MTBF_S = 47.7 * 86400
"""Mean time between failures of jobs on one host of 8 GPUs before anything was seen: 47.7 days, observed in Meta's
clusters (Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680), where jobs on 128
such hosts failed every 7.9 hours, nearly the same per host. Its failure rate of the hardware alone is about a third."""

_ROUND = 1.001


@dataclass(frozen=True)
class IntervalCosts:
    """What was measured, seconds.

    Attributes:
        step_s: a step without a checkpoint.
        stall_s: by how much longer a checkpoint makes the step it is taken at and the next one together.
        persist_s: from the snapshot until its checkpoint is durable.
        restart_s: from a failure until steps are done again.
    """

    step_s: float
    stall_s: float
    persist_s: float
    restart_s: float = 0.0


@dataclass(frozen=True)
class JobFailures:
    """What is known of failures of a job.

    Attributes:
        seen: failures so far, in all attempts.
        observed_s: seconds of all attempts together.
        given_s: mean time between failures of the whole job as a person gave it; 0: not given.
    """

    hosts: int = 1
    seen: int = 0
    observed_s: float = 0.0
    given_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole job.

        Where it was not given: the mean of the rate after what was seen, with a Gamma prior worth one failure in
        `HOST_MTBF_S` divided by the hosts.
        """
        return self.given_s or (HOST_MTBF_S / self.hosts + self.observed_s) / (1 + self.seen)

    @property
    def source(self) -> str:
        """Where the figure comes from, for people."""
        if self.given_s:
            return "given"
        what = f"{self.hosts} host{'s' if self.hosts > 1 else ''} at one per {units.duration(HOST_MTBF_S)} each"
        return f"{what}, {self.seen} seen in {units.duration(self.observed_s)}" if self.observed_s else what


@dataclass(frozen=True)
class Interval:
    """A chosen interval between durable checkpoints.

    Attributes:
        seconds: about how long the steps take.
        lost_share: of the time, that checkpoints, repeated steps and restarts are expected to take.
        explanation: one line for people.
    """

    steps: int
    seconds: float
    lost_share: float
    explanation: str


def young(stall_s: float, mtbf_s: float) -> float:
    """Young's optimum: seconds of training between two checkpoints."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's higher-order estimate (his equation 37): seconds of training between two checkpoints."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    share = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def lost_share(interval_s: float, costs: IntervalCosts, mtbf_s: float) -> float:
    """The share of the time that is expected to be lost with `interval_s` of training between two stalls (above)."""
    waiting, period = (costs.restart_s + costs.persist_s) / mtbf_s, (interval_s + costs.stall_s) / mtbf_s
    if waiting + period > 700:  # exp() would overflow
        return 1.0
    return 1 - interval_s / (mtbf_s * math.exp(waiting) * math.expm1(period))


def choose(config: CheckpointConfig, costs: IntervalCosts, failures: JobFailures) -> Interval:
    """The interval to use; `every_steps` and `every_s` of `config` are upper bounds where they are above 0."""
    step_s = max(costs.step_s, 1e-9)
    mtbf_s = failures.mtbf_s
    least = max(math.ceil(costs.persist_s / step_s / _ROUND), 1)
    steps, why = max(round(daly(costs.stall_s, mtbf_s) / step_s), 1), ""
    if steps < least:
        steps, why = least, "; a shorter one would lose less, but persisting takes as long"
    for name, most in (("every_steps", config.every_steps), ("every_s", int(config.every_s / step_s))):
        limit = getattr(config, name)
        if limit and max(most, 1) < steps:
            steps, why = max(most, 1), f"; no longer because of {name} = {limit:g}"
    if steps < least:
        why += ", though persisting takes longer"
    seconds = steps * step_s
    lost = lost_share(seconds, costs, mtbf_s)
    every = "step" if steps == 1 else f"{steps:,} steps"
    explanation = (
        f"every {every} ({units.duration(seconds)}): stall {units.duration(costs.stall_s)}, persisting "
        f"{units.duration(costs.persist_s)}, one failure per {units.duration(mtbf_s)} ({failures.source}); "
        f"{lost:.2%} of the time is expected to be lost{why}"
    )
    return Interval(steps, seconds, lost, explanation)


FIRST_S = 60.0
"""The first checkpoint is taken after about this long, so that its costs are known."""

_WINDOW = 15  # measurements of a kind that count: the last ones, by their median
_DEAD_BAND = 1.25  # a wish for a change by less than this factor is no reason to change
_AT_MOST = 2.0  # factor by which the interval changes at a time


def adapted(now_steps: int, wanted_steps: int) -> int:
    """The interval after `now_steps` where `wanted_steps` would be best: not at every whim, and not at once."""
    low, high = now_steps / _AT_MOST, now_steps * _AT_MOST
    if max(wanted_steps / now_steps, now_steps / wanted_steps) < _DEAD_BAND:
        return now_steps
    return max(math.floor(min(max(wanted_steps, low), high)), 1)


class AutoInterval:
    """The interval in force. Its steps change only when a checkpoint has become durable.

    Args:
        config: `auto`, its bounds, `mtbf_hours` and `restart_s`.
        state: from `to_json` of an earlier attempt; None: there was none.
        failed: whether that attempt ended by a failure; False after a clean stop.
    """

    def __init__(
        self, config: CheckpointConfig, hosts: int = 1, state: dict[str, Any] | None = None, *, failed: bool = False
    ) -> None:
        state = state or {}
        self._config, self._hosts = config, hosts
        self._seen = int(state.get("failures", 0)) + failed
        self._observed_s = float(state.get("observed_s", 0.0))
        self._times: dict[str, deque[float]] = {
            name: deque(state.get(name, []), _WINDOW) for name in ("step_s", "stall_s", "persist_s")
        }
        self._chosen: Interval | None = None
        self._steps = 0
        self._update()

    @property
    def steps(self) -> int:
        """The interval in force, steps; 0 until a step was measured, and without ``auto``."""
        if not self._config.auto or not self._times["step_s"]:
            return 0
        return self._steps or max(math.ceil(FIRST_S / self._costs().step_s), 1)

    @property
    def explanation(self) -> str:
        """One line about it for people; empty without ``auto``."""
        if self.steps == 0:
            return ""
        if self._chosen is None:
            first = f"{self.steps:,} step{'s' if self.steps > 1 else ''}"
            return f"the first after {first} (about {units.duration(FIRST_S)}), to measure what one costs"
        if self._chosen.steps == self._steps:
            return self._chosen.explanation
        near = adapted(self._steps, self._chosen.steps) == self._steps
        return f"every {self._steps:,} steps, {'near' if near else 'on the way to'} {self._chosen.explanation}"

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable: the longest of the last; 0: unknown."""
        return max(self._times["stall_s"], default=0.0) + max(self._times["persist_s"], default=0.0)

    def note_step(self, seconds: float) -> None:
        """A step without a checkpoint took so long."""
        self._times["step_s"].append(seconds)
        self._observed_s += seconds

    def note_stall(self, seconds: float) -> None:
        """A snapshot made its step and the next one so much longer."""
        self._times["stall_s"].append(max(seconds, 0.0))

    def note_durable(self, persist_s: float) -> None:
        """A checkpoint has become durable so long after its snapshot."""
        self._times["persist_s"].append(persist_s)
        self._update()

    def to_json(self) -> dict[str, Any]:
        """What the next attempt should know."""
        return {"failures": self._seen, "observed_s": self._observed_s} | {n: list(v) for n, v in self._times.items()}

    def _costs(self) -> IntervalCosts:
        found = {name: median(times) for name, times in self._times.items() if times}
        return IntervalCosts(**{"stall_s": 0.0, "persist_s": 0.0, "restart_s": self._config.restart_s} | found)

    def _update(self) -> None:
        if not all(self._times[name] for name in ("step_s", "stall_s", "persist_s")):
            return
        failures = JobFailures(self._hosts, self._seen, self._observed_s, self._config.mtbf_hours * 3600)
        self._chosen = choose(self._config, self._costs(), failures)
        self._steps = adapted(self._steps, self._chosen.steps) if self._steps else self._chosen.steps
