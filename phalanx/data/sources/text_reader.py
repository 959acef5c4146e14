"""Reading text in pieces of bounded size, cut where a tokenizer cannot notice.

A document of any length passes through a few hundred KiB of memory. Pieces end between a letter or digit and white
space: the regular expressions that GPT-2, GPT-4 and Llama 3 tokenizers cut words with never make one word of the two
sides, so the pieces' tokens put together are the whole text's tokens. Where there is no such place (text without
spaces) a piece ends between any two characters.
"""

from __future__ import annotations

import importlib
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from phalanx.core.errors import UserError

PIECE_BYTES = 1 << 17
SEARCH_BYTES = 1 << 16
_PACKED_BYTES = 1 << 13  # at a time: what they unpack to is in memory
_GZIP_WINDOW = 31  # zlib's name for members of gzip, with their checks
_CUT = re.compile(rb"[A-Za-z0-9](?=[ \t\r\n])")

BYTE_ORDER_MARK = "\ufeff"
"""At the beginning of files that some editors write; it is no part of their text."""

Policy = Literal["error", "replace", "skip"]


class TextPiece(NamedTuple):
    """Some text of a document, in order. `name` is given on the first piece of a document and None on the others."""

    name: str | None
    text: str
    trained: bool = True


def is_packed(path: str) -> bool:
    """Whether `path` is compressed, so that it can only be read from the start."""
    return path.endswith((".gz", ".zst"))


class DamagedFileError(UserError):
    """A packed file that was cut off or holds wrong bytes: what comes after some place cannot be read."""


def open_bytes(path: str, most_bytes: int | None = None) -> BinaryIO:
    """Open a plain, gzip or Zstandard file for reading; a packed one only from its start on, and up to `most_bytes`
    when unpacked.

    Raises:
        UserError: it cannot be opened, or the package for Zstandard is not installed.
        DamagedFileError: later, where a packed file cannot be unpacked any further.
    """
    file = open_raw(path)
    if not is_packed(path):
        return file
    return io.BufferedReader(_Unpacked(path, file, most_bytes), 1 << 20)


def usable_bytes(path: str) -> tuple[int, str]:
    """How many bytes of the text of a packed file can be used, and why no more; empty: that is all of it.

    What was unpacked of a member (of gzip; a frame of Zstandard) may be anything from a wrong byte on, which only the
    check at its end tells: a damaged member is not used at all, nor what follows it. A file that was cut off has no
    such check for its last one, and nothing wrong in what is there: it is used up to the cut.
    """
    place = whole = 0
    with open_raw(path) as file:
        try:
            for block, is_end in _blocks(path, file):
                place += len(block)
                whole = place if is_end else whole
        except EOFError:
            return place, "it is cut off there"
        except _DAMAGES as error:
            return whole, f"what is packed there is damaged ({error})"
    return place, ""


def damage_of(path: str) -> DamagedFileError | None:
    """What is wrong with a packed file: what comes out of a damaged one looks like bad text, which it may not be."""
    usable, why = usable_bytes(path) if is_packed(path) else (0, "")
    return _damaged(path, f"cannot be unpacked after {usable} bytes of text ({why})") if why else None


def _damaged(path: str, problem: str) -> DamagedFileError:
    return DamagedFileError(problem, cure="copy or download it again, or unpack what is good of it", value=path)


class _Unpacked(io.RawIOBase):
    """What a packed file holds, front to back; its damage is an error that names it."""

    def __init__(self, path: str, file: BinaryIO, most_bytes: int | None) -> None:
        self._path, self._file, self._blocks = path, file, _blocks(path, file)
        self._rest = b""
        self._place, self._most_bytes = 0, most_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Stay where it is, which is all that the readers of packed files ask for."""
        if offset != (0 if whence == io.SEEK_CUR else self._place):
            raise io.UnsupportedOperation("a packed file is read from its start on")
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if not self._rest:
            self._rest = self._next()
        part, self._rest = self._rest[: len(view)], self._rest[len(view) :]
        view[: len(part)] = part
        self._place += len(part)
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _next(self) -> bytes:
        left = None if self._most_bytes is None else self._most_bytes - self._place
        try:
            return b"" if left == 0 else next((block for block, _ in self._blocks if block), b"")[:left]
        except EOFError:
            problem = f"is cut off after {self._place} bytes of text"
        except _DAMAGES as error:
            problem = f"cannot be unpacked after {self._place} bytes of text ({error})"
        raise _damaged(self._path, problem) from None


class _BadZstandardError(Exception):
    """The error of the optional package, which cannot be named without importing it."""


_DAMAGES = (OSError, zlib.error, _BadZstandardError)


def _blocks(path: str, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """What a packed file holds, and whether a member (a frame) ends after it whose check, if it has one, is right.

    Raises:
        EOFError: the file ends before a member does.
        OSError, zlib.error, _BadZstandardError: it is damaged.
    """
    return _gzip_blocks(file) if path.endswith(".gz") else _zstandard_blocks(file, path)


def _gzip_blocks(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Members are followed here: Python's reader does not say where they end. Zeros between them are padding."""
    member, is_first = None, True
    while packed := file.read(_PACKED_BYTES):
        while packed := packed if member is not None or is_first else packed.lstrip(b"\0"):
            member, is_first = member or zlib.decompressobj(_GZIP_WINDOW), False
            block = member.decompress(packed, PIECE_BYTES)
            while len(block) == PIECE_BYTES and not member.eof:
                yield block, False
                block = member.decompress(member.unconsumed_tail, PIECE_BYTES)
            yield block, member.eof
            packed, member = (member.unused_data, None) if member.eof else (b"", member)
    if member is not None:
        raise EOFError


def _zstandard_blocks(file: BinaryIO, path: str) -> Iterator[tuple[bytes, bool]]:
    """Its stream reader takes a frame without an end for the end of the file, so frames are followed here."""
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        cure = "install it: pip install 'phalanx-train[zstd]'"
        raise UserError("reading .zst needs the package zstandard", cure=cure, value=path) from None
    frame = None
    while packed := file.read(_PACKED_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                block = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise _BadZstandardError(error) from None
            yield block, frame.eof
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def open_raw(path: str) -> BinaryIO:
    """Open a file's bytes as they lie on disk; UserError: it cannot be opened."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        problem, cure = f"cannot be opened ({error.strerror})", "check the file and its rights"
        raise UserError(problem, cure=cure, value=path) from None


def cut_after(path: str, place: int, *, words: bool) -> int:
    """The first good place at or after byte `place` to cut a plain file: between words, else between characters."""
    with open_raw(path) as file:
        file.seek(place)
        window = file.read(SEARCH_BYTES)
    found = _CUT.search(window) if words else None
    if found:
        return place + found.end()
    count = 0  # of bytes that belong to a character that began before the window
    while count < min(3, len(window)) and 0x80 <= window[count] < 0xC0:
        count += 1
    return place + count


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
    while len(block) > PIECE_BYTES:
        cut = _last_cut(block[:PIECE_BYTES])
        yield block[:cut].decode()
        block = block[cut:]
    yield block.decode()


def is_utf8(path: str) -> bool:
    """Whether all of a file is UTF-8, read in pieces."""
    check = Utf8(path, "error")
    with open_bytes(path) as file:
        try:
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
