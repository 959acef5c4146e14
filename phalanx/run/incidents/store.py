"""Where incidents are kept: ``incidents/0003.md`` and ``0003.json`` in the folder of the run. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.run.incidents.facts import Incident, from_json, to_json
from phalanx.run.incidents.page import to_markdown

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
