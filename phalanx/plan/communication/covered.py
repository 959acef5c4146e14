"""Time on links that computing covers, and time that it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.plan.hardware.either import functions
from phalanx.plan.types import Floats
from phalanx.plan.work.operations import Passes

OVERLAP_SLOWDOWN = 0.1
"""Assumed share by which computing slows down beside a collective, which takes about a tenth of a device's cores
(NCCL's 8 to 16 channels of 108 to 132 multiprocessors)."""


@dataclass(frozen=True)
class Covered:
    """Seconds of the passes over one micro-batch in which ranks exchange something.

    Attributes:
        exposed: the rank computes nothing meanwhile.
        hidden: it computes beside.
        collectives: that the host starts, by pass.
    """

    exposed: Passes = field(default_factory=Passes)
    hidden: Passes = field(default_factory=Passes)
    collectives: Passes = field(default_factory=Passes)


def beside(exchange_s: Floats, computing_s: Floats) -> Floats:
    """Exposed seconds of an exchange beside computing, which it slows down."""
    f = functions(exchange_s, computing_s)
    return f.largest(exchange_s - computing_s, 0.0) + OVERLAP_SLOWDOWN * f.least(exchange_s, computing_s)
