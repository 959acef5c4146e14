"""Opening files of text, packed ones too: known by how they begin, not by their names.

A packed file is unpacked from its start on, in blocks of bounded size, and its damage is named.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import re
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.errors import UserError

ENDINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_PACKED = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or one that is to be skipped
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
_OTHERS = {
    "zip": re.compile(rb"PK(\x03\x04|\x05\x06|\x07\x08)"),
    "7z": re.compile(rb"7z\xbc\xaf\x27\x1c"),
    "rar": re.compile(rb"Rar!\x1a\x07"),
    "lz4": re.compile(rb"\x04\x22\x4d\x18"),
    "snappy": re.compile(rb"\xff\x06\x00\x00sNaPpY"),
    "compress": re.compile(rb"\x1f\x9d"),
    "tar": re.compile(rb"(?s).{257}ustar[\x00 ]"),
    "Parquet": re.compile(rb"PAR1\x15"),
    "Arrow": re.compile(rb"ARROW1\x00\x00"),
    "SQLite": re.compile(rb"SQLite format 3\x00"),
    "PDF": re.compile(rb"%PDF-\d"),
}
_MARKS = {  # UTF-32's first: UTF-16's is the beginning of it
    "UTF-32LE": codecs.BOM_UTF32_LE,
    "UTF-32BE": codecs.BOM_UTF32_BE,
    "UTF-16LE": codecs.BOM_UTF16_LE,
    "UTF-16BE": codecs.BOM_UTF16_BE,
}
_HEAD_BYTES = 4096
_UNPACKED_BYTES = 1 << 17
_PACKED_BYTES = 1 << 13  # at a time: what they unpack to is in memory
_GZIP_WINDOW = 31  # zlib's name for members of gzip, with their checks


class DamagedFileError(UserError):
    """A packed file that was cut off or holds wrong bytes: what comes after some place cannot be read."""


def packing(path: str) -> str | None:
    """How a file is compressed, so that it can only be read from the start; None: it is not. What it begins with tells,
    and its name only where that is no format of these: then it is damaged."""
    with open_raw(path) as file:
        head = file.read(_HEAD_BYTES)
    named = (kind for ending, kind in ENDINGS.items() if path.lower().endswith(ending))
    return next((kind for kind, begin in _PACKED.items() if begin.match(head)), None) or next(named, None)


def open_bytes(path: str, most_bytes: int | None = None) -> io.BufferedReader:
    """Open a file of text for reading, plain or packed; a packed one only from its start on, and up to `most_bytes`
    when unpacked.

    Raises:
        UserError: it cannot be opened, is no text or of another encoding, or the package that unpacks it is not there.
        DamagedFileError: also later, where a packed file cannot be unpacked any further.
    """
    file = open_raw(path)
    try:
        if kind := packing(path):
            file = io.BufferedReader(_Unpacked(path, kind, file, most_bytes), 1 << 20)
        _refuse_others(path, kind, file.peek(_HEAD_BYTES)[:_HEAD_BYTES])
    except BaseException:
        file.close()
        raise
    return file


def _refuse_others(path: str, kind: str | None, head: bytes) -> None:
    """Refuse what is known by how it begins: decoded as UTF-8 it is an error that misleads, or even passes."""
    inside = f" within one of {kind}" if kind else ""
    for what, begin in (_OTHERS | _PACKED if kind else _OTHERS).items():
        if begin.match(head):
            cure = "unpack it, or set the `kind` that reads it"
            raise UserError(f"is no text but a file of {what}{inside}", cure=cure, value=path)
    if encoding := _wide_encoding(head):
        cure = f"convert it: iconv -f {encoding} -t UTF-8"
        raise UserError(f"is text in {encoding}, not in UTF-8{inside}", cure=cure, value=path)


def _wide_encoding(head: bytes) -> str | None:
    """The encoding of text whose characters have two or four bytes, by a mark at its beginning or by its zero bytes.

    Without a mark: Latin letters have zeros at every other byte, and other scripts at their blanks and line ends. Where
    these are few, as in Chinese, it must be no UTF-8, and text in that encoding.
    """
    for encoding, mark in _MARKS.items():
        if head.startswith(mark):
            return encoding
    for encoding in ("UTF-32LE", "UTF-32BE") if any(head) else ():
        with contextlib.suppress(UnicodeDecodeError):
            if head[: len(head) // 4 * 4].decode(encoding):
                return encoding
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) < 2:
        return None
    if max(even, odd) >= len(head) // 40 and min(even, odd) * 10 <= max(even, odd):
        return "UTF-16LE" if odd > even else "UTF-16BE"
    wide = (encoding for encoding in ("UTF-16LE", "UTF-16BE") if _reads_well(head, encoding))
    return next(wide, None) if _decoded(head, "UTF-8") is None else None


def _decoded(head: bytes, encoding: str) -> str | None:
    """The text of `head`, whose last character may be cut off; None: it is of another encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _reads_well(head: bytes, encoding: str) -> bool:
    """Whether it is text with blanks or line ends, without controls and without characters that nobody uses."""
    text = _decoded(head, encoding) or ""
    odd_ones = (c for c in text if unicodedata.category(c) in ("Cc", "Cn", "Co") and not c.isspace())
    return (" " in text or "\n" in text) and next(odd_ones, None) is None


def usable_bytes(path: str) -> tuple[int, str]:
    """How many bytes of the text of a packed file can be used, and why no more; empty: that is all of it.

    What was unpacked of a member (of gzip; a frame of Zstandard) may be anything from a wrong byte on, which only the
    check at its end tells: a damaged member is not used at all, nor what follows it. A file that was cut off has no
    such check for its last one, and nothing wrong in what is there: it is used up to the cut.
    """
    place = whole = 0
    kind = packing(path)
    assert kind is not None
    with open_raw(path) as file:
        try:
            for block, is_end in _blocks(path, kind, file):
                place += len(block)
                whole = place if is_end else whole
        except EOFError:
            return place, "it is cut off there"
        except _DAMAGES as error:
            return whole, f"what is packed there is damaged ({error})"
    return place, ""


def damage_of(path: str) -> DamagedFileError | None:
    """What is wrong with a packed file: what comes out of a damaged one looks like bad text, which it may not be."""
    usable, why = usable_bytes(path) if packing(path) else (0, "")
    return _damaged(path, f"cannot be unpacked after {usable} bytes of text ({why})") if why else None


def _damaged(path: str, problem: str) -> DamagedFileError:
    return DamagedFileError(problem, cure="copy or download it again, or unpack what is good of it", value=path)


class _Unpacked(io.RawIOBase):
    """What a packed file holds, front to back; its damage is an error that names it."""

    def __init__(self, path: str, kind: str, file: BinaryIO, most_bytes: int | None) -> None:
        self._path, self._file, self._blocks = path, file, _blocks(path, kind, file)
        self._rest = memoryview(b"")
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
            self._rest = memoryview(self._next())
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


class _BadStreamError(Exception):
    """The error of an optional module, which cannot be named without importing it."""


_DAMAGES = (OSError, zlib.error, _BadStreamError)


def _blocks(path: str, kind: str, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """What a packed file holds, and whether a member (a frame, a stream) ends after it whose check, if it has one, is
    right.

    Raises:
        EOFError: the file ends before a member does.
        OSError, zlib.error, _BadStreamError: it is damaged.
    """
    if kind == "gzip":
        return _gzip_blocks(file)
    return _zstandard_blocks(file, path) if kind == "zstd" else _stream_blocks(file, path, kind)


def _gzip_blocks(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Members are followed here: Python's reader does not say where they end. Zeros between them are padding."""
    member, is_first = None, True
    while packed := file.read(_PACKED_BYTES):
        while packed := packed if member is not None or is_first else packed.lstrip(b"\0"):
            member, is_first = member or zlib.decompressobj(_GZIP_WINDOW), False
            block = member.decompress(packed, _UNPACKED_BYTES)
            while len(block) == _UNPACKED_BYTES and not member.eof:
                yield block, False
                block = member.decompress(member.unconsumed_tail, _UNPACKED_BYTES)
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
        raise UserError("reading Zstandard needs the package zstandard", cure=cure, value=path) from None
    frame = None
    while packed := file.read(_PACKED_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                block = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise _BadStreamError(error) from None
            yield block, frame.eof
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def _stream_blocks(file: BinaryIO, path: str, kind: str) -> Iterator[tuple[bytes, bool]]:
    """Of bzip2 and xz, whose modules a Python may have been built without. Zeros between streams are padding."""
    module, decompressor = ("bz2", "BZ2Decompressor") if kind == "bzip2" else ("lzma", "LZMADecompressor")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        problem = f"this Python was built without its module {module}"
        raise UserError(problem, cure="unpack the file first", value=path) from None
    stream, is_first = None, True
    while packed := file.read(_PACKED_BYTES):
        while packed := packed if stream is not None or is_first else packed.lstrip(b"\0"):
            stream, is_first = stream or getattr(found, decompressor)(), False
            try:
                block = stream.decompress(packed, _UNPACKED_BYTES)
                while not stream.eof and not stream.needs_input:
                    yield block, False
                    block = stream.decompress(b"", _UNPACKED_BYTES)
            except getattr(found, "LZMAError", OSError) as error:
                raise _BadStreamError(error) from None
            yield block, stream.eof
            packed, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream is not None:
        raise EOFError


def open_raw(path: str) -> io.BufferedReader:
    """Open a file's bytes as they lie on disk; UserError: it cannot be opened."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        problem, cure = f"cannot be opened ({error.strerror})", "check the file and its rights"
        raise UserError(problem, cure=cure, value=path) from None
