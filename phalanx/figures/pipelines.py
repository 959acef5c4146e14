"""What each rank of a pipeline does when, as a picture."""

from __future__ import annotations

from phalanx.figures.style import Figure, axis, figure
from phalanx.parallel.pipeline.tables import Kind, Table
from phalanx.parallel.pipeline.timeline import simulate

# Light for every other chunk of a rank, as the papers draw it.
_COLORS: dict[Kind, tuple[str, str]] = {
    "F": ("#0072B2", "#7FB8D8"),
    "B": ("#009E73", "#7FCEB9"),
    "I": ("#56B4E9", "#ABDAF4"),
    "W": ("#E69F00", "#F2CF80"),
}
_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_WAITS = "rgba(127,127,127,0.12)"


def pipeline_timeline(table: Table, note: str = "") -> Figure:
    """One step of a schedule: ranks as rows, time as columns, in units of a forward pass of one stage.

    Args:
        note: said after the title, such as that only a part of the micro-batches is drawn.
    """
    timeline = simulate(table)
    kinds = sorted({action.kind for row in table.actions for action in row}, key="FBIW".index)
    cells = [[0] * timeline.length for _ in timeline.ranks]
    texts = [["waits"] * timeline.length for _ in timeline.ranks]
    for row, text, timed in zip(cells, texts, timeline.ranks, strict=True):
        for action, begin, end in timed:
            odd = action.stage // table.ranks % 2
            row[begin:end] = [1 + 2 * kinds.index(action.kind) + odd] * (end - begin)
            text[begin:end] = [f"{_NAMES[action.kind]} {action.micro_batch}, stage {action.stage}"] * (end - begin)
    title = f"{table.schedule}: {100 * timeline.bubble_fraction:.1f} % of the ranks' time is waiting"
    return figure(
        [_heatmap(cells, texts, kinds), *(_legend(kind) for kind in kinds)],
        f"{title}{f' ({note})' if note else ''}",
        height=110 + max(22 * len(cells), 100) if len(cells) <= 24 else 640,
        xaxis=axis("units of a forward pass of one stage", showgrid=False, range=[-0.5, timeline.length - 0.5]),
        yaxis=axis("pipeline rank", autorange="reversed", showgrid=False, dtick=max(1, len(cells) // 8)),
    )


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
        "hovertemplate": "rank %{y}, unit %{x}<br>%{text}<extra></extra>",
    }


def _legend(kind: Kind) -> dict[str, object]:
    """An entry of the legend, which a heat map has none of."""
    marker = {"color": _COLORS[kind][0], "symbol": "square", "size": 10}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": _NAMES[kind], "marker": marker}
