"""Settings of switches and adapters that decide how queues build up and are taken down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from phalanx.core.errors import UserError

Control = Literal["dcqcn", "swift", "mixed", "none"]
"""How senders find their rate: by marks (DCQCN), by delay (Swift), by both, whichever is slower (as MegaScale 3.6
describes theirs), or not at all, so that only pauses (PFC) hold them back."""


def check_control(name: str) -> None:
    """Refuse what is no way of congestion control.

    Raises:
        UserError: it is none.
    """
    if name not in get_args(Control):
        cure = f"write one of {', '.join(get_args(Control))}"
        raise UserError("is no congestion control known here", cure=cure, field="congestion", value=name)


@dataclass(frozen=True)
class Ecn:
    """Marks by queue length: none up to `low_s`, `mark_ratio` at `high_s`, all above; lengths as time to drain."""

    low_s: float = 32e-6
    high_s: float = 128e-6
    mark_ratio: float = 0.2


@dataclass(frozen=True)
class Pfc:
    """Pauses: a port is told to stop when what came from it takes up too much of the buffer.

    Attributes:
        threshold_ratio: of what is free of the buffer.
        resume_ratio: of that threshold, below which it may go on.
    """

    buffer_bytes: float = 113e6
    threshold_ratio: float = 0.11
    resume_ratio: float = 0.9


@dataclass(frozen=True)
class Dcqcn:
    """Zhu et al., SIGCOMM 2015.

    Attributes:
        gain: of the running mean of marks, g.
        notification_s: a receiver notifies at most once in this time, τ.
        alpha_timer_s: after which the mean is brought up to date, τ'.
        increase_timer_s: T. increase_counter_bytes: B.
        fast_recovery: increases half-way back to the old rate before it grows, F.
        increase_ratio: additive increase R_AI, of the adapter's rate.
    """

    gain: float = 1 / 256
    notification_s: float = 50e-6
    alpha_timer_s: float = 55e-6
    increase_timer_s: float = 55e-6
    increase_counter_bytes: float = 10e6
    fast_recovery: float = 5
    increase_ratio: float = 0.001


@dataclass(frozen=True)
class Swift:
    """Kumar et al., SIGCOMM 2020; windows in packets.

    Attributes:
        base_target_s: delay that is aimed at, and `hop_target_s` for each switch.
        increase: packets for each round trip, ai.
        decrease_ratio: β. largest_decrease_ratio: max_mdf.
        flow_range_s: how much more delay is allowed to a window of `flow_low`; none from `flow_high`.
    """

    base_target_s: float = 20e-6
    hop_target_s: float = 3.05e-6
    increase: float = 1.0
    decrease_ratio: float = 0.8
    largest_decrease_ratio: float = 0.5
    flow_range_s: float = 100e-6
    flow_low: float = 0.1
    flow_high: float = 100.0

    @property
    def flow_slope_s(self) -> float:
        """α: delay allowed on top is ``α/√window`` less what `flow_high` would have."""
        return float(self.flow_range_s / (self.flow_low**-0.5 - self.flow_high**-0.5))


@dataclass(frozen=True)
class Settings:
    """All of it, for one fabric.

    Attributes:
        round_trip_s: without queues.
        switches: on the longest way.
        mtu_bytes: payload of a packet.
    """

    round_trip_s: float = 12e-6
    switches: int = 5
    mtu_bytes: float = 4096
    ecn: Ecn = field(default_factory=Ecn)
    pfc: Pfc = field(default_factory=Pfc)
    dcqcn: Dcqcn = field(default_factory=Dcqcn)
    swift: Swift = field(default_factory=Swift)
