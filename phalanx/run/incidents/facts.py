"""What is known of an incident: dated facts of a few kinds, in the order in which they came. Torch-free."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from phalanx.core.errors import UserError

VERSION = 1

Result = Literal["recovered", "gave up", "stopped", "advised", "false alarm"]


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Any of them.

    Attributes:
        unix_s: when it was, by the clock of whoever says so.
    """

    unix_s: float


class Seen(Fact, frozen=True, tag="seen"):
    """Somebody noticed something.

    Attributes:
        by: who noticed, such as ``executor``, ``log rule nccl-timeout``, ``driver``.
        what: such as ``killed by SIGKILL``.
        host, rank: where; empty and -1: not at one place.
        step: that the rank was at; -1: not known.
        is_own: it is what is wrong with the attempt, and does not only follow from something else.
    """

    by: str
    what: str
    host: str = ""
    rank: int = -1
    step: int = -1
    is_own: bool = False

    @property
    def place(self) -> str:
        """Such as ``rank 5 on node-b``; empty: not at one place."""
        if self.rank < 0:
            return self.host
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


class Decided(Fact, frozen=True, tag="decided"):
    """Somebody, mostly the driver, decided something.

    Attributes:
        by: who; a person's name where it was one.
        advised: it was only said, not done.
    """

    what: str
    why: str
    by: str = "driver"
    advised: bool = False


class Took(Fact, frozen=True, tag="took"):
    """A phase of the recovery, from `unix_s` on, took so long."""

    phase: str
    seconds: float


class Lost(Fact, frozen=True, tag="lost"):
    """What has to be done again, or is gone.

    Attributes:
        from_step, to_step: training was at the one and goes on from the other.
        seconds: of all ranks' time together, as far as it is known; negative: it is not.
        what: anything else that is gone, such as ``node-b``.
    """

    from_step: int = -1
    to_step: int = -1
    seconds: float = -1.0
    what: str = ""

    @property
    def steps(self) -> int:
        """To be done again."""
        return max(self.from_step - self.to_step, 0) if self.to_step >= 0 else 0


class Outcome(Fact, frozen=True, tag="outcome"):
    """How it ended.

    Attributes:
        summary: in a few words, the title of the page, such as ``rank 5 was killed; restarted in place``.
        to_do: what a person should do; empty: nothing.
    """

    result: Result
    summary: str
    to_do: list[str] = []


AnyFact = Seen | Decided | Took | Lost | Outcome


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of them.

    Attributes:
        number: of the job's incidents, from 1.
        attempt: in which it began.
        facts: in order.
        evidence: names of the files in the folder beside the page.
    """

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
    def outcome(self) -> Outcome | None:
        """How it ended; None: it has not yet."""
        return next((fact for fact in reversed(self.facts) if isinstance(fact, Outcome)), None)

    @property
    def seconds(self) -> float | None:
        """From the first fact to the end; None: it has not ended."""
        return None if self.outcome is None else max(self.outcome.unix_s - self.began_unix_s, 0.0)

    @property
    def lost_steps(self) -> int:
        """To be done again."""
        return sum(fact.steps for fact in self.facts if isinstance(fact, Lost))

    @property
    def seen(self) -> list[Seen]:
        """What was seen: first what is wrong by itself, then the rest; of each in order."""
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
