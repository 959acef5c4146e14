"""The loss and the gradient's norm of a run, step by step, with what explains their shape: what `loss_judge` judges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.detect.drift.batch_of_step import samples_of_step
from phalanx.detect.drift.metrics_entries import figure, number_of, read_entries
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.run_list import read_config

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LossCurve:
    """Figures of steps in rising order; all arrays are as long as `step`.

    Attributes:
        run: its folder, for commands.
        loss: nats per token; not finite where it was not.
        grad_norm, lr: NaN: not written down.
        is_skipped: the update was left out.
        tokens: read up to a step, with it; NaN: not known.
        end_unix_s: when it ended; NaN: not known.
        starts: steps after which the run was started (again).
        sequence_length: tokens of a sample; 0: not known.
        settings: of the run; empty: there are none.
        clip_norm: gradients of a larger norm are scaled down to it; 0: not known.
        without_loss: steps that are left out, since they have no loss, or one that is no number.
    """

    run: str
    step: np.ndarray
    loss: Floats
    grad_norm: Floats
    lr: Floats
    is_skipped: np.ndarray
    tokens: Floats
    end_unix_s: Floats
    starts: tuple[int, ...] = ()
    sequence_length: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    clip_norm: float = 0.0
    without_loss: int = 0

    def __len__(self) -> int:
        return len(self.step)

    @property
    def warm_up_end(self) -> int:
        """The last place at which the learning rate still rises towards its first peak; 0: it does not begin low."""
        known = np.isfinite(self.lr)
        if known.sum() < 2:
            return 0
        lr = np.where(known, self.lr, 0.0)
        falls = np.flatnonzero(np.diff(lr) <= 0)
        return int(falls[0]) if len(falls) else len(lr) - 1

    def samples(self, place: int) -> tuple[int, int] | None:
        """First sample and number of samples of the batch at a place; None: not known."""
        if not self.sequence_length:
            return None
        step = int(self.step[place])
        is_next = place > 0 and self.step[place - 1] == step - 1
        before = 0.0 if step == 1 else float(self.tokens[place - 1]) if is_next else math.nan
        try:
            start, count = samples_of_step(self.settings, self.sequence_length, step, before, float(self.tokens[place]))
        except (KeyError, TypeError, ValueError):
            return None
        return (start, count) if count > 0 else None


def read_curve(run: Path) -> LossCurve:
    """The curve in a run's ``metrics.jsonl``.

    Raises:
        UserError: there is none, or no step in it has a loss.
    """
    rows: dict[int, Mapping[str, Any]] = {}
    starts: set[int] = set()
    without: set[int] = set()
    try:
        for entry in read_entries(run):
            is_number = number_of(entry, "loss") is not None and not isinstance(entry.get("loss"), bool)
            if entry["kind"] == "step" and is_number:
                rows[entry["step"]] = entry
            elif entry["kind"] == "step":
                without.add(entry["step"])
            elif entry["kind"] == "start":
                starts.add(entry["step"])
    except FileNotFoundError as error:
        cure = "give the folder of a run; `phalanx runs import` makes one of other people's figures"
        raise UserError(f"its metrics.jsonl cannot be read ({error.strerror})", cure=cure, value=str(run)) from None
    if not rows:
        cure = "write numbers as loss (NaN too)" if without else "let it train for some steps"
        raise UserError("no step has a loss that is a number", cure=cure, value=str(run / "metrics.jsonl"))
    steps = sorted(rows)
    columns = {
        name: np.array([figure(rows[step], name) for step in steps])
        for name in ("loss", "grad_norm", "lr", "skipped", "tokens")
    }
    settings = _settings(run)
    data, optim = settings.get("data"), settings.get("optim")
    return LossCurve(
        str(run),
        np.array(steps, np.int64),
        columns["loss"],
        columns["grad_norm"],
        columns["lr"],
        columns["skipped"] > 0,
        columns["tokens"],
        end_times(run, steps),
        tuple(sorted(starts)),
        _whole(data.get("sequence_length")) if isinstance(data, dict) else 0,
        settings,
        float(optim.get("clip_norm") or 0) if isinstance(optim, dict) else 0.0,
        len(without - rows.keys()),
    )


def end_times(run: Path, steps: list[int]) -> Floats:
    """When each step ended, as spans say; NaN: not known."""
    ends = np.full(len(steps), math.nan)
    try:
        rows = Trace.open(run).ask("select step, max(end_ns) as end_ns from steps group by step order by step")
    except UserError:
        return ends
    _, here, there = np.intersect1d(np.array(steps), rows["step"].to_numpy(), return_indices=True)
    ends[here] = rows["end_ns"].to_numpy()[there] / 1e9
    return ends


def _settings(run: Path) -> Mapping[str, Any]:
    try:
        return read_config(run)
    except UserError:
        return {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
