"""What a run is expected to cost, as whoever starts it predicted it: a plain value, handed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PASSES = "passes"
WAITING = "waiting"
OPTIMIZER = "optimizer"
LOADER = "loader"
BETWEEN = "between_steps"
WORDS = {
    PASSES: "forward and backward passes",
    WAITING: "waiting for other ranks",
    OPTIMIZER: "optimizer",
    LOADER: "waiting for the loader",
    BETWEEN: "figures and signals between steps",
}
"""Parts of a step that training can tell apart; `WAITING` only where ranks wait in threads, as on a CPU."""


@dataclass(frozen=True)
class Expected:
    """A prediction of one step.

    Attributes:
        source: what predicted it, for people.
        step_s: time of a step.
        parts: seconds by name, as in `WORDS`; they sum to `step_s`.
        memory_bytes: on the first rank.
        layout: of the ranks, as `Layout` prints it.
        micro_batch: sequences per forward pass.
        interval_s: between which a step lies in 8 of 10 cases; None: not known.
        details: the whole prediction as JSON values, to be kept with the run.
    """

    source: str
    step_s: float
    parts: Mapping[str, float]
    memory_bytes: float
    layout: str
    micro_batch: int
    interval_s: tuple[float, float] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def misfit(self, layout: str, micro_batch: int) -> str:
        """What it was predicted for, where the run does something else; empty where it does that."""
        differing = [
            f"{name} {wanted} instead of {found}"
            for name, wanted, found in (("layout", self.layout, layout), ("micro-batch", self.micro_batch, micro_batch))
            if wanted != found
        ]
        return " and ".join(differing)
