"""Token files of other programs, used where they lie.

- nanoGPT's ``train.bin`` and ``val.bin`` (``data/*/prepare.py``): nothing but ids, uint16 as nanoGPT writes them.
- Megatron's ``.bin`` and ``.idx`` (``megatron/core/datasets/indexed_dataset.py``): the index holds a magic, a version,
  the type of the ids, the length and place of each sequence, and the sequence with which each document begins.

Each file is read through once, in pieces, to check that every id is in the vocabulary and to find documents; what was
found is kept with the file's size and time of change.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig, Split
from phalanx.data.shuffle import Int64
from phalanx.data.sources.input_files import InputFile
from phalanx.data.tokens.prepared_corpus import PreparedSplit, split_of_tokens
from phalanx.data.tokens.shards import Mapped, TokenShard, cut_shard, npy_writer

CHUNK = 1 << 22
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True)
class _TokenFile:
    """Ids of one file: `documents` are the positions at which documents begin, None where the file does not say."""

    path: Path
    dtype: str
    num_tokens: int
    documents: Int64 | None


def token_splits(
    source: SourceConfig, files: list[InputFile], vocab_size: int, held_out: float, folder: Path
) -> tuple[dict[Split, PreparedSplit], str]:
    """Check token files, find their documents (written to `folder`), and say which part of them is which split,
    with a hash of all tokens.

    nanoGPT's ``val.bin`` is the validation split. Of other files the end is held out, from a document's border on, as
    Megatron's ``--split`` does; of a file without documents, from any token on.

    Raises:
        UserError: an id that the vocabulary has not, a file that is cut short or of another kind.
    """
    content = hashlib.blake2b(digest_size=16)
    shards: dict[Split, list[TokenShard]] = {"train": [], "validation": []}
    has_validation = any(_is_nanogpt_validation(source, file) for file in files)
    for number, file in enumerate(f for f in files if not f.path.endswith(".idx")):
        tokens = _open_nanogpt(source, file) if source.kind == "nanogpt" else _open_megatron(file)
        starts = _scan(tokens, source, vocab_size, content)
        place = folder / f"starts-{number}.npy" if len(starts) else None
        if place is not None:
            with npy_writer(place, np.int64) as writer:
                writer.append(starts)
        shard = TokenShard(tokens.path, tokens.dtype, 0, tokens.num_tokens, place, 0, len(starts))
        if held_out == 1.0 or _is_nanogpt_validation(source, file):
            border = 0
        elif has_validation or not held_out:
            border = tokens.num_tokens
        else:
            # At the document nearest to the wanted place, if documents are known.
            border = round(tokens.num_tokens * (1 - held_out))
            inner = starts[starts > 0]
            if len(inner):
                border = int(inner[np.abs(inner - border).argmin()])
        for parts, part in zip(shards.values(), cut_shard(shard, border), strict=True):
            parts += [part] if part.num_tokens else []
    splits = {split: split_of_tokens(parts, has_ends=False) for split, parts in shards.items() if parts}
    return splits, content.hexdigest()


def _is_nanogpt_validation(source: SourceConfig, file: InputFile) -> bool:
    return source.kind == "nanogpt" and Path(file.path).name == "val.bin"


def _open_nanogpt(source: SourceConfig, file: InputFile) -> _TokenFile:
    size = np.dtype(source.token_dtype).itemsize
    if file.size % size:
        raise UserError(
            f"has {file.size} bytes, no multiple of {size}: it is cut short or not of {source.token_dtype}",
            cure="set token_dtype to the type it was written with",
            value=file.path,
        )
    return _TokenFile(Path(file.path), source.token_dtype, file.size // size, None)


def _open_megatron(file: InputFile) -> _TokenFile:
    index = Path(file.path).with_suffix(".idx")
    try:
        block = index.read_bytes()[:34]
        magic, version, code, sequences, documents = struct.unpack("<9sQBQQ", block)
    except (OSError, struct.error) as error:
        raise UserError(
            f"has no readable index ({error})", cure="put the .idx file beside the .bin", value=file.path
        ) from None
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise UserError(
            f"is no Megatron index of whole numbers (magic {magic!r}, version {version}, type {code})",
            cure="write it with Megatron's preprocess_data.py",
            value=str(index),
        )
    sizes = Mapped(index, "<i4", 34, sequences).array
    pointers = Mapped(index, "<i8", 34 + 4 * sequences, sequences).array
    first = Mapped(index, "<i8", 34 + 12 * sequences, documents).array
    itemsize = np.dtype(_DTYPES[code]).itemsize
    ends = np.cumsum(sizes, dtype=np.int64) * itemsize
    if (
        sequences == 0
        or not np.array_equal(pointers, ends - sizes.astype(np.int64) * itemsize)
        or ends[-1] != file.size
    ):
        raise UserError(
            f"its index does not fit its {file.size} bytes (sequences must follow each other)",
            cure="write both files again with Megatron's preprocess_data.py",
            value=file.path,
        )
    starts = pointers[first[first < sequences]] // itemsize
    return _TokenFile(Path(file.path), _DTYPES[code], file.size // itemsize, np.unique(starts))


def _scan(tokens: _TokenFile, source: SourceConfig, vocab_size: int, content: hashlib.blake2b) -> Int64:
    """Check every id and find where documents begin: the end-of-text token before a document belongs to it."""
    ends: list[Int64] = []
    mapped = Mapped(tokens.path, tokens.dtype, 0, tokens.num_tokens)
    for place in range(0, tokens.num_tokens, CHUNK):
        block = mapped.array[place : place + CHUNK]
        content.update(block.tobytes())
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab_size:
            wrong = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
            raise UserError(
                f"token {place + wrong} has the id {block[wrong]}, the vocabulary has {vocab_size}",
                cure="give the tokenizer the file was made with (data.tokenizer), and its type (token_dtype)",
                value=str(tokens.path),
            )
        if source.document_token >= 0:
            ends.append(np.flatnonzero(block == source.document_token).astype(np.int64) + place)
        mapped.release()
    if source.document_token < 0:
        return np.empty(0, np.int64) if tokens.documents is None else tokens.documents
    found = np.concatenate(ends)
    if not len(found):
        raise UserError(
            f"no token has the id {source.document_token}",
            cure="set document_token to the id that ends documents, or to -1",
            field="document_token",
            value=str(tokens.path),
        )
    return np.unique(np.concatenate([[0], found[found < tokens.num_tokens - 1]]))
