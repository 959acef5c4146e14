"""What a step is predicted to cost: a plain value, passed in by the command that starts the run."""

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
"""Parts of a step that training can time; `WAITING` only where ranks wait in threads, as on a CPU."""


@dataclass(frozen=True)
class Expected:
    """A prediction of one step."""

    source: str  # what predicted it, for people
    step_s: float  # time of a step
    parts: Mapping[str, float]  # seconds by name, as in `WORDS`; they sum to `step_s`
    memory_bytes: float  # on the first rank
    layout: str  # of the ranks, as `Layout` prints it
    micro_batch: int  # sequences per forward pass
    interval_s: tuple[float, float] | None = None  # in which a step lies in 8 of 10 cases; None: not known
    # the whole prediction as JSON values, to be kept with the run
    details: Mapping[str, Any] = field(default_factory=dict)

    def misfit(self, layout: str, micro_batch: int) -> str:
        """What it was predicted for, where the run does something else; empty where it does that."""
        differing = [
            f"{name} {wanted} instead of {found}"
            for name, wanted, found in (("layout", self.layout, layout), ("micro-batch", self.micro_batch, micro_batch))
            if wanted != found
        ]
        return " and ".join(differing)
