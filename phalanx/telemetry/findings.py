"""A cause that makes a step longer than its work, as a value: what it costs, who is to blame, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.telemetry.evidence import Evidence

Name = Literal[
    "diverged",
    "slow rank",
    "slow link",
    "data",
    "unbalanced stages",
    "pipeline bubble",
    "communication",
    "late ranks",
    "optimizer",
    "checkpoint",
    "irregular steps",
    "slower and slower",
    "outside spans",
]
Sureness = Literal["certain", "likely", "possible"]

LEAST_SHARE = 0.01
"""Of a step, that a finding must cost to be said."""

PLAN_SEARCH = "phalanx plan CONFIG --cluster CLUSTER --search"

_MOST_NAMED = 8


@dataclass(frozen=True)
class Action:
    """What to do next; `command` may be empty."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: which one.
        sentence: what it is and who is to blame, without a full stop.
        lost_s: seconds of a step that it costs at most.
        share: of the step.
        sureness: and `because`: what it rests on.
        ranks: to blame; empty: no rank in particular.
        hosts: of those.
        group: whose communication it is about; empty: none.
        steps: that show it, to look at.
        actions: what to do, the first first.
    """

    cause: Name
    sentence: str
    lost_s: float
    share: float
    sureness: Sureness
    because: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str = ""
    steps: tuple[int, ...] = ()
    actions: tuple[Action, ...] = ()


def waits_by_axis(evidence: Evidence) -> dict[str, list[dict[str, Any]]]:
    """Waits of groups other than the pipeline's, by axis."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in evidence.waits:
        if "pipeline" not in row["group"].split("·"):
            rows.setdefault(row["group"], []).append(row)
    return rows


def named_ranks(ranks: Sequence[int], evidence: Evidence) -> str:
    """Ranks by number with their hosts; a whole host by its name."""
    hosts = list(dict.fromkeys(filter(None, (evidence.host_of.get(rank, "") for rank in ranks))))
    if len(ranks) == 1:
        return f"rank {ranks[0]}" + (f" (host {hosts[0]})" if hosts else "")
    if len(hosts) == 1:
        return f"host {hosts[0]} (ranks {listed(ranks)})"
    where = f" (hosts {', '.join(hosts[:4])}{' …' if len(hosts) > 4 else ''})" if hosts else ""
    return f"ranks {listed(ranks)}{where}"


def listed(ranks: Sequence[int]) -> str:
    """The first few by number, and how many more."""
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    return shown + (f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else "")


def verb_of(ranks: Sequence[int], one: str, many: str) -> str:
    """The form that fits their number."""
    return one if len(ranks) == 1 else many
