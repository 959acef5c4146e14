"""Time on links that computing covers, and time that it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.plan.work.operations import Passes


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
