"""From the bytes that a rank writes to lines of text, and the newest of these for heartbeats and reports.

What is kept is bounded, and what is left out is counted.
"""

from __future__ import annotations

import html
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence

from phalanx.run.messages import LogLine

MAX_LINE_BYTES = 16 << 10  # a longer line is cut, with a note of how much is missing
OUTPUT_BYTES = 512 << 10  # of lines, that one heartbeat of each host of a job may carry, all hosts together
_LEAST_BYTES = 4 << 10
_LINE_BYTES = 32  # of a message, for a line besides its text
_LEAST_CHARS = 256

# Escape sequences as in ECMA-48, with 7 or 8 bits: commands, then strings with their end, then the rest.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LineSplitter:
    """Cuts what one rank writes into lines.

    Of a line that is drawn over and over with carriage returns, as progress bars are, the last state stays. Bytes that
    are not UTF-8 become U+FFFD. Never holds more than one line, nor more of it than `max_line_bytes`.
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
        text = self._head.decode(errors="replace")
        if self._missing:  # the cut may be within a character
            text = f"{text.rstrip(chr(0xFFFD))} … [{self._missing} bytes more]"
        return text

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
        text = self.pending
        self._head.clear()
        self._missing, self._returned = 0, False
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


def share_of(hosts: int) -> int:
    """Bytes of lines that a heartbeat may carry, of a job of so many hosts."""
    return max(OUTPUT_BYTES // max(hosts, 1), _LEAST_BYTES)


class Tails:
    """The newest lines of each rank.

    Args:
        kept_lines: of each rank that are kept for reports.

    Attributes:
        heartbeat_bytes: of lines that one heartbeat carries at most.
        on_full: called, once until `sent`, when half of them are there: sent then, none is lost. Where
            heartbeats carry little, since there are many hosts, it is not called: a log says more than people read.
    """

    def __init__(self, heartbeat_bytes: int = _LEAST_BYTES, *, kept_lines: int = 50) -> None:
        self.heartbeat_bytes, self._kept_lines = heartbeat_bytes, kept_lines
        self.on_full: Callable[[], None] = lambda: None
        self._new: dict[int, deque[str]] = {}
        self._bytes: Counter[int] = Counter()
        self._kept: dict[int, deque[str]] = {}
        self._dropped: Counter[int] = Counter()
        self._total_bytes = 0
        self._is_full = False

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Lines that a rank has written."""
        self._kept.setdefault(rank, deque(maxlen=self._kept_lines)).extend(lines[-self._kept_lines :])
        most_chars = max(_LEAST_CHARS, self.heartbeat_bytes // 8)
        for line in lines:
            text = cut(line, most_chars)
            self._new.setdefault(rank, deque()).append(text)
            self._count(rank, _cost_bytes(text))
            if self._total_bytes > self.heartbeat_bytes // 2 >= 8 * _LEAST_BYTES and not self._is_full:
                self._is_full = True
                self.on_full()
            if self._total_bytes > self.heartbeat_bytes:
                self._leave_out()

    @property
    def is_empty(self) -> bool:
        """Nothing new has been written."""
        return not self._new

    def newest(self) -> list[LogLine]:
        """The newest lines since `sent`, in order of rank; a line before a rank's says how many were left out."""
        found = []
        for rank in sorted(self._new):
            if dropped := self._dropped[rank]:
                found.append(LogLine(rank, left_out(dropped)))
            found += [LogLine(rank, text) for text in self._new[rank]]
        return found

    def sent(self) -> None:
        """The newest lines are on their way."""
        self._new.clear()
        self._bytes.clear()
        self._dropped.clear()
        self._total_bytes, self._is_full = 0, False

    def last(self, rank: int) -> list[str]:
        """The newest lines of a rank, whole."""
        return list(self._kept.get(rank, ()))

    def forget(self) -> None:
        """Nothing is kept for reports any more, as when an attempt begins."""
        self._kept.clear()

    def _count(self, rank: int, bytes_: int) -> None:
        self._bytes[rank] += bytes_
        self._total_bytes += bytes_

    def _leave_out(self) -> None:
        # The oldest lines of the ranks that have written most; each keeps one.
        for rank, _ in self._bytes.most_common():
            new = self._new[rank]
            while len(new) > 1 and self._total_bytes > self.heartbeat_bytes:
                self._count(rank, -_cost_bytes(new.popleft()))
                self._dropped[rank] += 1


def left_out(count: int) -> str:
    """The line in the place of so many lines."""
    words = "one more line is" if count == 1 else f"{count:,} more lines are"
    return f"… {words} in the log"


def _cost_bytes(text: str) -> int:
    return _LINE_BYTES + (len(text) if text.isascii() else len(text.encode(errors="replace")))
