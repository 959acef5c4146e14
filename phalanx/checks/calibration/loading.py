"""How long the next batch takes, from a token file that is written for it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare

_TOKENS = 1 << 20
_LENGTH = 512
_SAMPLES = 8


def numbers(quick: bool) -> Mapping[str, float]:
    """``loader_step_s``, the median time of a batch, and ``loader_tokens_per_s``."""
    with tempfile.TemporaryDirectory(prefix="phalanx-measure-") as folder:
        loader = _loader(Path(folder))
        times = []
        for turn in range(3 if quick else 15):
            began_s = time.perf_counter()
            loader.batch(turn * _SAMPLES, _SAMPLES)
            times.append(time.perf_counter() - began_s)
    step_s = statistics.median(times[1:])
    return {"loader_step_s": step_s, "loader_tokens_per_s": _SAMPLES * _LENGTH / step_s}


def _loader(folder: Path) -> Loader:
    tokens = np.random.default_rng(0).integers(0, 1000, _TOKENS).astype(np.uint16)
    path = folder / "train.bin"
    path.write_bytes(tokens.tobytes())
    config = DataConfig.model_validate(
        {
            "folder": str(folder / "prepared"),
            "sequence_length": _LENGTH,
            "validation_fraction": 0.0,
            "tokenizer": {"kind": "none", "vocab_size": 1000},
            "sources": [{"kind": "nanogpt", "path": str(path)}],
        }
    )
    return Loader(prepare(config, workers=1), config)
