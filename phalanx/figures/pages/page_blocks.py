"""Pages as values and as files: blocks of text, tables and figures, in one HTML file that needs nothing else.

A page is a list of blocks. `blocks.html` and `page.html` beside this file are the Jinja templates that render them;
every text is escaped there, and nowhere else is any HTML. plotly.js is put into the file, packed to 2 MB of its 4.8,
and draws the figures.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.figures.style import Figure

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    kind: ClassVar[str] = "heading"
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `style` is ``soft``, ``good``, ``bad`` or empty."""

    kind: ClassVar[str] = "paragraph"
    text: str
    style: str = ""
    strong: bool = False


@dataclass(frozen=True)
class FigurePlace:
    """Where the figure of that name goes; `caption` and `words` (what is seen) also stand there without scripts."""

    kind: ClassVar[str] = "figure"
    name: str
    caption: str = ""
    words: str = ""


@dataclass(frozen=True)
class Cards:
    """The few numbers that matter most: each a value and what it is."""

    kind: ClassVar[str] = "cards"
    cards: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    # ``n`` for numbers, ``first`` for what names a row, ``source`` for long words, ``d0`` to ``d3`` for depth.
    style: str = ""
    source: int = 0  # number in the page's `Sources`; 0: none


@dataclass(frozen=True)
class PageTable:
    """A table."""

    kind: ClassVar[str] = "table"
    heads: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    foot: Sequence[Cell] = ()
    # It has many columns: on a narrow screen each row is a block, under its cell of the style ``first``; else the table
    # can be pushed sideways there.
    stacked: bool = False


@dataclass(frozen=True)
class Bullets:
    """A list of lines."""

    kind: ClassVar[str] = "bullets"
    lines: Sequence[str]


@dataclass(frozen=True)
class Sources:
    """What numbers rest on, in the order of their numbers."""

    kind: ClassVar[str] = "sources"
    lines: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks that a reader opens."""

    kind: ClassVar[str] = "fold"
    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Verdict:
    """What matters most, in one sentence, with how sure it is and why; `style` as of a paragraph."""

    kind: ClassVar[str] = "verdict"
    text: str
    sureness: str
    why: str
    style: str = ""


@dataclass(frozen=True)
class ToDo:
    """What to do, in order: each a text, and a command or nothing."""

    kind: ClassVar[str] = "todo"
    steps: Sequence[tuple[str, str]]


Block: TypeAlias = (
    Heading | Paragraph | FigurePlace | Cards | PageTable | Bullets | Sources | Code | Fold | Verdict | ToDo
)


def soft(text: str) -> Paragraph:
    """A paragraph in a softer colour."""
    return Paragraph(text, "soft")


def numbers(texts: Iterable[str]) -> list[Cell]:
    """Cells of numbers, or the heads of their columns."""
    return [Cell(text, "n") for text in texts]


def html_of(blocks: Sequence[Block]) -> str:
    """The blocks in HTML, without the page around them."""
    return str(_templates().get_template("blocks.html").module.show(blocks))  # type: ignore[attr-defined]


def write_page(path: Path, title: str, blocks: Sequence[Block], figures: Mapping[str, Figure]) -> None:
    """Write a page of `blocks`; each figure goes to the `FigurePlace` of its name."""
    from markupsafe import Markup

    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        cure = "install it with: pip install 'phalanx-train[report]'"
        raise UserError("a page needs the package plotly, which is not installed", cure=cure) from None
    text = (
        _templates()
        .get_template("page.html")
        .render(
            title=title,
            body=Markup(html_of(blocks)),
            plotly=base64.b64encode(gzip.compress(str(get_plotlyjs()).encode(), mtime=0)).decode(),
            # Within a script, nothing may look like its end.
            figures=Markup(json.dumps(figures, allow_nan=False).replace("<", "\\u003c")),
        )
    )
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", cure="give another file", value=str(path)) from None


def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, auto_reload=False)
