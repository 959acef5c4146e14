"""When ranks compute and when they wait: as long as passes are given to take, or as they would in theory. Torch-free.

Unit of time in theory: one forward pass of one stage. A backward pass takes two, half of it for the gradient of the
input and half for that of the weights; sending takes none. The fractions are those of arXiv 2104.04473, section 2.2,
with idle time over all time (that paper divides by useful time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.parallel.pipeline.tables import Action, Kind, Table

DURATIONS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Units of time that each kind of action takes, in theory."""


@dataclass(frozen=True)
class Lengths:
    """How long things take, in one unit.

    Attributes:
        of: an action.
        send: its message to the stage that needs it, if that is on another rank.
        blocking: a rank does nothing else while it sends.
    """

    of: Callable[[Action], float]
    send: float = 0
    blocking: bool = False


IN_THEORY = Lengths(lambda action: DURATIONS[action.kind])


class Timed(NamedTuple):
    """An action and when it runs."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step in time: the timed actions of every rank, in order."""

    table: Table
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def length(self) -> float:
        """From the first forward pass to the end of the last action."""
        return max(timed[-1].end for timed in self.ranks if timed)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait."""
        busy = sum(timed.end - timed.begin for row in self.ranks for timed in row)
        return 1 - busy / (self.length * len(self.ranks))


def simulate(table: Table, lengths: Lengths = IN_THEORY) -> Timeline:
    """Run `table`, each rank in its order and each action as soon as what it needs is there.

    Raises:
        ValueError: ranks wait for one another for ever (never with a table of `make_table`).
    """
    ended: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in table.actions]
    moved = True
    while moved:
        moved = False
        for row, actions in zip(rows, table.actions, strict=True):
            before = len(row)
            _advance(table, row, actions, ended, lengths)
            moved |= len(row) > before
    stuck = [actions[len(row)] for row, actions in zip(rows, table.actions, strict=True) if len(row) < len(actions)]
    if stuck:
        raise ValueError(f"these actions wait for one another: {', '.join(map(str, stuck))}")
    return Timeline(table, tuple(map(tuple, rows)))


def _advance(
    table: Table, row: list[Timed], actions: tuple[Action, ...], ended: dict[Action, float], lengths: Lengths
) -> None:
    """Time the next actions of one rank, until one needs what is not there yet."""
    while len(row) < len(actions):
        action = actions[len(row)]
        needed = _needed(table, action)
        came = [ended[one] + _sent(table, one, lengths) * (action.kind != "W") for one in needed if one in ended]
        if needed and not came:
            return
        free = row[-1].end + lengths.blocking * _sent(table, row[-1].action, lengths) if row else 0
        begin = max([free, *came])
        row.append(Timed(action, begin, begin + lengths.of(action)))
        ended[action] = row[-1].end


def _sent(table: Table, action: Action, lengths: Lengths) -> float:
    """How long its message is on the way; what stays on the rank is not sent."""
    stage, kind, _ = action
    to = stage + 1 if kind == "F" else stage - 1
    inside = kind == "W" or not 0 <= to < table.placement.stages
    return 0 if inside or table.placement.rank_of(to) == table.placement.rank_of(stage) else lengths.send


def _needed(table: Table, action: Action) -> list[Action]:
    """Actions one of which must come first; none where there is nothing to wait for."""
    stage, kind, micro_batch = action
    if kind == "F":
        return [Action(stage - 1, "F", micro_batch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", micro_batch)]
    if stage == table.placement.stages - 1:
        return [Action(stage, "F", micro_batch)]
    return [Action(stage + 1, "B", micro_batch), Action(stage + 1, "I", micro_batch)]
