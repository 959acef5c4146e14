"""Which documents are held out: a rule that knows nothing but their names."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.order import derive_key
from phalanx.data.sources.files import Part, Split


@dataclass(frozen=True)
class Rule:
    """Which split a document belongs to: held out with probability `held_out`, by a keyed hash of its name."""

    held_out: float
    seed: int

    def split(self, name: str, part: Part) -> Split:
        """The split of the document called `name` (unless its whole part belongs to one)."""
        if part.split is not None:
            return part.split
        return "validation" if derive_key("held out", self.seed, name) < self.held_out * 2**64 else "train"
