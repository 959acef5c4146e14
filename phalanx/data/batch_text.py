"""The text of samples that a run has read, worked out again: samples are a function of corpus, settings and seed.

Needs what was prepared, not the inputs, and no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig
from phalanx.data.prepare import open_prepared
from phalanx.data.samples import PackedSplit, SampleReader
from phalanx.data.tokenizers.tokenizer import Tokenizer
from phalanx.data.tokens.prepared_corpus import Prepared


@dataclass(frozen=True)
class Piece:
    """Text of one document, or of a part of it, within a sample.

    Attributes:
        document: its number in the source, from 0; None: the source has no borders of documents.
        is_begun_here: the document's first token is in the sample.
        is_trained_on: whether its tokens have a weight in the loss.
    """

    document: int | None
    is_begun_here: bool
    is_trained_on: bool
    num_tokens: int
    text: str


@dataclass(frozen=True)
class SampleText:
    """One sample of a batch: its number in the order of the run, the source, and where in that it begins."""

    number: int
    source: str
    begin_token: int
    pieces: tuple[Piece, ...]


def open_near(config: DataConfig, folders: Iterable[Path]) -> Prepared:
    """Open what was prepared for `config`, whose relative paths mean one of these folders: the first that has it.

    Raises:
        UserError: none has it.
    """
    first: UserError | None = None
    for folder in dict.fromkeys(folders):
        try:
            return open_prepared(_from(config, folder))
        except UserError as error:
            first = first or error
    raise first or UserError("no folder to look in", cure="give one")


def batch_text(prepared: Prepared, config: DataConfig, start: int, count: int) -> list[SampleText]:
    """Samples ``start..start+count`` of the order in which the run reads them.

    Raises:
        UserError: a prepared file is missing or damaged.
    """
    packed = PackedSplit(prepared.split("train"), config)
    return [
        SampleText(start + place, reader.name, begin, tuple(_pieces(reader, begin, config, prepared.tokenizer)))
        for place, (reader, begin) in enumerate(packed.places(start, count))
    ]


def _pieces(reader: SampleReader, begin: int, config: DataConfig, tokenizer: Tokenizer) -> Iterable[Piece]:
    length = config.sequence_length
    found = reader.read(np.array([begin]))
    tokens = found.tokens_BL[0, :length]
    # The weight is that of a target, which lies one token further on.
    weights = np.concatenate([found.weights_BS[0, :1], found.weights_BS[0, :-1]])
    trained = weights > 0 if reader.stream.has_mask else None
    starts = set(reader.stream.document_starts(np.array([begin]), length)[1]) if reader.stream.has_documents else set()
    borders = {0, length} | starts
    if trained is not None:
        borders |= set((np.flatnonzero(np.diff(trained)) + 1).tolist())
    document = reader.stream.document_at(begin) if reader.stream.has_documents else None
    for low, high in itertools.pairwise(sorted(borders)):
        if document is not None and low in starts and low > 0:
            document += 1
        text = _text(tokenizer, tokens[low:high])
        yield Piece(document, low in starts, trained is None or bool(trained[low]), high - low, text)


def _text(tokenizer: Tokenizer, ids: Any) -> str:
    try:
        return tokenizer.decode(ids.tolist())
    except UserError:  # token files that came without a tokenizer
        return " ".join(map(str, ids.tolist()))


def _from(config: DataConfig, folder: Path) -> DataConfig:
    """`config` with its places of tokens and tokenizer as seen from a folder; those of sources are part of names."""
    tokenizer = config.tokenizer
    if tokenizer.path:
        tokenizer = tokenizer.model_copy(update={"path": str(folder / Path(tokenizer.path).expanduser())})
    return config.model_copy(update={"folder": str(folder / config.folder), "tokenizer": tokenizer})
