"""A schedule as text: ranks as rows, time as columns, as the papers draw it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from phalanx.parallel.pipeline.tables import Action, Table
from phalanx.parallel.pipeline.timeline import Timed, Timeline, simulate

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
    """One step of `table` in units of a forward pass.

    ``F3`` is the forward pass of micro-batch 3, ``B3─`` its backward pass, ``I3`` and ``W3`` the two halves of it; the
    rank's second chunk (and fourth, …) is written in small letters; dots are waiting. Time that does not fit into
    `width` goes on in a band below; where that makes more than `bands`, bands in the middle are left out, and so are
    ranks in the middle where there are more than 16.

    Args:
        width: columns of the terminal.
        bands: most bands.
        markup: with rich's markup, in the papers' colours.
    """
    timeline = simulate(table)
    length = int(timeline.length)  # in theory all times are whole
    rows = [_units(row, length) for row in timeline.ranks]
    size = 1 + len(str(table.micro_batches - 1))
    label = len(f"rank {table.ranks - 1}  ")
    most = max((width - label) // size, _TICK)
    per_band = -(-length // -(-length // most))
    starts = list(range(0, length, per_band))
    shown = starts if len(starts) <= bands else [*starts[: bands - 1], starts[-1]]
    lines = [_title(timeline)]
    for before, start in zip([-per_band, *shown], shown, strict=False):
        if start - before > per_band:
            lines += ["", f"… {start - before - per_band} units of time like these …"]
        end = min(start + per_band, length)
        lines += ["", _ticks(start, end, size, label), *_band(table, rows, range(start, end), size, markup)]
    return "\n".join([*lines, "", _legend(table, markup)])


def _units(row: Sequence[Timed], length: int) -> list[_Unit]:
    units: list[_Unit] = [None] * length
    for action, begin, end in row:
        units[int(begin) : int(end)] = [(action, at == begin) for at in range(int(begin), int(end))]
    return units


def _title(timeline: Timeline) -> str:
    table = timeline.table
    chunks = table.placement.chunks
    parts = [
        f"{table.schedule}: {table.ranks} rank{'s' * (table.ranks > 1)}",
        f"{chunks} chunks each" if chunks > 1 else "",
        f"{table.micro_batches} micro-batch{'es' * (table.micro_batches > 1)}",
        f"{timeline.length} units of time, {100 * timeline.bubble_fraction:.1f} % bubble",
    ]
    return ", ".join(part for part in parts if part)


def _ticks(start: int, end: int, size: int, label: int) -> str:
    marks = [str(at) if at % _TICK == 0 else "" for at in range(start, end)]
    return ("time".ljust(label) + "".join(mark.ljust(size) for mark in marks)).rstrip()


def _band(table: Table, rows: Sequence[Sequence[_Unit]], span: range, size: int, markup: bool) -> list[str]:
    """The rows of one stretch of time, the middle ones left out where there are too many."""
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
    cells = [(_style(table, unit), _cell(table, unit, size)) for unit in units]
    if not markup:
        return "".join(text for _, text in cells).rstrip()
    return "".join(
        f"[{style}]{''.join(text for _, text in run)}[/]" for style, run in groupby(cells, lambda cell: cell[0])
    )


def _cell(table: Table, unit: _Unit, size: int) -> str:
    if unit is None:
        return "·".ljust(size)
    action, begins = unit
    if not begins:
        return "─" * (size - 1) + " "
    letter = action.kind.lower() if _odd(table, action) else action.kind
    return f"{letter}{action.micro_batch}".ljust(size)


def _style(table: Table, unit: _Unit) -> str:
    return "dim" if unit is None else _STYLES[unit[0].kind][_odd(table, unit[0])]


def _odd(table: Table, action: Action) -> int:
    """Whether the action is of an odd chunk of its rank."""
    return action.stage // table.ranks % 2


def _legend(table: Table, markup: bool) -> str:
    kinds = sorted({action.kind for row in table.actions for action in row}, key="FBIW".index)
    names = [f"[{_STYLES[kind][0]}]{kind}[/] {_NAMES[kind]}" if markup else f"{kind} {_NAMES[kind]}" for kind in kinds]
    if table.placement.chunks > 1:
        names.append("small letters: every other chunk")
    return " · ".join(names)
