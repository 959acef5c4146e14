"""Where a run stands: a small value that is saved with every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: finished optimizer steps, skipped updates included.
        samples: sequences read; also the loader's state, since the order of samples is a function of the seed.
        tokens: tokens read.
        train_s: wall time spent training, over all starts.
        micro_batch: sequences per forward and backward pass, kept so that a resumed run repeats the same arithmetic.
        attention_kernel: of plain causal attention on a GPU, kept for the same reason; empty where none was chosen.
        evaluated: last step after which held-out text was looked at; a clean stop leaves that to the next start.
        evaluated_tokens: how much of it was asked for then, as `evaluate.tokens` or `evaluate.final_tokens` says it.
        metrics: held-out figures of then, such as ``{"validation_loss": 3.1}``.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    train_s: float = 0.0
    micro_batch: int = 0
    attention_kernel: str = ""
    evaluated: int = 0
    evaluated_tokens: int = -1
    metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, samples: int, length: int) -> None:
        """Count a finished step that read `samples` sequences of `length` tokens."""
        self.step += 1
        self.samples += samples
        self.tokens += samples * length

    @property
    def metrics_here(self) -> dict[str, float]:
        """Held-out figures of this very step; none where it was not evaluated."""
        return self.metrics if self.evaluated == self.step else {}

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """The counters of a checkpoint; names this version does not know are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known})
