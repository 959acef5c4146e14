"""Bytes that a rank writes become lines of text. Pure, torch-free."""

from __future__ import annotations

import html
import re

MAX_LINE_BYTES = 16 << 10
"""A longer line is cut, with a note of how much is missing."""

# Escape sequences as in ECMA-48, with 7 or 8 bits: commands, then strings with their end, then the rest.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LineSplitter:
    """What one rank writes, cut into lines.

    Of a line that is drawn over and over with carriage returns, as progress bars are, the last state stays. Bytes that
    are no UTF-8 become U+FFFD. Never holds more than one line, nor more of it than `max_line_bytes`.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._head = bytearray()
        self._missing = 0
        self._returned = False

    def feed(self, block: bytes) -> list[str]:
        """The lines that `block` completes."""
        *pieces, rest = block.split(b"\n")
        lines = []
        for piece in pieces:
            self._extend(piece)
            lines.append(self._take())
        self._extend(rest)
        return lines

    def finish(self) -> list[str]:
        """The last line, if it has no end; empty else."""
        return [self._take()] if self._head or self._missing else []

    @property
    def pending(self) -> str:
        """The line that has no end yet, in its present state, such as a progress bar's."""
        return self._text()

    def _extend(self, piece: bytes) -> None:
        body = piece.rstrip(b"\r")
        if body:
            if self._returned or b"\r" in body:
                self._head.clear()
                self._missing = 0
                body = body.rpartition(b"\r")[2]
            room = max(self._max - len(self._head), 0)
            self._head += body[:room]
            self._missing += max(len(body) - room, 0)
            self._returned = False
        self._returned |= piece.endswith(b"\r")

    def _take(self) -> str:
        text = self._text()
        self._head.clear()
        self._missing, self._returned = 0, False
        return text

    def _text(self) -> str:
        text = self._head.decode(errors="replace")
        if self._missing:
            text = f"{text.rstrip(chr(0xFFFD))} … [{self._missing} bytes more]"
        return text


def strip_ansi(text: str) -> str:
    """`text` without escape sequences (colours, titles, moves of the cursor) and control characters but tabs."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))


def escape_for_html(text: str) -> str:
    """`text` as the content of an HTML element or of a quoted attribute; it can hold no tag, nor end one."""
    return html.escape(strip_ansi(text).encode(errors="replace").decode(), quote=True)


def cut(text: str, most: int) -> str:
    """At most `most` characters of `text`, with a mark where some are missing."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
