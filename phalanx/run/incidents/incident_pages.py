"""An incident as one page for people, in Markdown or HTML, and where it is stored: ``incidents/0003.md``, ``.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

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


class _Section(NamedTuple):
    """A heading with a table, or with paragraphs; several of them are a list."""

    title: str
    # Of the table's columns; those whose head ends with a colon are numbers; empty: no table.
    heads: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    texts: Sequence[str] = ()


def to_markdown(incident: Incident) -> str:
    """One page of Markdown, in which nothing that hosts and ranks reported is markup."""
    lines = [f"# {_plain(_title(incident))}", "", _plain(_intro(incident))]
    for section in _sections(incident):
        lines += ["", f"## {section.title}", ""]
        if section.heads:
            heads = [head.removesuffix(":") for head in section.heads]
            marks = ["---:" if head.endswith(":") else "---" for head in section.heads]
            lines += [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|"]
            lines += [f"| {' | '.join(map(_plain, row))} |" for row in section.rows]
        mark = "- " if len(section.texts) > 1 else ""
        lines += [f"{mark}{_plain(text)}" for text in section.texts]
    return "\n".join(lines) + "\n"


def to_html(incident: Incident) -> str:
    """The same as an HTML article, escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{_html(cell)}</{tag}>' for cell in cells)}</tr>"

    parts = [f"<h1>{_html(_title(incident))}</h1>", f"<p>{_html(_intro(incident))}</p>"]
    for section in _sections(incident):
        parts.append(f"<h2>{_html(section.title)}</h2>")
        if section.heads:
            heads = [head.removesuffix(":") for head in section.heads]
            parts += ["<table>", row(heads, "th"), *(row(cells, "td") for cells in section.rows), "</table>"]
        if len(section.texts) > 1:
            parts += ["<ul>", *(f"<li>{_html(text)}</li>" for text in section.texts), "</ul>"]
        else:
            parts += [f"<p>{_html(text)}</p>" for text in section.texts]
    return "\n".join(["<article>", *parts, "</article>", ""])


def _title(incident: Incident) -> str:
    return f"Incident {incident.number}: {incident.title}"


def _intro(incident: Incident) -> str:
    try:
        began = datetime.fromtimestamp(incident.began_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
        began = "at an unknown time,"
    outcome, seconds = incident.outcome, incident.seconds
    end = "It is still open."
    if outcome is not None and seconds is not None:
        end = f"Outcome: {outcome.result}, after {_s(seconds)}."
    return f"Job {incident.job}, attempt {incident.attempt}, {began} UTC. {end}"


def _sections(incident: Incident) -> list[_Section]:
    """What stands on the page, and where."""
    sections = [_seen(incident), _decided(incident), _times(incident), _lost(incident)]
    if incident.evidence:
        more = len(incident.evidence) - _ITEMS
        names = ", ".join(incident.evidence[:_ITEMS]) + (f" and {more} more" if more > 0 else "")
        text = f"In the folder {incident.number:04d} beside this page: {names}"
        sections.append(_Section("Evidence", texts=(text,)))
    to_do = ["Wait: it is being dealt with."]
    if incident.outcome is not None:
        every = incident.outcome.to_do
        to_do = [*every[:_ITEMS], *([f"and {len(every) - _ITEMS} more"] if len(every) > _ITEMS else [])]
    return [*sections, _Section("What you should do", texts=to_do or ("Nothing.",))]


def _seen(incident: Incident) -> _Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Seen)]
    if not facts:
        return _Section("What was seen", texts=("Nothing was reported.",))

    def row(fact: Seen) -> tuple[str, ...]:
        where = [*([fact.host] if fact.host else []), *([f"rank {fact.rank}"] if fact.rank >= 0 else [])]
        return fact.by, ", ".join(where), fact.what + (f" (at step {fact.step})" if fact.step >= 0 else "")

    return _Section("What was seen", ("after:", "by", "where", "what"), _rows(facts, incident, row))


def _decided(incident: Incident) -> _Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Decided)]
    if not facts:
        return _Section("What was decided", texts=("Nothing." if incident.outcome else "Nothing yet.",))

    def row(fact: Decided) -> tuple[str, ...]:
        by = "" if fact.by == "driver" else f" (by {fact.by})"
        return f"{'advised only: ' if fact.advised else ''}{fact.what}{by}", fact.why

    return _Section("What was decided", ("after:", "decision", "why"), _rows(facts, incident, row))


def _times(incident: Incident) -> _Section:
    facts = [fact for fact in incident.facts if isinstance(fact, Took)]
    if not facts:
        return _Section("Where the time went", texts=("No phase was timed.",))
    longest = max(max(fact.seconds for fact in facts), 1e-9)
    rows: list[tuple[str, ...]] = []
    for fact in facts[:_ROWS]:
        share = fact.seconds / longest
        rows.append((fact.phase, f"{fact.seconds:.2f}", "█" * round(_BAR_CHARS * share) if 0 < share <= 1 else ""))
    if len(rows) < len(facts):
        rows.append((f"{len(facts) - len(rows)} more", f"{sum(fact.seconds for fact in facts[_ROWS:]):.2f}", ""))
    rows.append(("together", f"{sum(fact.seconds for fact in facts):.2f}", ""))
    return _Section("Where the time went", ("phase", "seconds:", ""), rows)


def _lost(incident: Incident) -> _Section:
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
    return _Section("What was lost", texts=texts or ("Nothing that is known.",))


def _rows(facts: Sequence[F], incident: Incident, row: Callable[[F], tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A row per fact, the time since the beginning first; of many the first and the last."""
    rows = [(f"+{max(fact.unix_s - incident.began_unix_s, 0.0):.2f} s", *row(fact)) for fact in facts]
    if len(rows) <= _ROWS:
        return rows
    width = len(rows[0]) - 2
    return [*rows[: _ROWS - 3], ("…", f"{len(rows) - _ROWS + 1} more", *[""] * width), *rows[-2:]]


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


_NAME = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class Summary:
    """One line of a list of incidents; `result`: of the `IncidentOutcome`, ``open`` or ``unreadable``."""

    number: int
    began_unix_s: float
    attempt: int
    title: str
    result: str
    seconds: float | None
    lost_steps: int | None  # None: not known
    page: Path


def incidents_folder(run_folder: Path) -> Path:
    """Of a run."""
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
    summaries = []
    for number in numbers:
        page = page_of(run_folder, number)
        try:
            incident = load(run_folder, number)
        except UserError as error:
            summaries.append(Summary(number, 0.0, 0, str(error), "unreadable", None, None, page))
            continue
        result = incident.outcome.result if incident.outcome else "open"
        began_s, attempt, seconds = incident.began_unix_s, incident.attempt, incident.seconds
        summaries.append(Summary(number, began_s, attempt, incident.title, result, seconds, incident.lost_steps, page))
    return summaries
