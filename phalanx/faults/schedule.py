"""Whether an order is due: pure, without a clock of its own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.faults.agenda import Order
from phalanx.faults.kinds import KINDS


@dataclass(frozen=True)
class Begun:
    """When an incident began in this process: after how many steps, and at what time of the process's clock."""

    step: int
    at_s: float


def is_due(order: Order, step: int, begun: Begun | None, now_s: float) -> bool:
    """Whether it happens now, right after `step` optimizer steps.

    Args:
        begun: when it began in this process; None: it has not.
        now_s: of the clock that `begun` was read from.
    """
    if order.phase != "step":
        return False
    if begun is None:
        return step == order.step or (step > order.step and _may_begin_late(order, step))
    return KINDS[order.kind].repeats and still_lasts(order, step, begun, now_s)


def still_lasts(order: Order, step: int, begun: Begun, now_s: float) -> bool:
    """Whether what began then goes on right after `step` optimizer steps."""
    if order.unit == "forever":
        return True
    if order.unit == "seconds":
        return now_s - begun.at_s < order.amount
    return step - begun.step < order.amount


def _may_begin_late(order: Order, step: int) -> bool:
    """A later attempt may begin beyond the step: what stays with a host, or lasts longer, is then there already."""
    if order.retrigger == "host":
        return True
    if not KINDS[order.kind].repeats:
        return False
    return order.unit in ("forever", "seconds") or step < order.step + order.amount
