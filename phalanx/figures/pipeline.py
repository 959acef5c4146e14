"""A step of a pipeline: the schedule as planned, and as it really ran, beside each other on one axis of time."""

from __future__ import annotations

import math

from phalanx.figures.style import Figure, axis, empty, figure
from phalanx.parallel.pipeline.schedules import Kind
from phalanx.parallel.pipeline.timeline import Timeline

# Light for every other chunk of a rank, as the papers draw it.
_COLORS: dict[Kind, tuple[str, str]] = {
    "F": ("#0072B2", "#7FB8D8"),
    "B": ("#009E73", "#7FCEB9"),
    "I": ("#56B4E9", "#ABDAF4"),
    "W": ("#E69F00", "#F2CF80"),
}
NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_WAITS = "rgba(127,127,127,0.12)"
# Columns of the shortest action, and cells of a drawing at most: more only make its page larger.
_PER_ACTION = 4
_CELLS = 40_000
_MOST_LETTERS = 40


def pipeline_timeline(timeline: Timeline, title: str, unit: str, per_unit: float = 1.0) -> Figure:
    """One step of a schedule: ranks as rows, time as columns.

    Args:
        title: says what of the step is waiting.
        unit: of time, as the axis says it.
        per_unit: how much of the timeline's own unit that is.
    """
    kinds = _kinds(timeline)
    heatmap = _drawn(timeline, kinds, per_unit)
    return figure(
        [heatmap, *(_legend(kind) for kind in kinds)],
        title,
        height=_height(timeline),
        xaxis=axis(unit, showgrid=False, range=[0, timeline.length / per_unit]),
        yaxis=_rank_axis(timeline),
    )


def pipeline_beside_plan(measured: Timeline, planned: Timeline, *, plan_name: str = "as planned") -> Figure:
    """A step as it ran, above, and as it was planned, below, on the same axis.

    Args:
        measured: in seconds (`phalanx.figures.measured_pipeline`).
        planned: in seconds, of the same ranks, such as replayed with measured passes, or what the planner predicts.
        plan_name: what `planned` is, such as ``with even passes`` for a replayed one.
    """
    if not any(measured.ranks):
        return empty("Pipeline", "no forward or backward spans in this step")
    kinds = sorted({*_kinds(measured), *_kinds(planned)}, key="FBIW".index)
    longest = max(measured.length, planned.length)
    per_unit, unit = (1.0, "seconds") if longest >= 1 else (1e-3, "ms")
    above = _drawn(measured, kinds, per_unit)
    below = _drawn(planned, kinds, per_unit) | {"yaxis": "y2"}
    said = (
        f"{measured.length / per_unit:.4g} {unit}, {100 * measured.bubble_fraction:.1f} % bubble, as it ran; "
        f"{planned.length / per_unit:.4g} {unit}, {100 * planned.bubble_fraction:.1f} % {plan_name}"
    )
    names = [
        {"text": text, "x": 0, "y": y, "xref": "paper", "yref": "paper", "showarrow": False, "yanchor": "bottom"}
        | {"xanchor": "left"}
        for text, y in (("as it ran", 0.94), (plan_name, 0.42))
    ]
    return figure(
        [above, below, *_letters(measured, per_unit, "y"), *_letters(planned, per_unit, "y2"), *map(_legend, kinds)],
        f"A step of the pipeline: {said}",
        height=2 * _height(measured),
        description=f"A step of the pipeline on {len(measured.ranks)} pipeline ranks: {said}",
        xaxis=axis(f"{unit} since the first forward pass", showgrid=False, range=[0, longest / per_unit], anchor="y2"),
        yaxis=_rank_axis(measured) | {"domain": [0.52, 0.94]},
        yaxis2=_rank_axis(planned) | {"domain": [0.0, 0.42]},
        annotations=names,
    )


def _kinds(timeline: Timeline) -> list[Kind]:
    return sorted({timed.action.kind for row in timeline.ranks for timed in row}, key="FBIW".index)


def _height(timeline: Timeline) -> int:
    rows = len(timeline.ranks)
    return 110 + max(22 * rows, 100) if rows <= 24 else 640


def _rank_axis(timeline: Timeline) -> dict[str, object]:
    dtick = max(1, len(timeline.ranks) // 8)
    return axis("pipeline rank", autorange="reversed", showgrid=False, dtick=dtick)


def _drawn(timeline: Timeline, kinds: list[Kind], per_unit: float) -> dict[str, object]:
    """The cells of a timeline as a heat map, in units of its figure."""
    table, columns = timeline.table, _columns(timeline)
    width = timeline.length / columns
    cells = [[0] * columns for _ in timeline.ranks]
    texts = [["waits"] * columns for _ in timeline.ranks]
    for row, text, timed in zip(cells, texts, timeline.ranks, strict=True):
        for action, begin, end in timed:
            odd = action.stage // table.ranks % 2
            span = slice(round(begin / width), round(end / width))
            count = span.stop - span.start
            row[span] = [1 + 2 * kinds.index(action.kind) + odd] * count
            text[span] = [f"{NAMES[action.kind]} {action.micro_batch}, stage {action.stage}"] * count
    drawn_width = width / per_unit
    return _heatmap(cells, texts, kinds) | {"x0": drawn_width / 2, "dx": drawn_width}


def _letters(timeline: Timeline, per_unit: float, yaxis: str) -> list[dict[str, object]]:
    """``F3`` in the middle of the forward pass of micro-batch 3, where there is room; so colours say nothing alone."""
    passes = [(rank, timed) for rank, row in enumerate(timeline.ranks) for timed in row]
    if max(map(len, timeline.ranks)) > _MOST_LETTERS:
        return []
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [(begin + end) / 2 / per_unit for _, (_, begin, end) in passes],
            "y": [rank for rank, _ in passes],
            "text": [f"{action.kind}{action.micro_batch}" for _, (action, _, _) in passes],
            "textfont": {"size": 10, "color": "#000000"},
            "yaxis": yaxis,
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _columns(timeline: Timeline) -> int:
    """So many that every action has some; where that would be too many cells, they share the step evenly."""
    shortest = min(end - begin for row in timeline.ranks for _, begin, end in row)
    shortest = max(shortest, timeline.length / _CELLS)  # a span may be shorter than its clock's tick
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
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": NAMES[kind], "marker": marker}
