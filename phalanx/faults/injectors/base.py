"""What an injector is given, and how it refuses. Torch-free.

An injector is ``(order, surroundings) → act``: it prepares all that is needed, and returns a Python function without
arguments that does it. The act calls no further functions of this package: its own frame is disguised, theirs are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.faults.agenda import Order

Act = Callable[[], None]


class RefusedError(Exception):
    """It cannot, or must not, be done here; the text is the reason, for the records."""


@dataclass
class Surroundings:
    """Of the process.

    Attributes:
        step: says how many optimizer steps are done.
        optimizer: the first one of torch that has made a step.
        each_step: called after every further step.
        kept: what must not be collected.
    """

    rank: int
    seed: int
    step: Callable[[], int]
    optimizer: Any = None
    each_step: list[Act] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


Injector = Callable[[Order, Surroundings], Act]
