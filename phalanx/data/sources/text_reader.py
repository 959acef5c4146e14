"""Reading text in pieces of bounded size, cut where a tokenizer cannot notice.

A document of any length passes through a few hundred KiB of memory. Pieces end between a letter or digit and white
space, or behind a line's end: the regular expressions that GPT-2, GPT-4 and Llama 3 tokenizers cut words with never
make one word of the two sides, so the pieces' tokens put together are the whole text's tokens. Where there is no such
place (text without spaces) a piece ends between any two characters. Who may not cut there puts the pieces together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

from phalanx.core.errors import UserError
from phalanx.data.sources.packed_files import damage_of, open_bytes, open_raw

PIECE_BYTES = 1 << 17
SEARCH_BYTES = 1 << 16
# Between a letter or digit and white space, or behind a line's end without other white space beside it, which has some
# characters of two and three bytes.
_CUT = re.compile(
    rb"[A-Za-z0-9](?=[ \t\r\n])|[!-~\x80-\xff](?<!\xc2[\x85\xa0])(?<!\xe3\x80\x80)(?<!\xe1\x9a\x80)(?<!\xe2[\x80\x81].)"
    rb"\n(?=[!-~\xc3-\xe0\xe4-\xf4]|\xe3[\x81-\xbf])"
)
_BESIDE_CUT_BYTES = 4  # tell whether a place is one: up to four before it, and two behind

BYTE_ORDER_MARK = "\ufeff"
"""At the beginning of files that some editors write; it is no part of their text."""

Policy = Literal["error", "replace", "skip"]


class TextPiece(NamedTuple):
    """Some text of a document, in order. `name` is given on the first piece of a document and None on the others."""

    name: str | None
    text: str
    trained: bool = True


def cut_after(path: str, place: int, *, words: bool) -> int:
    """The first place at or after byte `place` to cut a plain file: between words, or between any characters."""
    with open_raw(path) as file:
        if words:
            return _next_cut(file, place)
        file.seek(place)
        window = file.read(3)
    count = 0  # of bytes that belong to a character that began before the window
    while count < min(3, len(window)) and 0x80 <= window[count] < 0xC0:
        count += 1
    return place + count


def _next_cut(file: BinaryIO, place: int) -> int:
    """The first place at or after byte `place` where words can be cut; the end of the file where there is none."""
    begin, least, window = max(place - _BESIDE_CUT_BYTES, 0), place, b""
    file.seek(begin)
    while block := file.read(SEARCH_BYTES):
        window += block
        ends = (begin + match.end() for match in _CUT.finditer(window))
        if (found := next((end for end in ends if end >= least), None)) is not None:
            return found
        # What the next block tells of: a cut shows by what lies behind it, too.
        least = max(place, begin + len(window) - _BESIDE_CUT_BYTES // 2)
        begin, window = begin + max(len(window) - 2 * _BESIDE_CUT_BYTES, 0), window[-2 * _BESIDE_CUT_BYTES :]
    return begin + len(window)


def text_pieces(file: BinaryIO, begin: int, end: int | None, check: Utf8) -> Iterator[str]:
    """Yield the text of bytes ``[begin, end)`` of `file` piece by piece."""
    file.seek(begin)
    place, rest = begin, b""
    while chunk := file.read(PIECE_BYTES if end is None else min(PIECE_BYTES, end - place)):
        block = rest + chunk
        cut = _last_cut(block)
        yield check.decode(block[:cut], place - len(rest))
        rest = block[cut:]
        place += len(chunk)
    if rest:
        yield check.decode(rest, place - len(rest))


def separated_pieces(
    file: BinaryIO, begin: int, end: int | None, separator: bytes, check: Utf8
) -> Iterator[tuple[int, bool, str]]:
    """Yield ``(document's first byte, whether the document starts here, text)`` for documents between separators.

    Only documents that start in ``[begin, end)`` are read, the last one to its end.
    """
    blocks = _separated_blocks(file, max(begin - len(separator), 0), separator)
    start, is_first, inside = 0, True, begin == 0
    for place, block, is_last in blocks:
        if end is not None and place >= end and not inside:
            return  # whatever follows starts behind the range
        if inside and block:
            yield start, is_first, check.decode(block, place)
            is_first = False
        if is_last:
            start, is_first = place + len(block) + len(separator), True
            inside = start >= begin
            if end is not None and start >= end:
                return


def _separated_blocks(file: BinaryIO, place: int, separator: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yield ``(byte, block, whether a separator follows)`` from `place` on, cut at separators and into pieces."""
    file.seek(place)
    rest = b""
    while chunk := file.read(PIECE_BYTES):
        rest += chunk
        *closed, rest = rest.split(separator)
        for block in closed:
            yield place, block, True
            place += len(block) + len(separator)
        if len(rest) >= 2 * PIECE_BYTES:
            cut = _last_cut(rest[: 1 - len(separator) or None])
            yield place, rest[:cut], False
            rest, place = rest[cut:], place + cut
    yield place, rest, False


class Utf8:
    """Decodes bytes by a policy, and names file and byte when it must refuse."""

    def __init__(self, path: str, policy: Policy) -> None:
        self.path = path
        self.policy = policy

    def decode(self, block: bytes, place: int) -> str:
        """`block`, which lies at byte `place` of the file, as text, without a byte order mark at the file's beginning;
        UserError: it is not UTF-8, and not to be replaced."""
        try:
            text = block.decode("utf-8", "replace" if self.policy == "replace" else "strict")
            return text if place else text.removeprefix(BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise bad_byte(self.path, place + error.start, block[error.start]) from None


def bad_byte(path: str, place: int, byte: int) -> UserError:
    """The error for a byte that no UTF-8 text can have there; or for the file, where it is damaged."""
    return damage_of(path) or UserError(
        f"is not UTF-8 text at byte {place} (0x{byte:02x})",
        cure="convert the file, or set bad_utf8 = 'replace' or 'skip' on the source",
        value=path,
    )


def split_text(text: str) -> Iterator[str]:
    """A text in memory, in pieces; a short one as it is."""
    if len(text) <= PIECE_BYTES:
        yield text
        return
    block = text.encode("utf-8", "replace")
    place = 0
    while len(block) - place > PIECE_BYTES:
        end = place + _last_cut(block[place : place + PIECE_BYTES])
        yield block[place:end].decode()
        place = end
    yield block[place:].decode()


def is_utf8(path: str) -> bool:
    """Whether all of a file is UTF-8, read in pieces."""
    check = Utf8(path, "error")
    try:
        with open_bytes(path) as file:
            for _ in text_pieces(file, 0, None, check):
                pass
    except UserError:
        return False
    return True


def _last_cut(block: bytes) -> int:
    """The last good place to cut `block` (at least half of it stays on the left), or its length."""
    low = max(len(block) // 2, len(block) - SEARCH_BYTES)
    for width in (256, len(block) - low):
        ends = [match.end() for match in _CUT.finditer(block, max(low, len(block) - width))]
        if ends:
            return ends[-1]
    return _last_character(block)


def _last_character(block: bytes) -> int:
    """The length of `block` without a character that is cut off at its end."""
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte < 0x80:
            return len(block)
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(block) if back >= needed else len(block) - back
    return len(block)
