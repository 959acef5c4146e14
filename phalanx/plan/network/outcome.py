"""What a simulation found, as values for tables, figures and programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.plan.network.flaps import shortest_timeout
from phalanx.plan.network.scenario import Scenario

CAUSES = ("oversubscription", "hashing", "placement", "congestion", "flap")
"""What takes time, in the order in which it is added to an ideal network; each is what the step loses on top."""


@dataclass(frozen=True)
class PhaseOutcome:
    """A phase of the step, as means over all draws of the hashes.

    Attributes:
        ideal_s: on an ideal network. now_s: in this scenario.
        exposed_s: what the step waits for, of `now_s`; `ideal_exposed_s`: of `ideal_s`.
        hottest: the link that decides, in words; `overload`: what is asked of it over what it carries.
        paths: connections on it.
        efficiency: what congestion control makes of fair rates. queue_s: mean wait there.
        paused_ratio: of the time of the phase in which ports before it stood still (PFC).
        bystander: rate of flows that share only a port with it, over their fair rate.
    """

    name: str
    ideal_s: float
    now_s: float
    ideal_exposed_s: float
    exposed_s: float
    hottest: str
    overload: float
    paths: float
    efficiency: float
    queue_s: float
    paused_ratio: float
    bystander: float


@dataclass(frozen=True)
class Outcome:
    """A scenario's step.

    Attributes:
        step_s: mean over all draws; without the flap, where that ends the job.
        low_s, high_s: of nine draws in ten.
        lost_s: by cause; they add up to what the step is longer than on an ideal network.
        ends_job: whether the flap outlasts all retries.
    """

    scenario: Scenario
    step_s: float
    low_s: float
    high_s: float
    lost_s: Mapping[str, float]
    phases: tuple[PhaseOutcome, ...]
    ends_job: bool

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
        return _REASONS[cause](self)


def _hottest(outcome: Outcome) -> PhaseOutcome:
    return max(outcome.phases, key=lambda phase: phase.exposed_s - phase.ideal_exposed_s)


def _because_of_links(outcome: Outcome) -> str:
    phase = _hottest(outcome)
    stretch = phase.now_s / phase.ideal_s if phase.ideal_s else 1.0
    return f"{phase.name} {stretch:.2f} x as long: {phase.paths:.0f} connections on one link, {phase.hottest}"


def _because_of_control(outcome: Outcome) -> str:
    phase = _hottest(outcome)
    lost = f"{phase.name}: {1 - phase.efficiency:.1%} below fair rates".replace("%", " %")
    return f"{lost}, {phase.queue_s * 1e6:.0f} µs in queues, ports paused {phase.paused_ratio:.1%}".replace("%", " %")


def _because_of_flap(outcome: Outcome) -> str:
    scenario = outcome.scenario
    which = "NIC" if scenario.flap_link == "nic" else "uplink"
    return f"{which} silent for {outcome.lost_s['flap']:.2f} s, until a retransmission finds the link up"


_REASONS = {"links": _because_of_links, "congestion": _because_of_control, "flap": _because_of_flap}


@dataclass(frozen=True)
class Conflicts:
    """How hashes collide where all NICs of a ToR send up, and what each flow of the busiest phase gets.

    Attributes:
        flows: that choose at a ToR; `links`: that they choose from; `speedup`: full flows that a link carries.
        expected_share: of its rate that a flow gets at its ToR; `free_probability`: that it gets all (closed forms).
        expected_fullest: connections on a ToR's fullest uplink.
        shares: of max-min fair rates of all flows over that of a NIC: mean, lowest, 1st and 50th percentile.
    """

    phase: str
    flows: int
    links: int
    speedup: float
    expected_share: float
    free_probability: float
    expected_fullest: float
    shares: Mapping[str, float]


@dataclass(frozen=True)
class QueueCurve:
    """The queue at a link with so many connections, as time to drain, after all their senders started at once."""

    control: str
    connections: int
    time_s: tuple[float, ...]
    queue_s: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """All that was asked.

    Attributes:
        ideal_step_s: on a network in which nothing is in the way.
        draws: of hashes and places, each one a job.
        conflicts: of the first scenario; None where nothing is hashed.
        queues: at the hottest link of all scenarios, by kind of congestion control, where that was asked for; none
            where no link is hot.
        notes: what a reader should know.
    """

    cluster: str
    devices: int
    devices_per_host: int
    traffic_source: str
    ideal_step_s: float
    outcomes: tuple[Outcome, ...]
    conflicts: Conflicts | None
    queues: tuple[QueueCurve, ...]
    draws: int
    wall_s: float
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; what never ends is None."""
        tree: dict[str, Any] = _plain(dataclasses.asdict(self))
        for entry, outcome in zip(tree["outcomes"], self.outcomes, strict=True):
            entry["why"] = outcome.why
        return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
