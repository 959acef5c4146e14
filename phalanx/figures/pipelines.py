"""What each rank of a pipeline does when, as a picture."""

from __future__ import annotations

import math

from phalanx.figures.style import Figure, axis, figure
from phalanx.parallel.pipeline.tables import Kind
from phalanx.parallel.pipeline.timeline import Timeline

# Light for every other chunk of a rank, as the papers draw it.
_COLORS: dict[Kind, tuple[str, str]] = {
    "F": ("#0072B2", "#7FB8D8"),
    "B": ("#009E73", "#7FCEB9"),
    "I": ("#56B4E9", "#ABDAF4"),
    "W": ("#E69F00", "#F2CF80"),
}
_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_WAITS = "rgba(127,127,127,0.12)"
# Columns of the shortest action, and cells of a drawing at most: more only make its page larger.
_PER_ACTION = 4
_CELLS = 40_000


def pipeline_timeline(timeline: Timeline, title: str, unit: str, per_unit: float = 1.0) -> Figure:
    """One step of a schedule: ranks as rows, time as columns.

    Args:
        title: says what of the step is waiting.
        unit: of time, as the axis says it.
        per_unit: how much of the timeline's own unit that is.
    """
    table, columns = timeline.table, _columns(timeline)
    width = timeline.length / columns
    kinds = sorted({action.kind for row in table.actions for action in row}, key="FBIW".index)
    cells = [[0] * columns for _ in timeline.ranks]
    texts = [["waits"] * columns for _ in timeline.ranks]
    for row, text, timed in zip(cells, texts, timeline.ranks, strict=True):
        for action, begin, end in timed:
            odd = action.stage // table.ranks % 2
            span = slice(round(begin / width), round(end / width))
            count = span.stop - span.start
            row[span] = [1 + 2 * kinds.index(action.kind) + odd] * count
            text[span] = [f"{_NAMES[action.kind]} {action.micro_batch}, stage {action.stage}"] * count
    end, drawn_width = timeline.length / per_unit, width / per_unit
    heatmap = _heatmap(cells, texts, kinds) | {"x0": drawn_width / 2, "dx": drawn_width}
    return figure(
        [heatmap, *(_legend(kind) for kind in kinds)],
        title,
        height=110 + max(22 * len(cells), 100) if len(cells) <= 24 else 640,
        xaxis=axis(unit, showgrid=False, range=[0, end]),
        yaxis=axis("pipeline rank", autorange="reversed", showgrid=False, dtick=max(1, len(cells) // 8)),
    )


def _columns(timeline: Timeline) -> int:
    """So many that every action has some; where that would be too many cells, they share the step evenly."""
    shortest = min(end - begin for row in timeline.ranks for _, begin, end in row)
    wanted = math.ceil(timeline.length / shortest * _PER_ACTION)
    if shortest == 1 and float(timeline.length).is_integer():  # in theory, where times are whole
        wanted = int(timeline.length)
    return max(min(wanted, _CELLS // len(timeline.ranks)), 1)


def _heatmap(cells: list[list[int]], texts: list[list[str]], kinds: list[Kind]) -> dict[str, object]:
    colors = [_WAITS, *(color for kind in kinds for color in _COLORS[kind])]
    count = len(colors)
    # Plotly's scales are continuous: each colour holds from one bound to the next.
    scale = [[(number + step) / count, color] for number, color in enumerate(colors) for step in (0, 1)]
    return {
        "type": "heatmap",
        "z": cells,
        "text": texts,
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": scale,
        "showscale": False,
        "ygap": 2,
        "hovertemplate": "rank %{y}, at %{x:.4g}<br>%{text}<extra></extra>",
    }


def _legend(kind: Kind) -> dict[str, object]:
    """An entry of the legend, which a heat map has none of."""
    marker = {"color": _COLORS[kind][0], "symbol": "square", "size": 10}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": _NAMES[kind], "marker": marker}
