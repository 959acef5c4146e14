"""Pages of incidents as Markdown and HTML, and where they are stored.

An incident as one page for people, as Markdown or HTML.

Where incidents are kept: ``incidents/0003.md`` and ``0003.json`` in the folder of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.core.units import duration
from phalanx.run.incidents.report import Decided, Fact, Incident, Lost, Seen, Took, from_json, to_json
from phalanx.run.logs.log_lines import cut, escape_for_html, strip_ansi

PAGE_LINES = 66
"""No page is longer."""

F = TypeVar("F", bound=Fact)

_ROWS = 8
_ITEMS = 5
_CELL_CHARS = 160
_BAR_CHARS = 24
_SPECIAL = re.compile(r"([\\`*\[\]|~])")
_AT_START = re.compile(r"^(\d*)([#+=\-.)])(?=[\s#=-]|$)")


@dataclass(frozen=True)
class Table:
    """Rows under heads; columns whose head ends with a colon are numbers."""

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """A heading with a table, or with paragraphs; several of them are a list."""

    title: str
    table: Table | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What both forms show."""

    title: str
    intro: str
    sections: list[Section]


def to_markdown(incident: Incident) -> str:
    """One page of Markdown, in which nothing of what hosts and ranks said is markup."""
    page = lay_out(incident)
    lines = [f"# {_plain(page.title)}", "", _plain(page.intro)]
    for section in page.sections:
        lines += ["", f"## {section.title}", ""]
        lines += _markdown_table(section.table) if section.table else []
        mark = "- " if len(section.texts) > 1 else ""
        lines += [f"{mark}{_plain(text)}" for text in section.texts]
    return "\n".join(lines) + "\n"


def to_html(incident: Incident) -> str:
    """The same as an HTML article, escaped."""
    page = lay_out(incident)
    parts = [f"<h1>{_html(page.title)}</h1>", f"<p>{_html(page.intro)}</p>"]
    for section in page.sections:
        parts.append(f"<h2>{_html(section.title)}</h2>")
        parts += _html_table(section.table) if section.table else []
        if len(section.texts) > 1:
            parts += ["<ul>", *(f"<li>{_html(text)}</li>" for text in section.texts), "</ul>"]
        else:
            parts += [f"<p>{_html(text)}</p>" for text in section.texts]
    return "\n".join(["<article>", *parts, "</article>", ""])


def lay_out(incident: Incident) -> Page:
    """What stands on the page, and where."""
    return Page(
        f"Incident {incident.number}: {incident.title}",
        _intro(incident),
        [
            _seen(incident),
            _decided(incident),
            _times(incident),
            _lost(incident),
            *_evidence(incident),
            _to_do(incident),
        ],
    )


def _intro(incident: Incident) -> str:
    began = _date(incident.began_unix_s)
    outcome, seconds = incident.outcome, incident.seconds
    end = "It is still open."
    if outcome is not None and seconds is not None:
        end = f"Outcome: {outcome.result}, after {_s(seconds)}."
    return f"Job {incident.job}, attempt {incident.attempt}, {began} UTC. {end}"


def _seen(incident: Incident) -> Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Seen)]
    if not facts:
        return Section("What was seen", texts=("Nothing was reported.",))
    rows = _rows(facts, incident, lambda fact: (fact.by, _place(fact), fact.what + _at_step(fact)))
    return Section("What was seen", Table(("after:", "by", "where", "what"), rows))


def _decided(incident: Incident) -> Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Decided)]
    if not facts:
        return Section("What was decided", texts=("Nothing." if incident.outcome else "Nothing yet.",))

    def row(fact: Decided) -> tuple[str, ...]:
        who = "" if fact.by == "driver" else f" (by {fact.by})"
        return f"{'advised only: ' if fact.advised else ''}{fact.what}{who}", fact.why

    return Section("What was decided", Table(("after:", "decision", "why"), _rows(facts, incident, row)))


def _times(incident: Incident) -> Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Took)]
    if not facts:
        return Section("Where the time went", texts=("No phase was timed.",))
    longest = max(max(fact.seconds for fact in facts), 1e-9)
    rows: list[tuple[str, ...]] = [
        (fact.phase, f"{fact.seconds:.2f}", _bar(fact.seconds / longest)) for fact in facts[:_ROWS]
    ]
    if len(rows) < len(facts):
        rows.append((f"{len(facts) - len(rows)} more", f"{sum(fact.seconds for fact in facts[_ROWS:]):.2f}", ""))
    rows.append(("together", f"{sum(fact.seconds for fact in facts):.2f}", ""))
    return Section("Where the time went", Table(("phase", "seconds:", ""), rows))


def _lost(incident: Incident) -> Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Lost)]
    texts = []
    for fact in facts[:_ITEMS]:
        parts = []
        if fact.to_step >= 0:
            steps = "no step" if not fact.steps else "1 step" if fact.steps == 1 else f"{fact.steps} steps"
            parts.append(f"{steps} (training was at {fact.from_step} and goes on from {fact.to_step})")
        if fact.seconds >= 0:
            parts.append(f"{_s(fact.seconds)} of the ranks' time together")
        texts.append("; ".join([*parts, *([fact.what] if fact.what else [])]) or "nothing")
    if len(facts) > _ITEMS:
        texts.append(f"and {len(facts) - _ITEMS} more")
    return Section("What was lost", texts=tuple(texts) or ("Nothing that is known.",))


def _evidence(incident: Incident) -> list[Section]:
    if not incident.evidence:
        return []
    more = len(incident.evidence) - _ITEMS
    names = ", ".join(incident.evidence[:_ITEMS]) + (f" and {more} more" if more > 0 else "")
    return [Section("Evidence", texts=(f"In the folder {incident.number:04d} beside this page: {names}",))]


def _to_do(incident: Incident) -> Section:
    title = "What you should do"
    if incident.outcome is None:
        return Section(title, texts=("Wait: it is being dealt with.",))
    to_do = incident.outcome.to_do
    more = [f"and {len(to_do) - _ITEMS} more"] if len(to_do) > _ITEMS else []
    return Section(title, texts=(*to_do[:_ITEMS], *more) or ("Nothing.",))


def _rows(facts: Sequence[F], incident: Incident, row: Callable[[F], tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A row per fact, the time since the beginning first; of many the first and the last."""
    rows = [(f"+{max(fact.unix_s - incident.began_unix_s, 0.0):.2f} s", *row(fact)) for fact in facts]
    if len(rows) <= _ROWS:
        return rows
    width = len(rows[0]) - 2
    return [*rows[: _ROWS - 3], ("…", f"{len(rows) - _ROWS + 1} more", *[""] * width), *rows[-2:]]


def _place(fact: Seen) -> str:
    return ", ".join([*([fact.host] if fact.host else []), *([f"rank {fact.rank}"] if fact.rank >= 0 else [])])


def _at_step(fact: Seen) -> str:
    return f" (at step {fact.step})" if fact.step >= 0 else ""


def _date(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
        return "at an unknown time,"


def _bar(share: float) -> str:
    return "█" * round(_BAR_CHARS * share) if 0 < share <= 1 else ""


def _s(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "an unknown time"
    return f"{seconds:.2f} s" if seconds < 60 else duration(seconds)


def _line(text: str) -> str:
    """On one line, without anything that moves a terminal."""
    whole = text.replace("\n", " ").replace("\r", " ").encode(errors="replace").decode()
    return cut(" ".join(strip_ansi(whole).split()), _CELL_CHARS)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = _SPECIAL.sub(r"\\\1", _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return f"\\{escaped}" if escaped.startswith("#") else _AT_START.sub(r"\1\\\2", escaped)


def _html(text: str) -> str:
    return escape_for_html(_line(text))


def _markdown_table(table: Table) -> list[str]:
    heads = [head.removesuffix(":") for head in table.heads]
    marks = ["---:" if head.endswith(":") else "---" for head in table.heads]
    rows = [heads, *([_plain(cell) for cell in row] for row in table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], f"|{'|'.join(marks)}|", *lines[1:]]


def _html_table(table: Table) -> list[str]:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{_html(cell)}</{tag}>' for cell in cells)}</tr>"

    heads = [head.removesuffix(":") for head in table.heads]
    return ["<table>", row(heads, "th"), *(row(cells, "td") for cells in table.rows), "</table>"]


_NAME = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class Summary:
    """One line of a list of incidents.

    Attributes:
        result: as `Outcome` has it; ``open``; or ``unreadable``.
        seconds: None: it has not ended.
    """

    number: int
    began_unix_s: float
    attempt: int
    title: str
    result: str
    seconds: float | None
    lost_steps: int
    page: Path


def incidents_folder(run_folder: Path) -> Path:
    """Where they are kept."""
    return run_folder / "incidents"


def beside(run_folder: Path, number: int) -> Path:
    """The folder with the evidence of an incident; there may be none."""
    return incidents_folder(run_folder) / f"{number:04d}"


def page_of(run_folder: Path, number: int) -> Path:
    """Where the page of an incident is."""
    return incidents_folder(run_folder) / f"{number:04d}.md"


def store(run_folder: Path, incident: Incident) -> Path:
    """Write page and JSON, each durably and all at once, in the place of earlier ones of this number; gives the page.

    Raises:
        OSError: they cannot be written.
    """
    folder = incidents_folder(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    page = page_of(run_folder, incident.number)
    write_bytes(page, to_markdown(incident).encode(errors="replace"))
    write_bytes(page.with_suffix(".json"), to_json(incident).encode(errors="replace"))
    return page


def load(run_folder: Path, number: int) -> Incident:
    """One that was stored.

    Raises:
        UserError: there is none of this number, or it cannot be read.
    """
    path = incidents_folder(run_folder) / f"{number:04d}.json"
    try:
        return from_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"there is no such incident ({error.strerror})", cure="see `phalanx run incidents`", value=str(path)
        ) from None


def listed(run_folder: Path) -> list[Summary]:
    """All of them, in order; empty where there are none."""
    folder = incidents_folder(run_folder)
    names = sorted(path.name for path in folder.glob("*.json"))
    numbers = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    return [_summary(run_folder, number) for number in numbers]


def _summary(run_folder: Path, number: int) -> Summary:
    page = page_of(run_folder, number)
    try:
        incident = load(run_folder, number)
    except UserError as error:
        return Summary(number, 0.0, 0, str(error), "unreadable", None, 0, page)
    return Summary(
        number,
        incident.began_unix_s,
        incident.attempt,
        incident.title,
        incident.outcome.result if incident.outcome else "open",
        incident.seconds,
        incident.lost_steps,
        page,
    )
