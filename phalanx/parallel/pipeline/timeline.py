"""When ranks of a pipeline compute and when they wait, as numbers and as a drawing in text.

Passes take as long as they are given to, or as they would in theory.

Unit of time in theory: one forward pass of one stage. A backward pass takes two, half of it for the gradient of the
input and half for that of the weights; sending takes none. The fractions are those of arXiv 2104.04473, section 2.2,
with idle time over all time (that paper divides by useful time).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from phalanx.parallel.pipeline.schedules import Action, Kind, Table

DURATIONS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Units of time that each kind of action takes, in theory."""


@dataclass(frozen=True)
class Lengths:
    """How long things take, in one unit."""

    of: Callable[[Action], float]  # an action
    send: float = 0  # its message to the stage that needs it, if that is on another rank
    blocking: bool = False  # a rank does nothing else while it sends


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


_STYLES = {
    "F": ("black on deep_sky_blue1", "black on light_sky_blue1"),
    "B": ("black on green3", "black on pale_green1"),
    "I": ("black on cyan3", "black on pale_turquoise1"),
    "W": ("black on gold3", "black on light_goldenrod1"),
}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_MOST_RANKS = 16
_TICK = 5

_Unit = tuple[Action, bool] | None
"""What a rank does in one unit of time: the action, and whether it begins here; None: it waits."""


def draw(table: Table, *, width: int = 100, bands: int = 6, markup: bool = False) -> str:
    """One step of `table` in units of a forward pass, at most `width` columns wide.

    ``F3`` is the forward pass of micro-batch 3, ``B3─`` its backward pass, ``I3`` and ``W3`` the two halves of it; the
    rank's second chunk (and fourth, …) is written in small letters; dots are waiting. Time that does not fit goes on in
    a band below; where that makes more than `bands`, bands in the middle are left out, and so are ranks in the middle
    where there are more than 16. `markup` is rich's, in the papers' colours.
    """
    timeline = simulate(table)
    length = int(timeline.length)  # in theory all times are whole
    rows: list[list[_Unit]] = [[None] * length for _ in timeline.ranks]
    for units, timed in zip(rows, timeline.ranks, strict=True):
        for action, begin, stop in timed:
            units[int(begin) : int(stop)] = [(action, at == begin) for at in range(int(begin), int(stop))]
    size = 1 + len(str(table.micro_batches - 1))
    label = len(f"rank {table.ranks - 1}  ")
    most = max((width - label) // size, _TICK)
    per_band = -(-length // -(-length // most))
    starts = list(range(0, length, per_band))
    shown = starts if len(starts) <= bands else [*starts[: bands - 1], starts[-1]]
    chunks = table.placement.chunks
    title = [
        f"{table.schedule}: {table.ranks} rank{'s' * (table.ranks > 1)}",
        *([f"{chunks} chunks each"] if chunks > 1 else []),
        f"{table.micro_batches} micro-batch{'es' * (table.micro_batches > 1)}",
        f"{timeline.length} units of time, {100 * timeline.bubble_fraction:.1f} % bubble",
    ]
    lines = [", ".join(title)]
    for before, start in zip([-per_band, *shown], shown, strict=False):
        if start - before > per_band:
            lines += ["", f"… {start - before - per_band} units of time like these …"]
        span = range(start, min(start + per_band, length))
        ticks = "".join((str(at) if at % _TICK == 0 else "").ljust(size) for at in span)
        lines += ["", ("time".ljust(label) + ticks).rstrip(), *_band(table, rows, span, size, markup)]
    kinds = sorted({action.kind for row in table.actions for action in row}, key="FBIW".index)
    legend = [f"[{_STYLES[kind][0]}]{kind}[/] {_NAMES[kind]}" if markup else f"{kind} {_NAMES[kind]}" for kind in kinds]
    if chunks > 1:
        legend.append("small letters: every other chunk")
    return "\n".join([*lines, "", " · ".join(legend)])


def _band(table: Table, rows: Sequence[Sequence[_Unit]], span: range, size: int, markup: bool) -> list[str]:
    half = _MOST_RANKS // 2
    hidden = range(half, len(rows) - half) if len(rows) > _MOST_RANKS else range(0)
    lines = []
    for rank, row in enumerate(rows):
        label = f"rank {rank}".ljust(len(f"rank {len(rows) - 1}  "))
        if rank not in hidden:
            lines.append(label + _row(table, row[span.start : span.stop], size, markup))
        elif rank == hidden.start:
            lines.append(f"… ranks {hidden.start} to {hidden.stop - 1} …")
    return lines


def _row(table: Table, units: Sequence[_Unit], size: int, markup: bool) -> str:
    """The cells of one rank; markup goes around runs of one style."""
    cells = []
    for unit in units:
        if unit is None:
            cells.append(("dim", "·".ljust(size)))
            continue
        (stage, kind, micro_batch), begins = unit
        odd = stage // table.ranks % 2  # whether it is of an odd chunk of the rank
        text = f"{kind.lower() if odd else kind}{micro_batch}".ljust(size) if begins else "─" * (size - 1) + " "
        cells.append((_STYLES[kind][odd], text))
    if not markup:
        return "".join(text for _, text in cells).rstrip()
    return "".join(
        f"[{style}]{''.join(text for _, text in run)}[/]" for style, run in groupby(cells, lambda cell: cell[0])
    )
