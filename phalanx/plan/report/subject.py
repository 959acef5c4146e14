"""What is reported: a prediction and what a reader wants to see it against."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.jobs import settings_of
from phalanx.plan.types import Prediction, RankMemory, Strategy


@dataclass(frozen=True)
class Report:
    """A prediction, and what it is held against.

    Attributes:
        prediction: of one step.
        name: of the model, such as its config file's.
        parameters: of the whole model.
        device: name of the device.
        device_memory_bytes: memory of one device.
        total_tokens: of the whole run; 0: not known.
        usd_per_device_hour: price; None: not known.
        remarks: about the layout, such as why it was chosen.
        reliefs: where it does not fit, layouts on the same ranks that do, the fastest first.
    """

    prediction: Prediction
    name: str
    parameters: int
    device: str
    device_memory_bytes: float
    total_tokens: int = 0
    usd_per_device_hour: float | None = None
    remarks: tuple[str, ...] = ()
    reliefs: tuple[Prediction, ...] = ()

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank whose fullest rank holds most."""
        return max(self.prediction.memory, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank holds no more than its device has."""
        return self.fullest.total <= self.device_memory_bytes

    @property
    def run_s(self) -> float | None:
        """Time to train on all tokens without any failure, seconds."""
        return self.total_tokens / self.prediction.tokens_per_s if self.total_tokens else None

    @property
    def device_hours(self) -> float | None:
        """Hours of that, of all devices together."""
        return None if self.run_s is None else self.run_s / 3600 * self.prediction.devices

    @property
    def cost_usd(self) -> float | None:
        """Price of that, US dollars."""
        if self.device_hours is None or self.usd_per_device_hour is None:
            return None
        return self.device_hours * self.usd_per_device_hour


def changed_settings(old: Strategy, new: Strategy) -> str:
    """What to give on the command line to come from one layout to another on the same ranks."""
    before, after = settings_of(old), settings_of(new)
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if new.zero != old.zero:
        changed["parallel.zero"] = int(new.zero)
    return " ".join(f"{key}={value}" for key, value in changed.items())


MEMORY_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "workspace",
    "loss_head",
    "communication",
    "fragmentation",
)
"""Fields of `RankMemory` that add up to its total."""


def pipeline_ranks_shown(ranks: tuple[RankMemory, ...], most: int = 4) -> list[RankMemory]:
    """All pipeline ranks where they are few, else the first, the fullest, a middle one and the last."""
    if len(ranks) <= most:
        return list(ranks)
    fullest = max(range(len(ranks)), key=lambda place: ranks[place].total)
    return [ranks[place] for place in sorted({0, fullest, len(ranks) // 2, len(ranks) - 1})]
