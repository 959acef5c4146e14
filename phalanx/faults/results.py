"""A campaign's folder: a JSON file per case, so that it can be interrupted and resumed; and its summary. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.faults.campaign import family_of
from phalanx.faults.facts import Fact
from phalanx.faults.manifest import Manifest
from phalanx.faults.referee import Score

_COLUMNS = (
    "family",
    "cases",
    "right",
    "void",
    "detect s",
    "localise s",
    "resume s",
    "lost steps",
    "false alarms",
    "evicted wrongly",
    "orphans",
)


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a case: enough to judge it again."""

    score: Score
    facts: list[Fact]


class Results:
    """The results in a folder.

    Args:
        folder: made when the first one is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, result: Result) -> Path:
        """Write a result, all at once, over an earlier one of the same case; returns its file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{result.score.id}.json"
        write_bytes(path, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        return path

    def find(self, case: Manifest) -> Result | None:
        """The result of this very case; None: there is none, or the case has changed since.

        Raises:
            UserError: its file cannot be read.
        """
        path = self.folder / f"{case.id}.json"
        if not path.exists():
            return None
        try:
            result = msgspec.json.decode(path.read_bytes(), type=Result)
        except (OSError, msgspec.MsgspecError) as error:
            raise UserError(f"is no result ({error})", cure="delete it", value=str(path)) from None
        return result if result.score.digest == case.digest() else None

    def pending(self, cases: Iterable[Manifest]) -> list[Manifest]:
        """Those still to be run: without a result, or with one that says nothing."""
        return [case for case in cases if (found := self.find(case)) is None or found.score.outcome == "void"]


def summary(cases: Sequence[Manifest], results: Results) -> Table:
    """One line per family of cases, medians over those that are right, and a line for all."""
    table = Table(*_COLUMNS, title="fault campaign")
    families = list(dict.fromkeys(family_of(case) for case in cases))
    for family in families:
        members = [case for case in cases if family_of(case) == family]
        table.add_row(family, *_cells(members, results))
    table.add_section()
    table.add_row("all", *_cells(cases, results), style="bold")
    return table


def _cells(cases: Sequence[Manifest], results: Results) -> list[str]:
    scores = [found.score for case in cases if (found := results.find(case)) is not None]
    right = [score for score in scores if score.outcome == "right"]
    void = sum(score.outcome == "void" for score in scores)
    return [
        str(len(cases)),
        str(len(right)),
        str(void),
        _median([score.detect_s for score in right]),
        _median([score.localise_s for score in right]),
        _median([score.resume_s for score in right]),
        _median([score.lost_steps for score in right], "{:.0f}"),
        str(sum(score.false_alarms for score in scores)),
        str(sum(len(score.wrong_evictions) for score in scores)),
        str(sum(score.orphans for score in scores)),
    ]


def _median(values: Iterable[float | None], form: str = "{:.2f}") -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known)) if known else "–"
