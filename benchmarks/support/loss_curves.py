"""Curves of losses and gradient norms of which everything is known: healthy shapes, and what goes wrong in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.detect.drift.loss_curve import LossCurve
from phalanx.telemetry.loggers import metrics_line

SAMPLES, LENGTH = 8, 512
Tail = Literal["normal", "skewed", "heavy"]
Trouble = Literal["bad batch", "bad update", "divergence", "slow divergence", "not finite", "odd gradient"]


@dataclass(frozen=True)
class HealthyCurve:
    """A loss that falls steeply, then slowly; a norm that is large at first; a rate that warms up and decays.

    Attributes:
        noise: standard deviation of the loss from batch to batch, nats.
        bump: the loss rises by so many nats while the rate warms up.
        norm_noise: of the logarithm of the gradient's norm.
    """

    steps: int = 1000
    noise: float = 0.02
    tail: Tail = "normal"
    warm_up: int = 100
    bump: float = 0.0
    norm_noise: float = 0.12
    seed: int = 0

    def curve(self) -> LossCurve:
        """The curve of a run named ``run``."""
        random = np.random.default_rng(self.seed)
        place = np.arange(self.steps)
        fast, floor = random.uniform(20, 80), random.uniform(2, 3.5)
        path = floor + 6 * np.exp(-place / fast) + 1.5 / np.sqrt(1 + place / 50)
        path += self.bump * np.exp(-(((place - self.warm_up / 2) / max(self.warm_up / 6, 3)) ** 2))
        draws = {
            "normal": lambda: random.normal(0, 1, self.steps),
            "skewed": lambda: (random.gumbel(0, 1, self.steps) - 0.577) / 1.28,
            "heavy": lambda: random.standard_t(5, self.steps) / 1.29,
        }
        # Norms are log-normal, with heavier tails where losses have them.
        spread = random.standard_t(8, self.steps) / 1.15 if self.tail == "heavy" else random.normal(0, 1, self.steps)
        loss = path + self.noise * draws[self.tail]()
        norms = 2.5 * np.exp(-place / 20) + 0.5 * np.sin(place / 300) + self.norm_noise * spread
        rate = np.minimum((place + 1) / max(self.warm_up, 1), 1.0)
        rate *= 0.55 + 0.45 * np.cos(np.pi * np.clip((place - self.warm_up) / self.steps, 0, 1))
        return LossCurve(
            "run",
            place + 1,
            loss,
            np.exp(norms),
            1e-3 * rate,
            np.zeros(self.steps, bool),
            (place + 1.0) * SAMPLES * LENGTH,
            np.full(self.steps, np.nan),
            (0,),
            LENGTH,
            {},
        )


def with_trouble(curve: LossCurve, trouble: Trouble, step: int, size: float) -> LossCurve:
    """The same curve with something wrong that the batch of `step` did, of `size` nats."""
    loss, norms, place = curve.loss.copy(), curve.grad_norm.copy(), step - 1
    rest = np.arange(len(curve) - place)
    if trouble == "bad batch":
        loss[place] += size
        norms[place] *= 1 + 4 * size
    elif trouble == "bad update":  # the loss of the next steps shows it
        norms[place] *= 1 + 6 * size
        loss[place + 1 :] += size * np.exp(-rest[:-1] / 5)
    elif trouble == "divergence":
        norms[place] *= 1 + 6 * size
        loss[place + 1 :] += size * np.minimum(rest[1:] / 5, 1)
        norms[place + 1 :] *= 2
    elif trouble == "slow divergence":
        loss[place:] += size * np.minimum(rest / 150, 1)
        norms[place:] *= 1 + np.minimum(rest / 150, 1)
    elif trouble == "odd gradient":
        norms[place] *= 1 + 10 * size
    else:
        loss[place:], norms[place:] = np.nan, np.nan
    return replace(curve, loss=loss, grad_norm=norms)


def write_curve(curve: LossCurve, folder: Path) -> Path:
    """A run folder with its figures as training writes them, and the settings that say how long samples are."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [metrics_line("start", 0, {})]
    for place, step in enumerate(curve.step.tolist()):
        values: dict[str, float | int | str] = {
            "loss": float(curve.loss[place]),
            "lr": float(curve.lr[place]),
            "grad_norm": float(curve.grad_norm[place]),
            "skipped": int(curve.is_skipped[place]),
            "tokens": int(curve.tokens[place]),
        }
        lines.append(metrics_line("step", step, values))
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "config.json").write_text(json.dumps({"data": {"sequence_length": curve.sequence_length}}))
    return folder
