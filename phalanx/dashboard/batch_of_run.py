"""The text that a run read in one step: which samples those were, by its figures or settings, and what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.metric_columns import Block
from phalanx.dashboard.remembered import Remembered
from phalanx.data.batch_text import SampleText, batch_text, open_near
from phalanx.data.config import DataConfig
from phalanx.detect.drift.batch_of_step import data_folders, samples_of_step
from phalanx.telemetry.run_list import read_config

MOST_SHOWN = 8
"""Samples of a batch that are shown together."""
_MOST_CHARACTERS = 200_000


@dataclass(frozen=True)
class BatchText:
    """Some samples of the batch of a step.

    Attributes:
        start, count: samples of the whole batch, in the order of the run.
        figures: of the step, by name.
        is_cut: the samples are long: of some the end is left out.
    """

    step: int
    start: int
    count: int
    samples: tuple[SampleText, ...]
    figures: Mapping[str, float]
    is_cut: bool


def text_of_step(run: Run, block: Block | None, step: int, first: int, remembered: Remembered) -> BatchText:
    """The samples from number `first` of the batch that `step`, from 1, read.

    Args:
        block: figures of the run; None: they are not known, and its settings say how large batches are.
        remembered: keeps the corpus open for the next step that is looked at.

    Raises:
        UserError: the run has no settings, its prepared tokens are not there, or it never reads so far.
    """
    if run.folder is None:
        raise UserError("its run folder is not here", cure="open the dashboard where the folder can be read")
    settings = read_config(run.folder)
    try:
        config = DataConfig.model_validate(settings["data"])
        start, count = _samples_of(settings, config, block, step)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        cure = "use the version of phalanx that trained it"
        raise UserError(f"its settings do not say what it reads ({error})", cure=cure, value=run.name) from None
    if count < 1:
        raise UserError("the run has not come so far", cure="choose an earlier step", value=step)
    folders = data_folders(run.folder)
    key = ("prepared", str(run.folder), (run.folder / "config.json").stat().st_mtime_ns)
    prepared = remembered.get(key, lambda: open_near(config, folders))
    shown = max(0, min(MOST_SHOWN, count - first))
    samples = batch_text(prepared, config, start + first, shown) if shown else []
    kept, is_cut = _cut(samples)
    return BatchText(step, start, count, kept, _figures(block, step), is_cut)


def _samples_of(settings: Mapping[str, Any], config: DataConfig, block: Block | None, step: int) -> tuple[int, int]:
    """The first sample of a step, and how many it has: as its figures count tokens, else as its settings say."""
    before = after = math.nan
    if block is not None and "tokens" in block.steps.column_names:
        steps = block.steps["step"].to_numpy()
        place = int(np.searchsorted(steps, step))
        is_known = place < len(steps) and steps[place] == step
        if is_known and (step == 1 or (place and steps[place - 1] == step - 1)):
            tokens = block.steps["tokens"].to_numpy(zero_copy_only=False)
            after, before = float(tokens[place]), float(tokens[place - 1]) if step > 1 else 0.0
    return samples_of_step(settings, config.sequence_length, step, before, after)


def _figures(block: Block | None, step: int) -> dict[str, float]:
    if block is None:
        return {}
    steps = block.steps["step"].to_numpy()
    place = int(np.searchsorted(steps, step))
    if place == len(steps) or steps[place] != step:
        return {}
    row = block.steps.slice(place, 1).to_pylist()[0]
    return {name: row[name] for name in ("loss", "grad_norm", "lr", "skipped") if row.get(name) is not None}


def _cut(samples: list[SampleText]) -> tuple[tuple[SampleText, ...], bool]:
    """As many pieces as a page can take."""
    left, kept, is_cut = _MOST_CHARACTERS, [], False
    for sample in samples:
        pieces = []
        for piece in sample.pieces:
            if left <= 0:
                is_cut = True
                break
            left -= len(piece.text)
            pieces.append(piece)
        kept.append(SampleText(sample.number, sample.source, sample.begin_token, tuple(pieces)))
    return tuple(kept), is_cut
