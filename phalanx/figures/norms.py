"""Norms of each layer's weights, gradients or activations from step to step: where a run begins to go wrong."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from phalanx.figures.series import packed
from phalanx.figures.style import SEQUENTIAL, Figure, Row, axis, empty, figure

_MOST_COLUMNS = 1000
_MOST_MARKS = 500


def layer_norms(table: pa.Table, quantity: str, *, most_columns: int = _MOST_COLUMNS) -> Figure:
    """A heat map of layers and steps, with colours by the logarithm; what is not finite has a cross.

    Of more than `most_columns` steps, those in a row share a column, which shows the largest norm of them.

    Args:
        table: `step`, `layer` (number or name), `quantity` and `value`.
        quantity: which one, such as ``gradient``.
    """
    of_quantity = table.filter(pc.equal(table["quantity"].cast(pa.string()), quantity))
    title = f"Norms of {quantity} by layer"
    if not of_quantity.num_rows:
        return empty(title, f"no norms of {quantity} were written down")
    steps, layers, z, broken = _grid(of_quantity, most_columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.where(z > 0, np.log10(z), np.nan)
    known = logarithms[np.isfinite(logarithms)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if high - low < 0.1:
        low, high = low - 0.5, high + 0.5
    ticks = np.linspace(low, high, 5)
    heatmap = {
        "type": "heatmap",
        "x": packed(steps),
        "y": layers,
        "z": packed(logarithms.astype(np.float32)),
        "customdata": packed(z.astype(np.float32)),
        "zmin": low,
        "zmax": high,
        "colorscale": SEQUENTIAL,
        "colorbar": {
            "title": {"text": "norm"},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": ticks.tolist(),
            "ticktext": [f"{10**tick:.2g}" for tick in ticks],
        },
        "hovertemplate": "layer %{y}, step %{x}: %{customdata:.4g}<extra></extra>",
    }
    told = _told(z, layers, broken)
    return figure(
        [heatmap, *_crosses(broken, steps, layers)],
        f"{title}: {told}",
        height=min(max(150 + 18 * len(layers), 260), 700),
        description=f"{title} over steps {steps[0]} to {steps[-1]}: {told}",
        xaxis=axis("step", showgrid=False),
        yaxis=axis("layer", type="category", categoryorder="array", categoryarray=layers, showgrid=False),
    )


def _grid(table: pa.Table, most_columns: int) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Steps, layers, the largest finite value of each cell (layers, steps), and where one was not finite."""
    all_steps, of_step = np.unique(table["step"].to_numpy(), return_inverse=True)
    texts = table["layer"].cast(pa.string()).to_numpy(zero_copy_only=False)
    names, of_layer = np.unique(texts.astype(str), return_inverse=True)
    order = sorted(range(len(names)), key=lambda i: _natural(str(names[i])))
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    per_column = -(-len(all_steps) // most_columns)
    columns = -(-len(all_steps) // per_column)
    cell = rank[of_layer] * columns + of_step // per_column
    values = np.asarray(table["value"].to_numpy(zero_copy_only=False), float)
    is_finite = np.isfinite(values)
    z = np.full(len(names) * columns, -np.inf)
    np.maximum.at(z, cell[is_finite], values[is_finite])
    broken = np.zeros(len(z), bool)
    broken[cell[~is_finite & table["value"].is_valid().to_numpy(zero_copy_only=False)]] = True
    shape = len(names), columns
    return (
        all_steps[::per_column],
        [str(names[i]) for i in order],
        np.where(np.isneginf(z), np.nan, z).reshape(shape),
        broken.reshape(shape),
    )


def _natural(name: str) -> list[int | str]:
    """``blocks.2`` comes before ``blocks.10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _crosses(broken: np.ndarray, steps: np.ndarray, layers: list[str]) -> list[Row]:
    rows, columns = np.nonzero(broken)
    if not len(rows):
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "not finite",
            "x": steps[columns[:_MOST_MARKS]].tolist(),
            "y": [layers[row] for row in rows[:_MOST_MARKS]],
            "marker": {"symbol": "x", "size": 9, "color": "#D55E00", "line": {"width": 1, "color": "#FFFFFF"}},
            "hovertemplate": "layer %{y}, step %{x}: not finite<extra></extra>",
        }
    ]


def _told(z: np.ndarray, layers: list[str], broken: np.ndarray) -> str:
    if broken.any():
        first = int(np.argmax(broken.any(axis=0)))
        return f"not finite first in layer {layers[int(np.argmax(broken[:, first]))]}"
    if not np.isfinite(z).any():
        return "no finite value"
    row, _ = np.unravel_index(int(np.nanargmax(z)), z.shape)
    return f"largest {np.nanmax(z):.3g} in layer {layers[int(row)]}, smallest {np.nanmin(z):.3g}"
