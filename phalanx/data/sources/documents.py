"""The documents of a unit of work, as a stream of pieces of text. One function per kind of source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig
from phalanx.data.sources.input_files import FilePart, parquet_rows
from phalanx.data.sources.packed_files import damage_of, open_bytes, packing, usable_bytes
from phalanx.data.sources.text_reader import (
    BYTE_ORDER_MARK,
    TextPiece,
    Utf8,
    bad_byte,
    is_utf8,
    separated_pieces,
    split_text,
    text_pieces,
)

Reader = Callable[[SourceConfig, FilePart], Iterator[TextPiece]]
Refuse = Callable[[str, str], UserError]  # a problem and its cure
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def read_pieces(source: SourceConfig, part: FilePart) -> Iterator[TextPiece]:
    """The text of `part`; a document that is left out is a piece without text whose name says so."""
    return READERS[source.kind](source, part)


def _read_files(source: SourceConfig, part: FilePart) -> Iterator[TextPiece]:
    if source.utf8_policy == "skip" and not is_utf8(part.path):
        yield skipped(part.name)
        return
    check = Utf8(part.path, source.utf8_policy)
    name = part.name if part.fresh else None
    whole = part.end == part.file_size
    with open_bytes(part.path) as file:
        for text in text_pieces(file, part.begin, None if whole else part.end, check):
            yield TextPiece(name, text)
            name = None


def _read_text(source: SourceConfig, part: FilePart) -> Iterator[TextPiece]:
    if not source.document_separator:
        yield from _read_files(source, part)
        return
    check = Utf8(part.path, source.utf8_policy)
    separator = source.document_separator.encode()
    end = None if part.end == part.file_size else part.end
    with open_bytes(part.path) as file:
        for start, is_first, text in separated_pieces(file, part.begin, end, separator, check):
            yield TextPiece(f"{part.name}:{start}" if is_first else None, text)


def _read_lines(source: SourceConfig, part: FilePart) -> Iterator[TextPiece]:
    """JSON lines that start in the part's range; the last is read to its end."""
    end = None if part.end == part.file_size else part.end
    usable, why = usable_bytes(part.path) if source.bad_utf8 == "skip" and packing(part.path) else (0, "")
    with open_bytes(part.path, usable if why else None) as file:
        place = 0
        if part.begin:
            file.seek(part.begin - 1)
            # No further than the part goes: of a line that is longer than a part, each would read all that follows.
            place = part.begin - 1 + len(file.readline(-1 if end is None else end - part.begin + 1))
        while end is None or place < end:
            line = file.readline()
            if why and not line.endswith(b"\n"):
                yield skipped(f"{part.name}:{place} and all that follows: {why}, of {part.file_size:,} packed bytes")
                return
            if not line:
                return
            if line.strip():
                yield from _line(source, part, place, line)
            place += len(line)


def _line(source: SourceConfig, part: FilePart, place: int, line: bytes) -> Iterator[TextPiece]:
    name = f"{part.name}:{place}"
    try:
        text = line.decode("utf-8", "replace" if source.bad_utf8 == "replace" else "strict")
        record = json.loads(text if place else text.removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        if source.bad_utf8 == "skip":
            yield skipped(name)
            return
        raise bad_byte(part.path, place + error.start, line[error.start]) from None
    except (ValueError, RecursionError) as error:
        raise _bad_line(part.path, place, f"is no JSON ({error})", "correct the line") from None
    if not isinstance(record, dict):
        raise _bad_line(part.path, place, "is no JSON object", "write one object a line") from None

    def refuse(problem: str, cure: str) -> UserError:
        return _bad_line(part.path, place, problem, cure)

    if _ESCAPED_HALF.search(line) and not _mend_halves(source, record, refuse):
        yield skipped(name)
        return
    yield from _record(source, name, record, refuse)


def _mend_halves(source: SourceConfig, record: dict[str, Any], refuse: Refuse) -> bool:
    """Treat halves of characters in a record's text as bytes that are no UTF-8; False: leave the record out.

    JSON may escape one half of a surrogate pair without the other, which no UTF-8 text can have.
    """
    for field in _fields(source):
        text = record.get(field)
        found = _HALF.search(text) if isinstance(text, str) else None
        if found is None or not isinstance(text, str):
            continue
        if source.bad_utf8 == "skip":
            return False
        if source.bad_utf8 != "replace":
            problem = f"field {field!r} has half a character (\\u{ord(found[0]):04x})"
            raise refuse(problem, "correct the line, or set bad_utf8 = 'replace' or 'skip' on the source")
        record[field] = _HALF.sub("\ufffd", text)
    return True


def _fields(source: SourceConfig) -> list[str]:
    return [source.prompt_field, source.field] if source.prompt_field else [source.field]


def _record(source: SourceConfig, name: str, record: dict[str, Any], refuse: Refuse) -> Iterator[TextPiece]:
    """The pieces of one record: the prompt, which is not trained on, and the text."""
    fields = _fields(source)
    wrong = [field for field in fields if not isinstance(record.get(field), str)]
    if wrong and source.missing_field == "skip":
        yield skipped(name)
        return
    if wrong:
        what = f"is {type(record[wrong[0]]).__name__}, no text" if wrong[0] in record else "is absent"
        raise refuse(
            f"field {wrong[0]!r} {what}; the record has {sorted(record)}",
            "set `field` (or `prompt_field`) on the source, or missing_field = 'skip'",
        )
    title: str | None = name
    for field in fields:
        for text in split_text(record[field]):
            yield TextPiece(title, text, trained=field == source.field)
            title = None


def _bad_line(path: str, place: int, problem: str, cure: str) -> UserError:
    """An error that names the line (from 1), counted only now that it is needed; or the file, where it is damaged."""
    damage = damage_of(path)
    if damage is not None:
        return damage
    number, left = 1, place
    with open_bytes(path) as file:
        while left and (block := file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return UserError(f"line {number}: {problem}", cure=cure, value=path)


def _read_table(source: SourceConfig, part: FilePart) -> Iterator[TextPiece]:
    for row, record in parquet_rows(part.path, part.begin, part.end, _fields(source)):

        def refuse(problem: str, cure: str, row: int = row) -> UserError:
            return UserError(f"row {row}: {problem}", cure=cure, value=part.path)

        yield from _record(source, f"{part.name}:{row}", record, refuse)


def skipped(name: str) -> TextPiece:
    """The piece that stands for a document that was left out."""
    return TextPiece(f"\0{name}", "")


def was_skipped(piece: TextPiece) -> str | None:
    """The name of the document that was left out, or None."""
    return piece.name[1:] if piece.name is not None and piece.name.startswith("\0") else None


READERS: dict[str, Reader] = {
    "text": _read_text,
    "jsonl": _read_lines,
    "parquet": _read_table,
    "directory": _read_files,
    "python-stdlib": _read_files,
}
