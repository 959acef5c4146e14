"""Small corpora and what they should become, shared by the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.config import DataConfig, SourceConfig, Split, TokenizerConfig
from phalanx.data.tokens.prepared_corpus import Prepared

END = 256


def lines(count: int) -> list[str]:
    return [f"line {i} of the text, å and 漢 in it" for i in range(count)]


def write_text(path: Path, documents: Sequence[str], separator: str = "\n") -> Path:
    path.write_text(separator.join(documents), encoding="utf-8")
    return path


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def make_config(folder: Path, *sources: SourceConfig, **settings: Any) -> DataConfig:
    defaults = {
        "sequence_length": 16,
        "sources": sources,
        "tokenizer": TokenizerConfig(kind="bytes"),
        "folder": str(folder / "prepared"),
        "validation_fraction": 0.0,
    }
    return DataConfig(**(defaults | settings))


def stored(prepared: Prepared, split: Split = "train", number: int = 0) -> np.ndarray:
    """All tokens of a split of a source, read with numpy alone."""
    shards = prepared.split(split)[number][1].shards
    parts = [np.fromfile(s.tokens, s.dtype, s.num_tokens, offset=s.offset_bytes) for s in shards]
    return np.concatenate(parts).astype(np.int64)


def documents(prepared: Prepared, split: Split = "train", number: int = 0, end: int = END) -> list[str]:
    """The documents of a split of a source prepared with bytes: the text between end-of-text tokens."""
    tokens = stored(prepared, split, number).tolist()
    assert tokens[0] == end
    texts: list[list[int]] = []
    for token in tokens:
        if token == end:
            texts.append([])
        else:
            texts[-1].append(token)
    return [bytes(text).decode() for text in texts]
