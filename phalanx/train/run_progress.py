"""How far a run is, in counters that checkpoints hold, and what it came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.train.evaluation import Evaluation


@dataclass
class RunProgress:
    """Counters of a run."""

    step: int = 0  # finished optimizer steps, skipped updates included
    samples: int = 0  # sequences read; also the loader's state, since the order of samples is a function of the seed
    tokens: int = 0  # tokens read
    untrained: int = 0  # of the steps those without a target, which changed nothing
    train_s: float = 0.0  # wall time spent training, over all starts
    # sequences per forward and backward pass, kept so that a resumed run repeats the same arithmetic
    micro_batch: int = 0
    # of plain causal attention on a GPU, kept for the same reason; empty where none was chosen
    attention_kernel: str = ""
    recompute: str = ""  # what the backward pass computes again; it changes no bit, and is kept beside the former
    evaluated: int = 0  # last step after which held-out text was evaluated; a clean stop leaves that to the next start
    evaluated_tokens: int = -1  # how much of it was asked for then, as `evaluate.tokens` or `evaluate.final_tokens`
    # held-out figures of then, such as ``{"validation_loss": 3.1}``
    metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, samples: int, length: int) -> None:
        """Count a finished step that read `samples` sequences of `length` tokens."""
        self.step += 1
        self.samples += samples
        self.tokens += samples * length

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunProgress:
        """The counters of a checkpoint; names this version does not know are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known})


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        steps: done in all, skipped updates included.
        tokens: read in all.
        loss: of the last step that this start made, nats; None: it made none, or one without targets.
        evaluation: on held-out text after the last step; None where the run was stopped or has no such text.
        folder: of the run.
        stopped_by: what ended it before all was done: the name of a signal, ``the end of its time`` or ``a callback``;
            empty: nothing.
    """

    steps: int
    tokens: int
    loss: float | None
    evaluation: Evaluation | None
    folder: Path
    stopped_by: str = ""
