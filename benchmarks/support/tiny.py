"""What tiny runs of `phalanx train` have in common: their text, and settings with which a step takes milliseconds."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = tuple("the quick brown fox jumps over a lazy dog while seven wizards mix å glass of grün ink".split())  # noqa: SIM905

SETTINGS: dict[str, Any] = {
    "data.sources.0.kind": "jsonl",
    "data.tokenizer.kind": "bytes",
    "data.sequence_length": 16,
    "data.validation_fraction": 0.1,
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "model.vocab_multiple": 1,
    "optim.lr": 3e-3,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.threads": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
    "logging.every_steps": 1,
    "logging.mfu": False,  # to measure the device takes longer than many such a run
    "telemetry.spans": False,  # a process of its own, which takes longer than such a run
}
"""Of every tiny run; what it is about is added to them."""


def write_corpus(folder: Path, documents: int = 120, seed: int = 0) -> Path:
    """Short documents of a few words, as JSON lines in ``corpus.jsonl``."""
    chosen = random.Random(seed)
    path = folder / "corpus.jsonl"
    texts = (" ".join(chosen.choices(WORDS, k=chosen.randint(4, 30))) for _ in range(documents))
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return path


def overrides(folder: Path, run: Path, settings: Mapping[str, Any]) -> list[str]:
    """``key=value`` pairs for a run in the folder `run`, whose data lie in `folder`: the text is written if need be.

    Args:
        settings: take the place of the places, and of nothing else; one that is None is left out.
    """
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(folder)
    places = {"data.sources.0.path": corpus, "data.folder": folder / "prepared", "run.folder": run}
    both = {key: str(place) for key, place in places.items()} | dict(settings)
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in both.items() if value is not None]
