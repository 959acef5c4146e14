"""What one layer keeps of one micro-batch on one rank, in bytes: a value that both programs' formulas give."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.types import Floats


@dataclass(frozen=True)
class Kept:
    """Bytes of one layer and one micro-batch.

    Attributes:
        whole: where nothing is computed again.
        chosen: under the job's kind of recompute.
        waiting: what weight gradients need that are put off, of a schedule that splits backward passes.
        masks: kept once for all layers of a stage that see as many keys.
        leaving: of `chosen`, what can wait on the host.
        passing: what its backward pass needs besides for a moment: gradients of the widest activations.
    """

    whole: Floats
    chosen: Floats
    waiting: Floats
    masks: Floats
    passing: Floats
    leaving: Floats = 0.0

    @property
    def again(self) -> Floats:
        """What is there for a moment, while the layer's backward pass runs, because it was computed again."""
        return self.whole - self.chosen
