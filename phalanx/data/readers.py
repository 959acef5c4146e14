"""The documents of a unit of work, as a stream of pieces of text. One function per kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phalanx.data.config import SourceConfig
from phalanx.data.sources import Part
from phalanx.data.text import Piece, Utf8, is_utf8, open_bytes, separated_pieces, text_pieces

Reader = Callable[[SourceConfig, Part], Iterator[Piece]]


def read_pieces(source: SourceConfig, part: Part) -> Iterator[Piece]:
    """The text of `part`; a document that is left out (`bad_utf8` = "skip") is a piece without text whose name says so."""
    return READERS[source.kind](source, part)


def _read_files(source: SourceConfig, part: Part) -> Iterator[Piece]:
    if source.utf8_policy == "skip" and not is_utf8(part.path):
        yield skipped(part.name)
        return
    check = Utf8(part.path, source.utf8_policy)
    name = part.name if part.fresh else None
    whole = part.end == part.file_size
    with open_bytes(part.path) as file:
        for text in text_pieces(file, part.begin, None if whole else part.end, check):
            yield Piece(name, text)
            name = None


def _read_text(source: SourceConfig, part: Part) -> Iterator[Piece]:
    if not source.document_separator:
        yield from _read_files(source, part)
        return
    check = Utf8(part.path, source.utf8_policy)
    separator = source.document_separator.encode()
    end = None if part.end == part.file_size else part.end
    with open_bytes(part.path) as file:
        for start, is_first, text in separated_pieces(file, part.begin, end, separator, check):
            yield Piece(f"{part.name}:{start}" if is_first else None, text)


def skipped(name: str) -> Piece:
    """The piece that stands for a document that was left out."""
    return Piece(f"\0{name}", "")


def was_skipped(piece: Piece) -> str | None:
    """The name of the document that was left out, or None."""
    return piece.name[1:] if piece.name is not None and piece.name.startswith("\0") else None


READERS: dict[str, Reader] = {
    "text": _read_text,
    "directory": _read_files,
    "python-stdlib": _read_files,
}
