"""Tables for a person at a terminal, and unbroken for a file or another program."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

# Wide enough for any table: into a pipe each row is one line, so that grep and cut work on it.
_UNBROKEN = 10_000


def make_console() -> Console:
    """A console as wide as the terminal (or as ``COLUMNS`` says); without one, rows are never folded."""
    console = Console(emoji=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(emoji=False, width=_UNBROKEN)


# Also marks that turn the direction of text, by which a name can show as another.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

MOST_NAME = 64
"""Characters of a name in a table: a longer one would make all rows as wide."""


def printable(text: str) -> str:
    """A text without orders to the terminal, which a name in somebody's file may hold: ``\\x1b`` for ESC."""

    def shown(found: re.Match[str]) -> str:
        code = ord(found.group())
        if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8
            code -= 0xDC00
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _CONTROL.sub(shown, text)


def one_line(text: str, most: int = 1 << 20) -> str:
    """`printable` on one line; of more than `most` characters the middle is left out."""
    shown = printable(text.replace("\n", "\\n").replace("\t", " "))
    if len(shown) <= most:
        return shown
    end = most // 2
    return f"{shown[: most - end - 1]}…{shown[-end:]}"


class _Table(Table):
    def add_row(self, *renderables: RenderableType | None, **settings: object) -> None:
        super().add_row(*(printable(one) if isinstance(one, str) else one for one in renderables), **settings)  # type: ignore[arg-type]


def make_table(*columns: str, right: tuple[int, ...] = (), whole: tuple[int, ...] = ()) -> Table:
    """An empty table without lines."""
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        justify = "right" if number in right else "left"
        table.add_column(printable(column), justify=justify, overflow="fold", no_wrap=number in whole)  # type: ignore[arg-type]
    return table


def age(seconds: float) -> str:
    """``4m ago``: one unit is enough to know whether it still writes."""
    for unit_s, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)}{letter} ago"
    return f"{max(0, int(seconds))}s ago"


def print_page_path(console: Console, path: Path | None) -> None:
    """Say where a page was written, on a line that may be copied whole; nothing where there is none."""
    if path is not None:
        console.print(f"\npage: {path}", markup=False, highlight=False, soft_wrap=True)
