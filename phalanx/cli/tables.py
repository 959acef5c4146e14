"""Tables for a person at a terminal, and unbroken for a file or another program."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Wide enough for any table: into a pipe each row is one line, so that grep and cut work on it.
_UNBROKEN = 10_000


def make_console() -> Console:
    """A console as wide as the terminal (or as ``COLUMNS`` says); without one, rows are never folded."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNBROKEN)


def make_table(*columns: str, right: tuple[int, ...] = (), whole: tuple[int, ...] = ()) -> Table:
    """An empty table without lines.

    Args:
        columns: their headings.
        right: numbers of the columns whose cells are set to the right.
        whole: numbers of the columns whose cells are never folded.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        justify = "right" if number in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=number in whole)  # type: ignore[arg-type]
    return table


def tell_page(console: Console, path: Path | None) -> None:
    """Say where a page was written, on a line that may be copied whole; nothing where there is none."""
    if path is not None:
        console.print(f"\npage: {path}", markup=False, highlight=False, soft_wrap=True)
