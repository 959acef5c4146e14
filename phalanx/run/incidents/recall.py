"""Reports out of the journal: what a driver wrote down and then could not put into its reports. Torch-free.

Everything that is decided stands in the journal before anybody is told of it. A driver that dies in between leaves
reports that lack it, and the next one, whose decisions begin where those ended, does not say it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from phalanx.run.decide.actions import AddToIncident, CloseIncident, OpenIncident
from phalanx.run.decide.decide import action_from_json
from phalanx.run.incidents import report
from phalanx.run.incidents.facts import AnyFact, Incident
from phalanx.run.incidents.report import IncidentAction, Scrub
from phalanx.run.journal import Entry

_log = logging.getLogger(__name__)

_MARK = '-incident"'
"""In every entry that tells of one: of many thousands of entries few have to be decoded."""


def told(entries: Iterable[Entry], before_epoch: int) -> Iterator[tuple[IncidentAction, float]]:
    """What drivers before the present one decided about incidents, and when.

    Args:
        entries: of a journal, in order.
        before_epoch: the present driver's: what it writes it also performs.
    """
    for entry in entries:
        if entry.kind != "action" or entry.epoch >= before_epoch or _MARK not in entry.json_text:
            continue
        try:
            action = action_from_json(entry.json_text)
        except msgspec.DecodeError as error:  # of another version; the job goes on without this line of a report
            _log.warning("entry %d of the journal is not understood: %s", entry.sequence, error)
            continue
        if isinstance(action, OpenIncident | AddToIncident | CloseIncident):
            yield action, entry.unix_s


def reports(told: Iterable[tuple[IncidentAction, float]], job: str, scrub: Scrub) -> dict[int, Incident]:
    """The reports that follow from it, by number; evidence is not among it."""
    found: dict[int, Incident] = {}
    for action, unix_s in told:
        found[action.number] = report.after(found.get(action.number), action, job, unix_s, scrub)
    return found


def completed(stored: Incident | None, journalled: Incident) -> Incident | None:
    """The report with what it lacks; None: it lacks nothing.

    What was stored stays as it is, since it may have been stored by a driver that knew of more secrets, unless
    something is missing in the midst of it.
    """
    if stored is None:
        return journalled
    facts = stored.facts
    if len(facts) >= len(journalled.facts):
        return None
    is_beginning = all(_is_same(one, other) for one, other in zip(facts, journalled.facts, strict=False))
    if is_beginning:
        return replace(stored, facts=[*facts, *journalled.facts[len(facts) :]])
    return replace(journalled, evidence=stored.evidence)


def _is_same(one: AnyFact, other: AnyFact) -> bool:
    """Of the same event.

    By its time, since a driver that knows of other secrets hides other words; or by its words, since what a driver does
    at its start is told a little later than it is written down.
    """
    if type(one) is not type(other):
        return False
    return one.unix_s == other.unix_s or replace(one, unix_s=0.0) == replace(other, unix_s=0.0)
