"""What every judge of this room returns: who, what, since when, how sure, why, and what to do next.

    verdict = some_judge(context, policy)
    print(verdict.sentence)
    json.dumps(verdict.as_json())

A judge is a pure function from tables (its context) and numbers that a user may set (its policy) to a `JudgeVerdict`.
Where evidence is missing it abstains: it says what is missing and how to get it, and names nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

CulpritKind = Literal["host", "rank", "stage", "group", "operation", "batch", "tensor", "program", "job"]

Advice = Literal["none", "watch", "check", "exclude", "evict", "program"]
"""What a driver or a person may do about it: nothing; look again; run `phalanx check` on the hosts; leave them out of
later jobs; take them out of this one; change the program, its data or its layout, since no machine is at fault."""

MACHINE_ADVICE: tuple[Advice, ...] = ("check", "exclude", "evict")
"""Only these are about machines: a verdict without them blames none."""


LACKING_METRICS = "lacking_metrics"
"""Figure of what is known of a machine only by metrics that vanished: how many."""

OF_A_FAULT = ("faults that", "confidence is", "its exporters answer", "all of its exporters")
"""Beginnings of the reasons of the judge of machines that speak of a fault: where there is none, they are left out."""

_WORDS: tuple[CulpritKind, ...] = ("rank", "stage", "group", "job")
"""Kinds whose names begin with a word, not with what somebody called them."""


@dataclass(frozen=True)
class Culprit:
    """One of those that are to blame.

    Attributes:
        kind: what it is.
        name: as logs and dashboards name it: ``h3``, ``12``, ``stage 3``, ``shard-1``.
        ranks: of the job, that it stands for.
        hosts: where they are.
    """

    kind: CulpritKind
    name: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Onset:
    """Since when; what is unknown is None."""

    unix_s: float | None = None
    step: int | None = None

    def __str__(self) -> str:
        when = "" if self.unix_s is None else datetime.fromtimestamp(self.unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        step = "" if self.step is None else f"step {self.step:,}"
        return " (".join(part for part in (step, when) if part) + (")" if step and when else "")


@dataclass(frozen=True)
class Detection:
    """One thing that is wrong.

    Attributes:
        what: its class, in two or three words of the field: ``slow host``, ``unbalanced stage``, ``hang``.
        sentence: who and what, for people; one line without a full stop.
        who: to blame; empty: something is wrong, and the evidence names nobody.
        since: when it began.
        confidence: 0 to 1: how often such a detection is right, by what was measured on labelled cases, or by what the
            evidence excludes.
        why: what it rests on, with figures, the strongest first.
        then: what to do next, in the imperative, the first first; commands in backticks.
        advice: the same for a program.
        figures: numbers that it rests on, by names with units (``slowdown``, ``lost_s``, ``z``).
    """

    what: str
    sentence: str
    who: tuple[Culprit, ...] = ()
    since: Onset = Onset()
    confidence: float = 0.5
    why: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    advice: Advice = "watch"
    figures: Mapping[str, float | int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.what and self.sentence and not self.sentence.endswith("."), self
        assert 0 <= self.confidence <= 1, self

    @property
    def blamed_hosts(self) -> tuple[str, ...]:
        """Hosts that a driver may act upon; empty where no machine is at fault."""
        return named(self, "hosts") if self.advice in MACHINE_ADVICE else ()

    @property
    def blamed_ranks(self) -> tuple[int, ...]:
        """Ranks of the same."""
        return named(self, "ranks") if self.advice in MACHINE_ADVICE else ()


@dataclass(frozen=True)
class JudgeVerdict:
    """What one judge found.

    Attributes:
        judge: its name, as in ``phalanx detect NAME``.
        detections: the gravest first.
        abstains: why nothing can be said about something, each with the cure after a semicolon; may stand beside
            detections.
        looked_at: what was judged, for the line of a healthy job: ``44 steps of 16 ranks``.
        tables: further results by name, for ``--json`` and for figures: rows of plain values.
    """

    judge: str
    detections: tuple[Detection, ...] = ()
    abstains: tuple[str, ...] = ()
    looked_at: str = ""
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The first line for people."""
        if self.detections:
            first = self.detections[0]
            text = first.sentence
            # A host or a tensor keeps its name as logs have it; "stage 3" is a word.
            is_name = any(
                text.startswith(name)
                for one in first.who
                for name in (*one.hosts, *(() if one.kind in _WORDS else (one.name,)))
                if name
            )
            return f"{text if is_name else text[0].upper() + text[1:]}."
        looked = f" ({self.looked_at})" if self.looked_at else ""
        if self.abstains:
            return f"No verdict{looked}: {'; '.join(self.abstains)}."
        return f"Nothing wrong was found{looked}."

    @property
    def blamed_hosts(self) -> tuple[str, ...]:
        """Hosts that a driver may act upon, the gravest first."""
        return tuple(dict.fromkeys(host for found in self.detections for host in found.blamed_hosts))

    @property
    def blamed_ranks(self) -> tuple[int, ...]:
        """Ranks of the same."""
        return tuple(dict.fromkeys(rank for found in self.detections for rank in found.blamed_ranks))

    @property
    def exit_status(self) -> int:
        """Of ``phalanx detect``: 0 nothing wrong, 1 something is, 3 nothing can be said (2 is bad input)."""
        return 1 if self.detections else 3 if self.abstains else 0

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite become None."""
        return {
            "judge": self.judge,
            "sentence": self.sentence,
            "detections": [_plain(found) for found in self.detections],
            "abstains": list(self.abstains),
            "looked_at": self.looked_at,
            "tables": {name: [_plain(row) for row in rows] for name, rows in self.tables.items()},
        }


def named(found: Detection, which: Literal["hosts", "ranks"]) -> tuple[Any, ...]:
    """Hosts or ranks of all culprits, each once."""
    return tuple(dict.fromkeys(one for culprit in found.who for one in getattr(culprit, which)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Sequence):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return _plain(value.item())  # a number of numpy
