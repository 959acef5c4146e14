"""The report of an incident as a value: dated facts in the order in which they came, and how decisions become facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from phalanx.core.errors import UserError
from phalanx.run.decide import actions
from phalanx.run.decide.actions import (
    GO_ON_PAGE,
    HELD_UP,
    LEFT,
    AddToIncident,
    CloseIncident,
    OpenIncident,
    Where,
    read_log,
)

VERSION = 1

Result = Literal["recovered", "gave up", "stopped", "advised", "false alarm"]


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Common to all facts; `unix_s`: when it was, by the clock of the process that reports it."""

    unix_s: float


class Seen(Fact, frozen=True, tag="seen"):
    """Something was seen."""

    by: str  # such as ``executor``, ``log rule nccl-timeout``, ``driver``
    what: str  # such as ``killed by SIGKILL``
    host: str = ""  # `host`, `rank`: where; empty and -1: not at one place
    rank: int = -1
    step: int = -1  # that the rank was at; -1: not known
    is_own: bool = False  # it is what is wrong with the attempt, and does not only follow from something else

    @property
    def place(self) -> str:
        """Such as ``rank 5 on node-b``; empty: not at one place."""
        if self.rank < 0:
            return self.host
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


class Decided(Fact, frozen=True, tag="decided"):
    """The driver, or a person (`by`), decided something; `advised`: it was not done."""

    what: str
    why: str
    by: str = "driver"
    advised: bool = False


class Took(Fact, frozen=True, tag="took"):
    """A phase of the recovery, from `unix_s` on, took so long."""

    phase: str
    seconds: float


class Lost(Fact, frozen=True, tag="lost"):
    """What has to be done again, or is gone."""

    from_step: int = -1  # `from_step`, `to_step`: training was at the one and goes on from the other
    to_step: int = -1
    seconds: float = -1.0  # of all ranks' time together; negative: not known
    what: str = ""  # anything else that is gone, such as ``node-b``

    @property
    def steps(self) -> int | None:
        """To be done again; None: not known."""
        return max(self.from_step - self.to_step, 0) if self.to_step >= 0 else None


class IncidentOutcome(Fact, frozen=True, tag="outcome"):
    """How it ended."""

    result: Result
    summary: str  # title of the page, such as ``rank 5 was killed; restarted in place``
    to_do: list[str] = []  # what a person should do


AnyFact = Seen | Decided | Took | Lost | IncidentOutcome


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of a job's incidents, numbered from 1; `evidence`: names of the files in the folder beside the page."""

    number: int
    job: str
    attempt: int
    facts: list[AnyFact]
    evidence: list[str] = []
    version: int = VERSION

    @property
    def began_unix_s(self) -> float:
        """When the first fact was."""
        return self.facts[0].unix_s if self.facts else 0.0

    @property
    def outcome(self) -> IncidentOutcome | None:
        """How it ended; None: it has not yet."""
        return next((fact for fact in reversed(self.facts) if isinstance(fact, IncidentOutcome)), None)

    @property
    def seconds(self) -> float | None:
        """From the first fact to the end; None: it has not ended."""
        return None if self.outcome is None else max(self.outcome.unix_s - self.began_unix_s, 0.0)

    @property
    def lost_steps(self) -> int | None:
        """To be done again; None: not known."""
        known = [fact.steps for fact in self.facts if isinstance(fact, Lost) and fact.steps is not None]
        is_none = self.outcome is not None and self.outcome.result == "false alarm"
        return sum(known) if known or is_none else None

    @property
    def seen(self) -> list[Seen]:
        """What was seen: first what is wrong by itself, then the rest."""
        return sorted((fact for fact in self.facts if isinstance(fact, Seen)), key=lambda fact: not fact.is_own)

    @property
    def title(self) -> str:
        """In a few words."""
        if self.outcome is not None:
            return self.outcome.summary
        seen = next(iter(self.seen), None)
        return "something went wrong" if seen is None else f"{seen.place}: {seen.what}" if seen.place else seen.what


def to_json(incident: Incident) -> str:
    """For programs; indented."""
    text = json.dumps(msgspec.to_builtins(incident), indent=1, ensure_ascii=False)
    return text.encode(errors="replace").decode() + "\n"  # names of files may hold halves of characters


def from_json(text: str | bytes) -> Incident:
    """What `to_json` gave.

    Raises:
        UserError: it is no such text.
    """
    try:
        incident = msgspec.json.decode(text, type=Incident)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UserError(f"is no incident ({error})", cure="read a file that phalanx run wrote") from None
    if incident.version != VERSION:
        raise UserError(
            f"the incident has the form {incident.version}, and this version knows {VERSION}",
            cure="read it with the version of Phalanx that wrote it",
        )
    return incident


MOST_FACTS = 300
"""Of a report; with very many hosts nobody reads what each of them has reported."""

_FOR_DECISIONS = 50
"""Of these are kept for what is decided after all hosts have reported."""

PHASES = {
    "detecting": "detect",
    "diagnosing": "evidence",
    "stopping": "stop",
    "checking": "check",
    "waiting": "wait for hosts",
    "opening": "open the store",
    "starting": "start",
    "first step": "first step",
    "running": "going on",
}
"""Names of the phases for people, in the order in which a recovery has them."""

IncidentAction = OpenIncident | AddToIncident | CloseIncident
Scrub = Callable[[str], str]
"""Takes secrets out of a text."""


def after(before: Incident | None, action: IncidentAction, job: str, unix_s: float, scrub: Scrub) -> Incident:
    """The report with what an action says; performed a second time it changes nothing.

    Args:
        before: the report so far; None: there is none, or its beginning was lost.
    """
    match action:
        case OpenIncident():
            if before is not None:
                return before
            seen = _seen(action.seen_by, action.text, action.where, unix_s, scrub, is_own=action.is_own)
            return Incident(number=action.number, job=job, attempt=action.attempt, facts=[seen])
        case AddToIncident():
            incident = before or Incident(number=action.number, job=job, attempt=0, facts=[])
            if len(incident.facts) >= MOST_FACTS - (0 if action.is_decision else _FOR_DECISIONS):
                return incident
            if action.is_decision:
                fact: AnyFact = Decided(unix_s=unix_s, what=scrub(action.text), why=scrub(action.why), by=action.by)
            else:
                fact = _seen(action.by, action.text, action.where, unix_s, scrub, is_own=action.is_own)
            # The same of the same moment is told once: a driver that was restarted performs it again.
            return incident if fact in incident.facts else replace(incident, facts=[*incident.facts, fact])
        case CloseIncident():
            incident = before or Incident(number=action.number, job=job, attempt=0, facts=[])
            return incident if incident.outcome is not None else _closed(incident, action, unix_s, scrub)


def _closed(incident: Incident, action: CloseIncident, unix_s: float, scrub: Scrub) -> Incident:
    times = [
        Took(unix_s=incident.began_unix_s, phase=name, seconds=action.seconds[phase])
        for phase, name in PHASES.items()
        if phase in action.seconds
    ]
    result = IncidentOutcome(
        unix_s=unix_s,
        result=action.result,
        summary=f"{incident.title.partition('; ')[0]}{_suspect(incident)}; {_how(action)}",
        to_do=[scrub(text) for text in _to_do(incident, action)],
    )
    return replace(incident, facts=[*incident.facts, *times, *_lost(action, unix_s, scrub), result])


def _seen(by: str, text: str, where: Where, unix_s: float, scrub: Scrub, *, is_own: bool) -> Seen:
    # What stands in columns of its own is not repeated.
    what = text.removeprefix("suspected: ").removeprefix(f"rank {where.rank} on ") if where.rank >= 0 else text
    what = what.removeprefix(f"{where.host}: ").removeprefix(f"rank {where.rank} says: ") if where.host else what
    what = what.removesuffix(f" (step {where.step})").removeprefix(f"rank {where.rank} ")
    return Seen(
        unix_s=unix_s, by=by, what=scrub(what), host=where.host, rank=where.rank, step=where.step, is_own=is_own
    )


def _suspect(incident: Incident) -> str:
    """The rank that was named, where the title does not begin with one."""
    seen = incident.seen
    if not seen or seen[0].rank >= 0:
        return ""
    # Where a rank has left early, the others wait for it and look guilty of that.
    if left := next((fact for fact in seen if fact.what.startswith(LEFT)), None):
        return f", {left.place} {left.what}"
    named = [fact for fact in seen if fact.by == "judge of the evidence" and fact.rank >= 0]
    if not named:
        return ""
    return f", {HELD_UP} {named[-1].place}" if named[-1].what.startswith(HELD_UP) else f", {named[-1].place} suspected"


def _how(action: CloseIncident) -> str:
    if action.status > 0:
        return f"the job ended with status {action.status}"
    if action.result == "false alarm":
        return "nothing was done"
    text = "training has returned" if action.status == 0 else action.text
    return f"{text}, without {', '.join(list(action.hosts)[:3])}" if action.hosts else text


def _lost(action: CloseIncident, unix_s: float, scrub: Scrub) -> list[Lost]:
    lost = [Lost(unix_s=unix_s, what=f"{host}: {scrub(why)}") for host, why in action.hosts.items()]
    if action.result == "false alarm":
        return lost
    seconds = sum(action.seconds.values()) * action.ranks if action.ranks else -1.0
    if action.to_step >= 0:
        return [Lost(unix_s=unix_s, from_step=action.from_step, to_step=action.to_step, seconds=seconds), *lost]
    steps = "" if action.status >= 0 else "the steps since the script's last checkpoint (it does not say how many)"
    return [Lost(unix_s=unix_s, seconds=seconds, what=steps), *lost]


def _to_do(incident: Incident, action: CloseIncident) -> list[str]:
    to_do = [*action.to_do] + [
        f"have {host} looked at before other jobs use it: {why}"
        for host, why in action.hosts.items()
        if not why.startswith(("drained", "stopped"))
    ]
    if action.result == "recovered" and action.status < 0 and action.to_step < 0:
        to_do.append(f"see whether the script went on from its checkpoint: it does not number its steps: {GO_ON_PAGE}")
    if action.result != "gave up":
        return to_do
    first = next((fact for fact in incident.seen if fact.rank >= 0), None)
    if first is not None and not any(text.endswith(f"phalanx run logs {first.rank}") for text in to_do):
        to_do.insert(0, read_log(first.rank))
    return [_ADVICE[action.status], *to_do] if action.status in _ADVICE else to_do


_ADVICE = {
    actions.USER_CODE: "mend the script: the same would happen again on any host, so do not queue it again as it is",
    actions.BAD_INPUT: "mend what the script was given: it refuses it before the first step",
    actions.NO_HOSTS: "see why there are too few hosts; the job can be queued again as it is",
    actions.NO_PROGRESS: "find out why no new step is made, before you queue the job again",
}
