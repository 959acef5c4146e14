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
_FEW, _MANY = 1, 128


def numbers(quick: bool) -> Mapping[str, float]:
    """``loader_step_s``, what a batch takes however small it is, and ``loader_tokens_per_s``, beyond that."""
    with tempfile.TemporaryDirectory(prefix="phalanx-measure-") as folder:
        loader = _loader(Path(folder))
        few_s, many_s = (_median_s(loader, samples, 3 if quick else 15) for samples in (_FEW, _MANY))
    token_s = max(many_s - few_s, many_s / 2) / ((_MANY - _FEW) * _LENGTH)
    return {"loader_step_s": max(few_s - _FEW * _LENGTH * token_s, few_s / 10), "loader_tokens_per_s": 1 / token_s}


def _median_s(loader: Loader, samples: int, turns: int) -> float:
    times = []
    for turn in range(turns):
        began_s = time.perf_counter()
        loader.batch(turn * samples, samples)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


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
