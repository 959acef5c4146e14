"""Which samples a step of a run read, by its figures or its settings, and where they lie in the corpus."""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.core.errors import UserError
from phalanx.data.batch_text import SampleText, batch_text, open_near
from phalanx.data.config import DataConfig
from phalanx.data.samples import PackedSplit
from phalanx.optim.config import BatchWarmupConfig
from phalanx.optim.schedule import samples_before
from phalanx.telemetry.run_list import read_config


def samples_of_step(
    settings: Mapping[str, Any],
    sequence_length: int,
    step: int,
    tokens_before: float = math.nan,
    tokens_after: float = math.nan,
) -> tuple[int, int]:
    """The first sample of a step, counted from 1, in the order of the run, and how many it read.

    Args:
        tokens_before, tokens_after: read up to the step before, and to this one; NaN: not known, and the settings say
            how large batches are.

    Raises:
        KeyError, TypeError, ValueError, ValidationError: neither says.
    """
    if math.isfinite(tokens_before) and math.isfinite(tokens_after):
        start = round(tokens_before / sequence_length)
        return start, round(tokens_after / sequence_length) - start
    warmup = BatchWarmupConfig.model_validate(settings["optim"].get("batch_warmup", {}))
    full = int(settings["train"]["global_batch"])
    start = samples_before(warmup, step - 1, full)
    return start, samples_before(warmup, step, full) - start


def data_folders(run: Path) -> list[Path]:
    """Where relative paths of the run's config may be meant from: as it noted, from here, or above the run."""
    noted = []
    try:
        starts = json.loads((run / "environment.json").read_text())
        noted = [Path(start["directory"]) for start in reversed(starts) if "directory" in start]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return [*noted, Path.cwd(), *run.resolve().parents]


def data_config(settings: Mapping[str, Any], run: Path) -> DataConfig:
    """What a run reads, by its settings.

    Raises:
        UserError: they do not say.
    """
    try:
        return DataConfig.model_validate(settings["data"])
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        problem = f"its settings do not say what it reads ({str(error).splitlines()[0]})"
        raise UserError(problem, cure="use the version of phalanx that trained it", value=str(run)) from None


def places_of(run: Path, start: int, count: int) -> list[tuple[str, int]]:
    """For each sample its source and its first token there.

    Raises:
        UserError: the run has no settings, or what it prepared is not there.
    """
    config = data_config(read_config(run), run)
    packed = PackedSplit(open_near(config, data_folders(run)).split("train"), config)
    return [(reader.name, begin) for reader, begin in packed.places(start, count)]


def text_of_samples(run: Path, start: int, count: int) -> list[SampleText]:
    """Their text.

    Raises:
        UserError: as `places_of`.
    """
    config = data_config(read_config(run), run)
    return batch_text(open_near(config, data_folders(run)), config, start, count)


def odd_first(samples: Sequence[SampleText]) -> list[tuple[SampleText, float]]:
    """Samples with the share of its bytes to which each text compresses, those first that are farthest from the median:
    what repeats itself, or is noise, is often what a loss stumbles over."""
    texts = ["".join(piece.text for piece in one.pieces).encode() for one in samples]
    # One stream each, so that samples do not help each other; short texts have the same overhead.
    shares = [len(zlib.compress(text)) / max(len(text), 1) for text in texts]
    usual = statistics.median(shares) if shares else 1.0
    both = list(zip(samples, shares, strict=True))
    return sorted(both, key=lambda one: -abs(math.log(max(one[1], 1e-6) / max(usual, 1e-6))))
