"""One unit of work, from pieces of text to token shards, and which units of an earlier preparation still hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.files import write_json
from phalanx.data.config import SourceConfig, Split
from phalanx.data.sources.documents import read_pieces, was_skipped
from phalanx.data.sources.input_files import HoldOutRule, WorkUnit
from phalanx.data.sources.packed_files import open_raw
from phalanx.data.sources.text_reader import TextPiece
from phalanx.data.tokenizers.tokenizer import Cuts, IntArray, Tokenizer
from phalanx.data.tokens.prepared_corpus import MANIFEST, PreparedSplit, combined_digest
from phalanx.data.tokens.shards import NpyWriter, TokenShard, npy_writer

BATCH_CHARACTERS = 1 << 20
BATCH_PIECES = 1 << 12
SPLITS: tuple[Split, ...] = ("train", "validation")
NAMED_SKIPS = 5


@dataclass
class SplitRecord:
    """What a unit wrote for one split."""

    num_tokens: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    num_trained: int = 0
    num_untrained: int = 0
    masked: bool = False
    digests: dict[str, str] = field(default_factory=dict)


@dataclass
class UnitRecord:
    """Written when a unit is complete: what was read (to see whether it still holds) and what came out."""

    signature: str
    times: str
    content: str
    splits: dict[str, SplitRecord]
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)

    @staticmethod
    def from_json(value: dict[str, Any]) -> UnitRecord:
        """The record that `asdict` made into JSON."""
        return UnitRecord(**{**value, "splits": {name: SplitRecord(**s) for name, s in value["splits"].items()}})


def _unit_file(folder: Path, signature: str, split: str, what: str) -> Path:
    """Where a unit's ``tokens``, ``starts`` or ``mask`` of a split lie."""
    return folder / f"{signature}.{split}.{what}.npy"


def _record_file(folder: Path, signature: str) -> Path:
    return folder / f"{signature}.json"


def _content_hash(unit: WorkUnit) -> str:
    """BLAKE2b of the bytes of the unit's parts (of the whole file where a part is not a range of bytes)."""
    result = hashlib.blake2b(digest_size=16)
    for part in unit.parts:
        ranged = part.num_bytes == part.end - part.begin
        with open_raw(part.path) as file:
            file.seek(part.begin if ranged else 0)
            left = part.num_bytes if ranged else part.file_size
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                result.update(block)
                left -= len(block)
    return result.hexdigest()


def encode_unit(
    unit: WorkUnit,
    source: SourceConfig,
    tokenizer: Tokenizer,
    rule: HoldOutRule,
    folder: Path,
    beat: Callable[[int, int], None],
) -> UnitRecord:
    """Write the token files of `unit` and then its record; memory does not depend on the size of the unit, nor on that
    of its documents, where the tokenizer lets them be cut.

    `beat` is called between batches with the bytes of text and the tokens made since the last call.
    """
    _record_file(folder, unit.signature).unlink(missing_ok=True)
    record = UnitRecord(unit.signature, unit.times, _content_hash(unit), {})
    with ExitStack() as stack:
        writers = {
            split: _SplitWriter(stack, folder, unit.signature, split, tokenizer, bool(source.prompt_field))
            for split in SPLITS
        }
        for batch in _batches(_joined(_assigned(unit, source, rule, record), tokenizer.cuts)):
            ids = tokenizer.encode_batch([piece.text for _, piece in batch])
            for split in SPLITS:
                chosen = [(piece, i) for (s, piece), i in zip(batch, ids, strict=True) if s == split]
                writers[split].append(chosen)
            beat(sum(len(piece.text.encode()) for _, piece in batch), sum(map(len, ids)))
        for split, writer in writers.items():
            record.splits[split] = writer.record()
    write_json(_record_file(folder, unit.signature), asdict(record))  # last: it says that the unit is whole
    return record


def _assigned(
    unit: WorkUnit, source: SourceConfig, rule: HoldOutRule, record: UnitRecord
) -> Iterator[tuple[Split, TextPiece]]:
    """Every piece with its split; documents that were left out are counted in `record`."""
    for part in unit.parts:
        split = rule.split(part.name, part)
        for piece in read_pieces(source, part):
            if (name := was_skipped(piece)) is not None:
                record.num_skipped += 1
                shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")  # a file's name
                record.skipped = [*record.skipped, shown][:NAMED_SKIPS]
                continue
            if piece.name is not None:
                split = rule.split(piece.name, part)
            yield split, piece


def _joined(pieces: Iterator[tuple[Split, TextPiece]], cuts: Cuts) -> Iterator[tuple[Split, TextPiece]]:
    """Pieces of a document put together again where its text may not be cut."""
    before: tuple[Split, TextPiece] | None = None
    texts: list[str] = []
    for split, piece in pieces:
        if piece.name is None and not piece.text:
            continue
        if before is not None:
            goes_on = piece.name is None and piece.trained == before[1].trained
            if goes_on and not cuts.fit(texts[-1], piece.text):
                texts.append(piece.text)
                continue
            yield before[0], before[1]._replace(text="".join(texts))
        before, texts = (split, piece), [piece.text]
    if before is not None:
        yield before[0], before[1]._replace(text="".join(texts))


def _batches(pieces: Iterator[tuple[Split, TextPiece]]) -> Iterator[list[tuple[Split, TextPiece]]]:
    batch: list[tuple[Split, TextPiece]] = []
    size = 0
    for item in pieces:
        batch.append(item)
        size += len(item[1].text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """The open files of one split of a unit."""

    def __init__(
        self, stack: ExitStack, folder: Path, signature: str, split: str, tokenizer: Tokenizer, masked: bool
    ) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        self._end_of_text = None if tokenizer.end_of_text is None else np.array([tokenizer.end_of_text], dtype)
        kinds = {"tokens": dtype, "starts": np.dtype(np.int64)} | ({"mask": np.dtype(np.uint8)} if masked else {})
        self._files: dict[str, NpyWriter] = {
            what: stack.enter_context(npy_writer(_unit_file(folder, signature, split, what), kind))
            for what, kind in kinds.items()
        }
        self._num_bytes = self._num_trained = 0
        self._num_with_text = 0  # documents with text that is trained on
        self._is_without = False  # the newest document has none yet

    def append(self, pieces: list[tuple[TextPiece, IntArray]]) -> None:
        """Write tokens, document starts and loss mask of some pieces, end-of-text before each new document."""
        tokens: list[IntArray] = []
        masks: list[IntArray] = []
        starts: list[int] = []
        place = self._files["tokens"].count
        for piece, ids in pieces:
            if piece.name is not None:
                self._is_without = True
                starts.append(place)
                if self._end_of_text is not None:
                    tokens.append(self._end_of_text)
                    masks.append(np.ones(1, np.uint8))
                    place += 1
            tokens.append(ids)
            masks.append(np.full(len(ids), piece.trained, np.uint8))
            place += len(ids)
            self._num_bytes += len(piece.text.encode())
            if piece.trained and len(ids):
                self._num_trained += len(ids)
                self._num_with_text += self._is_without
                self._is_without = False
        if tokens:
            self._files["tokens"].append(np.concatenate(tokens))
            self._files["starts"].append(np.array(starts, np.int64))
            if "mask" in self._files:
                self._files["mask"].append(np.concatenate(masks))

    def record(self) -> SplitRecord:
        return SplitRecord(
            num_tokens=self._files["tokens"].count,
            num_documents=self._files["starts"].count,
            num_bytes=self._num_bytes,
            num_trained=self._num_trained,
            num_untrained=self._files["starts"].count - self._num_with_text,
            masked="mask" in self._files,
            digests={what: writer.digest for what, writer in self._files.items()},
        )


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


HEADER_BYTES = 128


def reusable_records(folder: Path, units: Sequence[WorkUnit]) -> dict[str, UnitRecord]:
    """Records, by signature, of the units whose output is there and whose input is what it was.

    Files whose size and time of change are as recorded are taken as unchanged. Others are hashed: with the same content
    the unit holds (its record is not rewritten; the manifest will carry the new listing). A unit that shares a changed
    file with another is done again too, since a document may reach from one range of a file into the next.
    """
    records = {unit.signature: _read(folder, unit.signature) for unit in units}
    changed: set[str] = set()
    for unit in units:
        record = records[unit.signature]
        if record is not None and record.times != unit.times and record.content != _content_hash(unit):
            changed.update(part.path for part in unit.parts)
            records[unit.signature] = None
    return {
        unit.signature: record
        for unit in units
        if (record := records[unit.signature]) is not None and not any(part.path in changed for part in unit.parts)
    }


def collect_splits(folder: Path, records: Sequence[UnitRecord], vocab_size: int) -> dict[Split, PreparedSplit]:
    """The splits that the units of a source make, in order; those without tokens are left out."""
    dtype = token_dtype(vocab_size).str
    result: dict[Split, PreparedSplit] = {}
    for split in SPLITS:
        parts = [(record.signature, record.splits[split]) for record in records]
        shards = tuple(
            TokenShard(
                tokens=_unit_file(folder, signature, split, "tokens"),
                dtype=dtype,
                offset_bytes=HEADER_BYTES,
                num_tokens=part.num_tokens,
                starts=_unit_file(folder, signature, split, "starts") if part.num_documents else None,
                starts_end=part.num_documents,
                mask=_unit_file(folder, signature, split, "mask") if part.masked else None,
            )
            for signature, part in parts
            if part.num_tokens
        )
        if shards:
            result[split] = PreparedSplit(
                num_tokens=sum(part.num_tokens for _, part in parts),
                num_documents=sum(part.num_documents for _, part in parts),
                num_bytes=sum(part.num_bytes for _, part in parts),
                shards=shards,
                num_trained=sum(part.num_trained for _, part in parts),
                num_untrained=sum(part.num_untrained for _, part in parts),
            )
    return result


def unit_digests(records: Sequence[UnitRecord]) -> str:
    """One hash of everything the units wrote."""
    return combined_digest(
        f"{split} {what} {value}"
        for record in records
        for split, part in sorted(record.splits.items())
        for what, value in sorted(part.digests.items())
    )


def delete_strangers(folder: Path, records: Sequence[UnitRecord]) -> None:
    """Delete what earlier preparations left in `folder`: units of other inputs, files of killed processes."""
    mine = {record.signature for record in records}
    for path in folder.iterdir():
        if path.name not in (MANIFEST, "lock") and path.name.split(".")[0] not in mine:
            path.unlink(missing_ok=True)


def _read(folder: Path, signature: str) -> UnitRecord | None:
    try:
        record = UnitRecord.from_json(json.loads(_record_file(folder, signature).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    written = [(split, what) for split, part in record.splits.items() for what in part.digests]
    is_whole = all(_unit_file(folder, signature, *names).is_file() for names in written)
    return record if is_whole else None
