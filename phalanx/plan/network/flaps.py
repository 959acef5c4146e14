"""A link that goes down for a moment: what the adapters' retransmission timers make of it.

A reliable connection sends again when no acknowledgement has come for ``4.096 µs · 2^timeout`` and gives up after
`retries` of that: the collective fails and with it the job (InfiniBand specification, volume 1, 12.7.34 and 12.7.38, as
NCCL's documentation of NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT names it). What matters is not only whether the connection
outlives the flap: with a long timer the link is up again long before anything is sent over it. Adaptive retransmission
begins with a short timer and doubles it up to the configured one, within the same time in all (NVIDIA, Adaptive
Retransmission: Parameters Control).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.errors import UserError

_UNIT_S = 4.096e-6


@dataclass(frozen=True)
class Retransmit:
    """How adapters send again.

    Attributes:
        timeout_exponent: the timer is 4.096 µs times 2 to the power of it (NCCL_IB_TIMEOUT), 1 to 31.
        retries: NCCL_IB_RETRY_CNT, 1 to 7.
        adaptive: begin with `adaptive_first_s` and double it.
    """

    timeout_exponent: int = 20
    retries: int = 7
    adaptive: bool = False
    adaptive_first_s: float = 0.1

    def __post_init__(self) -> None:
        for name, least, most in (("timeout_exponent", 1, 31), ("retries", 1, 7)):
            value = getattr(self, name)
            if value != int(value) or not least <= value <= most:
                cure = f"write a whole number from {least} to {most}"
                raise UserError("is out of what adapters take", cure=cure, field=name, value=value)
        if not 4e-6 <= self.adaptive_first_s <= 1e4:
            cure = "write seconds, at least 4e-6, the shortest timer of adapters"
            raise UserError("is no timer", cure=cure, field="adaptive_first_s", value=self.adaptive_first_s)

    @property
    def timer_s(self) -> float:
        """Time without acknowledgement after which a message is sent again."""
        return float(_UNIT_S * 2**self.timeout_exponent)

    @property
    def patience_s(self) -> float:
        """The longest flap that a connection outlives: its last retry still arrives."""
        return self.retries * self.timer_s

    def tries_s(self) -> list[float]:
        """When messages are sent again, seconds after they were lost."""
        if not self.adaptive:
            return [number * self.timer_s for number in range(1, self.retries + 1)]
        tries, wait_s = [], min(self.adaptive_first_s, self.timer_s)
        at_s = wait_s
        while at_s < self.patience_s:
            tries.append(at_s)
            wait_s = min(2 * wait_s, self.timer_s)
            at_s += wait_s
        return [*tries, self.patience_s]

    def stall_s(self, flap_s: float) -> float:
        """How long a connection stands still whose message is lost as the link goes down; infinite if it gives up.

        Raises:
            UserError: `flap_s` is no time.
        """
        if not 0 <= flap_s < 1e7:
            raise UserError("is no time that a link is down", cure="write seconds", field="flap_s", value=flap_s)
        if flap_s == 0:
            return 0.0
        return next((at_s for at_s in self.tries_s() if at_s >= flap_s), math.inf)


def shortest_timeout(flap_s: float, retries: int) -> int | None:
    """The least timeout exponent whose connections outlive a flap; None: no adapter waits that long."""
    return next((number for number in range(1, 32) if Retransmit(number, retries).patience_s >= flap_s), None)
